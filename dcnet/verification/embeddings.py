"""Embeddings of images, and their cosine scores: of listed pairs, of all pairs, and of nearest neighbors."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dcnet.checks import ROUNDING, Numbers, as_tensor, check_choice, check_whole
from dcnet.modes import evaluating, full_precision

JOINS = ("sum", "concatenate")


@torch.no_grad()
def embed(
    model: nn.Module,
    batches: Iterable[Numbers | Sequence[Numbers]],
    device: torch.device | str = "cpu",
    flip: bool = True,
    join: str = "sum",
    names: Sequence[str] | None = None,
) -> Tensor:
    """Embeddings float32 [N, D] of images on the device, computed in evaluation mode and full float32 precision.

    Args:
        model: a network with `features`; it is moved to the device.
        batches: images [B, C, H, W], uint8 or float in [0, 1], as tensors or NumPy arrays, or pairs of images and
            labels.
        device: the device to compute on.
        flip: also embed the mirror image.
        join: "sum" adds the two embeddings, "concatenate" joins them to [N, 2 D].
        names: the names of the images, for error messages.
    """
    check_choice("join", join, JOINS)
    if not callable(getattr(model, "features", None)):
        raise ValueError(f"{type(model).__name__} has no method `features`, which returns [N, D] for [N, C, H, W]")
    found: list[Tensor] = []
    with evaluating(model.to(device)), full_precision():
        for number, batch in enumerate(batches):
            images = as_tensor(batch if isinstance(batch, Tensor | np.ndarray) else batch[0], "images")
            found.append(_embedded(model, _pixels(images.to(device), number), flip, join))
    if not found:
        raise ValueError("there are no images to embed: give one batch or more")
    embeddings = torch.cat(found)
    _check_directions(embeddings, names)
    return embeddings


def normalized(embeddings: Numbers) -> Tensor:
    """The embeddings [N, D] in float32 with norm 1; raises ValueError for one that is zero or not finite."""
    embeddings = as_tensor(embeddings, "embeddings").detach()
    _check_directions(embeddings)
    # Divide by the largest entry first, since squares overflow long before the entries do.
    scaled = embeddings.float() / embeddings.float().abs().amax(1, keepdim=True)
    return scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)


def _pixels(images: Tensor, number: int) -> Tensor:
    if images.dim() != 4:
        found = f"not {list(images.shape)}: give batches, such as images.split(256)"
        raise ValueError(f"batch {number} must be images [B, C, H, W], {found}")
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    low, high = (float(end) for end in pixels.aminmax()) if pixels.numel() else (0.0, 0.0)
    if not (low >= -ROUNDING and high <= 1 + ROUNDING):
        raise ValueError(
            f"images must be uint8, or float in [0, 1], but batch {number} is {images.dtype} from {low:g} to {high:g}"
        )
    return pixels.contiguous(memory_format=torch.channels_last) if pixels.is_cuda else pixels


def _embedded(model: nn.Module, pixels: Tensor, flip: bool, join: str) -> Tensor:
    views = [pixels, pixels.flip(-1)] if flip else [pixels]
    found: list[Tensor] = [model.features(view).float() for view in views]  # type: ignore[operator]
    if found[0].dim() != 2:
        raise ValueError(f"`features` must return [N, D], not {list(found[0].shape)}: pool and flatten them there")
    return torch.cat(found, dim=1) if join == "concatenate" else torch.stack(found).sum(0)


def _check_directions(embeddings: Tensor, names: Sequence[str] | None = None) -> None:
    if embeddings.dim() != 2 or not embeddings.numel():
        raise ValueError(f"embeddings must be [N, D] and not empty, not {list(embeddings.shape)}")
    largest = embeddings.float().abs().amax(1)
    bad = (~torch.isfinite(largest) | (largest == 0)).nonzero()[:, 0].tolist()
    if bad:
        which = f"{bad[0]} ({names[bad[0]]})" if names else str(bad[0])
        norm = "zero" if largest[bad[0]] == 0 else "not finite"
        raise ValueError(
            f"the norm of embedding {which} is {norm}; {len(bad)} of {len(embeddings)} embeddings are invalid: "
            "a cosine needs embeddings that are finite and not zero"
        )


class HyperplaneSimilarity:
    """Scores of pairs of features by hyperplanes, larger for more similar ones.

    The hyperplane of x separates x from the background by least squares, where x counts as much as all the background:
    its normal is (S + ridge I)^-1 (x - mu), with mean mu and covariance S of the background, and it is halfway
    between x and mu. This is a closed form of the paper's iterative search for the hyperplane of the softmax.

    Args:
        background: features [N, D] of people other than those compared, such as one of each training person.
        ridge: added to the covariance, as a share of its mean variance.
    """

    def __init__(self, background: Numbers, ridge: float = 0.1):
        background = as_tensor(background, "background").detach()
        if background.dim() != 2 or len(background) < 2 or not torch.isfinite(background).all():
            raise ValueError(f"background must be finite features [N, D] with N >= 2, not {list(background.shape)}")
        if not 0 < ridge < math.inf:
            raise ValueError(f"ridge must be above 0 and finite, not {ridge!r}")
        rows = background.double()
        self.mean = rows.mean(0)
        centred = rows - self.mean
        covariance = centred.T @ centred / len(rows)
        variance = float(covariance.diagonal().mean())
        # The mean of equal rows may differ from them by rounding.
        if bool((rows == rows[0]).all()):
            raise ValueError(f"the features of the background must differ, but all {len(rows)} are the same")
        if not torch.finfo(torch.float64).tiny <= variance < math.inf:
            raise ValueError(f"the variance of the background must be a finite number above 0, not {variance}")
        covariance.diagonal().add_(ridge * variance)
        self.factor = torch.linalg.cholesky(covariance)

    def normals(self, features: Numbers) -> Tensor:
        """The unit normals of the hyperplanes, float64 [N, D]."""
        solved = torch.cholesky_solve(self._centred(features).T, self.factor).T
        size = torch.linalg.vector_norm(solved, dim=1, keepdim=True)
        if bool((size == 0).any()):
            raise ValueError("a feature equal to the mean of the background has no hyperplane: give another background")
        return solved / size

    def distances(self, hyperplanes_of: Numbers, features: Numbers) -> Tensor:
        """The signed distance of each feature from the hyperplane of its partner, float64 [N]."""
        normals = self.normals(hyperplanes_of)
        halfway = self._centred(hyperplanes_of) / 2
        return (normals * (self._centred(features) - halfway)).sum(1)

    def __call__(self, first: Numbers, second: Numbers) -> Tensor:
        """The mean of the two distances from each other's hyperplane, float64 [N], for features [N, D]."""
        first, second = as_tensor(first, "features"), as_tensor(second, "features")
        if first.shape != second.shape:
            raise ValueError(f"pairs need features of one shape, not {list(first.shape)} and {list(second.shape)}")
        with full_precision():
            return (self.distances(first, second) + self.distances(second, first)) / 2

    def _centred(self, features: Numbers) -> Tensor:
        features = as_tensor(features, "features")
        if features.dim() != 2 or features.shape[1] != len(self.mean):
            raise ValueError(f"features must be [N, {len(self.mean)}], like the background, not {list(features.shape)}")
        if bad := int((~torch.isfinite(features)).any(1).sum()):
            raise ValueError(f"features must be finite, but {bad} of {len(features)} are not")
        return features.to(self.mean) - self.mean


