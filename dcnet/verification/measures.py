"""How well pairs are told apart, as plain values: one shape for every record and every report."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcnet.verification.curves import Roc, roc
from dcnet.verification.pairs import Pairs, labels_by_folder
from dcnet.verification.protocol import FoldAccuracy, fold_accuracy, make_folds
from dcnet.verification.retrieval import retrieve

Record = dict[str, Any]
RATES = (1e-1, 1e-2, 1e-3, 1e-4)


@dataclass(frozen=True)
class Folds:
    """The fold of each pair, int64 [P], and a note where they are not those of the list."""

    numbers: Tensor
    note: str = ""

    @classmethod
    def of(cls, pairs: Pairs) -> "Folds":
        """Those of the list, if each has pairs of both kinds, without which it has no balanced accuracy."""
        if pairs.folds is None:
            return cls(make_folds(pairs.same), "the folds are made by chance, since the list has none")
        kinds = [pairs.same[pairs.folds == fold] for fold in pairs.folds.unique()]
        if len(kinds) == 1:
            why = "all pairs are in one fold of the list"
        elif not all(kind.any() and not kind.all() for kind in kinds):
            why = "one of the list has one kind of pairs"
        else:
            return cls(pairs.folds)
        return cls(make_folds(pairs.same), f"the folds are made by chance, since {why}")


def counted(pairs: Pairs) -> Record:
    """How many pairs of each kind there are."""
    same = int(pairs.same.sum())
    return {"pairs": len(pairs), "same": same, "different": len(pairs) - same}


def measured(scores: Tensor, same: Tensor, folds: Tensor, curve: Roc | None = None) -> Record:
    """All measures of pairs by their scores, answers and folds [P], as shares from 0 to 1.

    The curve is that of scores and answers, for whoever has it already.
    """
    curve = curve or roc(scores, same)
    return {
        "folds": len(folds.unique()),
        "accuracy": _accuracy(fold_accuracy(scores, same, folds)),
        "balanced_accuracy": _accuracy(fold_accuracy(scores, same, folds, balanced=True)),
        **curve_measures(curve),
    }


def curve_measures(curve: Roc) -> Record:
    """What needs no folds."""
    return {
        "auc": curve.auc(),
        "eer": curve.eer(),
        "tar_at_far": [vars(curve.tar_at_far(rate)) for rate in RATES],
    }


def retrieval_measures(embeddings: Tensor, pairs: Pairs) -> Record | None:
    """Recall@k and mAP of the images of the pairs among themselves; None where their folders are no classes."""
    labels = labels_by_folder(pairs)
    if labels is None:
        return None
    found = retrieve(embeddings, labels)
    return {**vars(found), "recall": [{"k": k, "recall": share} for k, share in found.recall.items()]}


def _accuracy(found: FoldAccuracy) -> Record:
    return {
        "mean": found.mean,
        "standard_error": found.standard_error,
        "threshold": float(torch.tensor(found.thresholds, device="cpu").mean()),
        "folds": list(found.accuracies),
        "thresholds": list(found.thresholds),
    }
