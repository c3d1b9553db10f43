"""Quality of images by the norms of their features: corrected scores, and errors without images of low norm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcnet.checks import Numbers, as_tensor, check_number
from dcnet.verification.embeddings import pair_indices
from dcnet.verification.roc_curve import check_rate, check_scores, roc, unresolved

# Limits of Newton's method: the number of steps, the longest step, and one that ends the search.
STEPS, LONGEST, CONVERGED = 100, 2.0, 1e-10
# Added to the diagonal of the Hessian, so that it is regular if both kinds of pairs are separable.
RIDGE = 1e-6
DISCARDED = (0.0, 0.05, 0.1, 0.2)


def norms_of(embeddings: Numbers) -> Tensor:
    """The norms of embeddings [N, D], float64 [N] on the CPU."""
    embeddings = as_tensor(embeddings, "embeddings").detach()
    if embeddings.dim() != 2:
        raise ValueError(f"embeddings must be [N, D], not {list(embeddings.shape)}")
    return torch.linalg.vector_norm(embeddings.double(), dim=1).cpu()


def pair_quality(norms: Numbers, first: Numbers, second: Numbers) -> Tensor:
    """The logarithm of the smaller norm of each pair, float64 [P], since the worse image limits a comparison.

    Args:
        norms: norms of the embeddings, [N], above 0.
        first: indices of the first image of each pair, integers [P].
        second: indices of the second image.
    """
    return _smaller(_check_norms(norms), first, second).log()


def _check_norms(norms: Numbers) -> Tensor:
    norms = as_tensor(norms, "norms").detach().cpu().double()
    if norms.dim() != 1 or not len(norms) or not ((norms > 0) & norms.isfinite()).all():
        found = f" from {norms.min():g}" if norms.numel() else ""
        raise ValueError(f"norms must be finite numbers above 0 [N], not {list(norms.shape)}{found}")
    return norms


def _smaller(values: Tensor, first: Numbers, second: Numbers) -> Tensor:
    """The smaller value of the two images of each pair, [P]."""
    left, right = pair_indices(first, second, len(values))
    return torch.minimum(values[left.cpu()], values[right.cpu()])


@dataclass(frozen=True)
class QualityScore:
    """A score corrected for quality: cosine + weight (q - center), q the logarithm of the smaller norm of the pair.

    Args:
        weight: how much the score changes per unit of q; 0 for the cosine alone.
        center: the q at which the score is the cosine.
    """

    weight: float
    center: float

    def __post_init__(self) -> None:
        check_number("weight of a quality score", self.weight)
        check_number("center of a quality score", self.center)

    def __call__(self, scores: Numbers, quality: Numbers) -> Tensor:
        """The corrected scores float64 [P] of cosines [P] and `pair_quality` [P]."""
        scores, quality = (as_tensor(part, "scores").detach().cpu().double() for part in (scores, quality))
        return scores + self.weight * (quality - self.center)


def fit_quality(scores: Numbers, same: Numbers, quality: Numbers) -> QualityScore:
    """The weight of a logistic regression of the answers on cosine and quality, in which both kinds count equally.

    The center is the mean quality. The weight is 0 if scores do not separate the kinds, or if all qualities are equal.

    Args:
        scores: cosines of the pairs, [P].
        same: whether the pairs are genuine, [P].
        quality: `pair_quality` of the pairs, [P].
    """
    scores, same = check_scores(scores, same)
    quality = as_tensor(quality, "quality").detach().cpu().double()
    if quality.shape != scores.shape or not quality.isfinite().all():
        raise ValueError(f"quality must be finite [{len(scores)}], one value per pair, not {list(quality.shape)}")
    center, spreads = float(quality.mean()), [float(part.std(correction=0)) for part in (scores, quality)]
    if min(spreads) < 1e-12 or not (same.any() and not same.all()):
        return QualityScore(0.0, center)
    columns = [(scores - scores.mean()) / spreads[0], (quality - center) / spreads[1], torch.ones_like(scores)]
    slopes = _logistic(torch.stack(columns, dim=1), same)
    per_score, per_quality = float(slopes[0]) / spreads[0], float(slopes[1]) / spreads[1]
    weight = per_quality / per_score if per_score > 0 else 0.0
    return QualityScore(weight if math.isfinite(weight) else 0.0, center)


def _logistic(rows: Tensor, same: Tensor) -> Tensor:
    """The coefficients of a logistic regression [D] by Newton's method; both kinds have the same total weight."""
    answers = same.double()
    share = torch.where(same, 0.5 / answers.sum(), 0.5 / (1 - answers).sum())
    found = torch.zeros(rows.shape[1], dtype=torch.float64, device="cpu")
    ridge = RIDGE * torch.eye(rows.shape[1], dtype=torch.float64, device="cpu")
    for _ in range(STEPS):
        likely = torch.sigmoid(rows @ found)
        slope = rows.T @ (share * (likely - answers)) + RIDGE * found
        bend = (rows * (share * likely * (1 - likely))[:, None]).T @ rows + ridge
        # Short steps, since Newton's method may overshoot where the loss is flat.
        step = torch.linalg.solve(bend, slope)
        largest = float(step.abs().max())
        found = found - step * min(1.0, LONGEST / max(largest, LONGEST))
        if largest < CONVERGED:
            break
    return found


def discard_errors(
    scores: Numbers,
    same: Numbers,
    images: tuple[Numbers, Numbers],
    norms: Numbers,
    far: float = 1e-2,
    shares: Sequence[float] = DISCARDED,
) -> list[dict[str, Any]]:
    """The false reject rate after images of the lowest norms are discarded, at one threshold.

    The threshold has the false accept rate `far` on all pairs; the result is empty with too few impostor pairs for it.
    If norms measure quality, the rate falls as more images are discarded.

    Args:
        scores: scores of the pairs, [P].
        same: whether the pairs are genuine, [P].
        images: the indices of the first and of the second image of each pair, integers [P].
        norms: norms of the embeddings, [N].
        far: the false accept rate.
        shares: the shares of the images that are discarded.
    """
    check_rate("far", far)
    for share in shares:
        check_number("each of shares", share, least=0, below=1)
    (scores, same), norms = check_scores(scores, same), _check_norms(norms)
    lower = _smaller(norms.argsort(stable=True).argsort(), *images)
    if lower.shape != scores.shape:
        raise ValueError(f"images must be the indices of {len(scores)} pairs, not of {len(lower)}")
    curve = roc(scores, same)
    if unresolved(far, curve.impostors, "impostor pairs"):
        return []
    threshold = float(curve.thresholds[curve.lowest(far)])
    found = []
    for share in shares:
        kept = lower >= math.floor(share * len(norms))
        genuine, impostor = scores[kept & same], scores[kept & ~same]
        if len(genuine) and len(impostor):
            rates = {"frr": float((genuine < threshold).double().mean())}
            rates["far"] = float((impostor >= threshold).double().mean())
            found.append({"discarded": share, "genuine": len(genuine), "impostor": len(impostor), **rates})
    return found