BINS = 20_000
BLOCK = 2048
PAIR_BLOCK = 1 << 16


@dataclass(frozen=True)
class ScoreHistogram:
    """The number of genuine and impostor pairs in each bin of [-1, 1], int64 [bins] each."""

    genuine: Tensor
    impostor: Tensor

    @property
    def bins(self) -> int:
        return len(self.genuine)

    def edges(self) -> Tensor:
        """The lower edges of the bins, float64."""
        return torch.arange(self.bins, dtype=torch.float64, device="cpu") * (2 / self.bins) - 1

    def __add__(self, other: "ScoreHistogram") -> "ScoreHistogram":
        if self.bins != other.bins:
            raise ValueError(
                f"histograms of {self.bins} and {other.bins} bins cannot be added: use the same number of bins"
            )
        return ScoreHistogram(self.genuine + other.genuine, self.impostor + other.impostor)


@dataclass(frozen=True)
class Neighbors:
    """The highest scores of each probe, float32 [N, k], descending, and the indices of these images, int64 [N, k]."""

    scores: Tensor
    indices: Tensor


def cosines(rows: Tensor, columns: Tensor) -> Tensor:
    """The cosines [R, C] of unit embeddings, in full float32 precision."""
    check_sizes(rows, columns)
    with full_precision(), torch.autocast(rows.device.type, enabled=False):
        return (rows @ columns.T).clamp_(-1, 1)


def check_sizes(rows: Tensor, columns: Tensor) -> None:
    if rows.shape[1] != columns.shape[1]:
        sizes = f"{rows.shape[1]} and {columns.shape[1]}"
        raise ValueError(f"embeddings must have the same number of values, not {sizes}")


def pair_scores(embeddings: Numbers, first: Numbers, second: Numbers) -> Tensor:
    """The cosines float32 [P] of pairs of embeddings.

    Args:
        embeddings: [N, D], a tensor, an array or lists.
        first: indices of the first embedding of each pair, integers [P].
        second: indices of the second.
    """
    unit = normalized(embeddings)
    indices = pair_indices(first, second, len(unit))
    blocks = zip(*(part.to(unit.device).split(PAIR_BLOCK) for part in indices), strict=True)
    return torch.cat([(unit[left] * unit[right]).sum(1).clamp_(-1, 1) for left, right in blocks])


