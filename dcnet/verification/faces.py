"""Faces of people whom nobody trained on: what a network of the data set `lfw` makes of LFW's lists."""

from pathlib import Path

import torch
from torch import Tensor, nn

from dcnet.data.image_files import labels_of
from dcnet.data.lfw import find_lfw, trained_people
from dcnet.data.registry import data_folder
from dcnet.verification.curves import roc_of_histogram
from dcnet.verification.embeddings import embed
from dcnet.verification.lfw import LfwData
from dcnet.verification.measures import Folds, Record, counted, curve_measures, measured
from dcnet.verification.pairs import Pairs, people_disjoint
from dcnet.verification.scores import pair_scores, score_histogram

DEVELOPMENT, FOLDS = "pairsDevTest", "pairs"
BATCH = 256


def evaluate_faces(model: nn.Module, folder: Path | str | None = None, device: torch.device | str = "cpu") -> Record:
    """How well a network that was trained on `lfw` tells other people apart, as plain values for a record.

    - "development": pairsDevTest, whose people are not in peopleDevTrain, in ten folds that are always the same.
    - "development_all": every pair of its images, for rates that 500 impostor pairs are too few for.
    - "unseen": the ten folds of pairs without the pairs that have a person who was trained on, which leaves more
      different pairs than same ones: take the balanced accuracy.

    Args:
        model: takes images of 96 x 96, and has `features`.
        folder: with the data set `lfw`; None as in `dcnet.data.load_dataset`.
        device: where it is computed.
    """
    data = LfwData(find_lfw(data_folder(folder)).root)
    development = data.pairs(DEVELOPMENT)
    unseen = people_disjoint(data.pairs(FOLDS), trained_people(data))
    # Images of both lists once.
    names = tuple(dict.fromkeys(development.names + unseen.pairs.names))
    embeddings = embed(model, data.faces(names).stacked().split(BATCH), device, names=names)
    place = {name: at for at, name in enumerate(names)}
    return {
        "images": len(names),
        "development": {"list": DEVELOPMENT, **_of_pairs(embeddings, development, place)},
        "development_all": _of_all(embeddings, development, place),
        "unseen": {"list": FOLDS, "left_out": unseen.left_out, **_of_pairs(embeddings, unseen.pairs, place)},
    }


def _of_pairs(embeddings: Tensor, pairs: Pairs, place: dict[str, int]) -> Record:
    at = _places(pairs, place)
    scores, folds = pair_scores(embeddings, at[pairs.first], at[pairs.second]), Folds.of(pairs)
    return {**counted(pairs), "fold_note": folds.note, **measured(scores, pairs.same, folds.numbers)}


def _of_all(embeddings: Tensor, pairs: Pairs, place: dict[str, int]) -> Record:
    """Of every two images that are in the pairs, by the people they show."""
    at = _places(pairs, place).to(embeddings.device)
    histogram = score_histogram(embeddings[at], labels_of(pairs.names)[0])
    same, different = int(histogram.genuine.sum()), int(histogram.impostor.sum())
    counts = {"pairs": same + different, "same": same, "different": different}
    return {**counts, **curve_measures(roc_of_histogram(histogram))}


def _places(pairs: Pairs, place: dict[str, int]) -> Tensor:
    """Where the embeddings of the images of the pairs are."""
    return torch.tensor([place[name] for name in pairs.names], device="cpu")