def score_histogram(embeddings: Numbers, labels: Numbers, bins: int = BINS, block: int = BLOCK) -> ScoreHistogram:
    """Counts the scores of all pairs of embeddings; a pair is genuine if its labels are equal.

    Args:
        embeddings: [N, D].
        labels: integers [N].
        bins: the number of bins of [-1, 1].
        block: images per block; block x block scores are in memory.
    """
    check_whole("bins", bins, 2)
    unit = normalized(embeddings)
    labels = checked_labels(labels, unit)
    every, genuine = torch.zeros(2, bins, dtype=torch.int64, device=unit.device)
    for rows in _blocks(len(unit), block):
        for columns in _blocks(len(unit), block, start=rows.start):
            # int32 is faster to write and to count than int64.
            places = (cosines(unit[rows], unit[columns]) + 1).mul_(bins / 2).int().clamp_(0, bins - 1)
            same = labels[rows, None] == labels[columns]
            # A block on the diagonal has every pair twice, and images paired with themselves.
            above = torch.ones_like(same).triu_(1) if rows == columns else None
            every += torch.bincount(places.flatten() if above is None else places[above], minlength=bins)
            genuine += torch.bincount(places[same if above is None else same & above], minlength=bins)
    return ScoreHistogram(genuine.cpu(), (every - genuine).cpu())


def nearest(probes: Numbers, gallery: Numbers | None = None, count: int = 1, block: int = BLOCK) -> Neighbors:
    """The most similar images of the gallery for each probe; equal scores may be in any order.

    Args:
        probes: embeddings [N, D].
        gallery: embeddings [G, D]; None to compare every probe with the other probes.
        count: the number of neighbors.
        block: images per block.
    """
    rows = normalized(probes)
    columns = rows if gallery is None else normalized(gallery).to(rows.device)
    available = len(columns) - (gallery is None)
    check_whole("count", count, 1, available)
    found = [_nearest(rows, part, columns, gallery is None, count, block) for part in _blocks(len(rows), block)]
    return Neighbors(torch.cat([scores for scores, _ in found]), torch.cat([indices for _, indices in found]))


def _nearest(probes: Tensor, part: slice, gallery: Tensor, same: bool, count: int, block: int) -> tuple[Tensor, Tensor]:
    own = torch.arange(len(probes), device=probes.device)[part, None]
    scores = torch.empty(len(own), 0, device=probes.device)
    indices = torch.empty(len(own), 0, dtype=torch.int64, device=probes.device)
    for columns in _blocks(len(gallery), block):
        found = cosines(probes[part], gallery[columns])
        at = torch.arange(len(gallery), device=probes.device)[columns].expand_as(found)
        if same:
            found = found.masked_fill(at == own, -torch.inf)
        found, local = found.topk(min(count, found.shape[1]))
        joined, at = torch.cat([scores, found], 1), torch.cat([indices, at.gather(1, local)], 1)
        scores, best = joined.topk(min(count, joined.shape[1]))
        indices = at.gather(1, best)
    return scores, indices


def checked_labels(labels: Numbers, embeddings: Tensor) -> Tensor:
    """Integer labels [N], one per embedding, on the device of the embeddings."""
    labels = as_tensor(labels, "labels")
    if labels.shape != embeddings.shape[:1] or labels.is_floating_point():
        raise ValueError(f"labels must be integers [{len(embeddings)}], not {labels.dtype} {list(labels.shape)}")
    return labels.to(embeddings.device)


def pair_indices(first: Numbers, second: Numbers, count: int) -> tuple[Tensor, Tensor]:
    """The indices of the images of pairs, int64 [P] each, from 0 to count - 1."""
    first, second = (_index(as_tensor(part, "indices of pairs"), count) for part in (first, second))
    if first.shape != second.shape:
        raise ValueError(f"pairs need equally many first and second images, not {len(first)} and {len(second)}")
    return first, second


def _index(index: Tensor, count: int) -> Tensor:
    if index.dim() != 1 or not len(index) or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(f"indices of pairs must be integers [P], P > 0, not {index.dtype} {list(index.shape)}")
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= count:
        raise ValueError(f"indices of pairs must be from 0 to {count - 1}, not {low if low < 0 else high}")
    # torch treats uint8 indices as a mask.
    return index.long()


def _blocks(count: int, block: int, start: int = 0) -> Iterator[slice]:
    check_whole("block", block, 1)
    return (slice(begin, min(begin + block, count)) for begin in range(start, count, block))
