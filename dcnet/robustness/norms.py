"""How far an image is moved: norms of a perturbation, each with what a loop over gradients needs of it."""

import math
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from dcnet.data.order import mixed
from dcnet.robustness import draws
from dcnet.spec import unknown


class Norm:
    """A norm of perturbations [N, ...], image by image."""

    name: ClassVar[str]

    def size(self, delta: Tensor) -> Tensor:
        """How large each perturbation is, [N]."""
        raise NotImplementedError

    def projected(self, delta: Tensor, epsilon: Tensor | float) -> Tensor:
        """The nearest perturbation that is no larger than epsilon."""
        raise NotImplementedError

    def steepest(self, gradient: Tensor) -> Tensor:
        """The direction of size 1 in which a loss of that gradient grows most; zero where the gradient is."""
        raise NotImplementedError

    def scattered(self, like: Tensor, rows: Tensor, seed: int) -> Tensor:
        """Perturbations that are spread evenly over all of size 1 and less, for the images of these numbers."""
        raise NotImplementedError

    def largest(self, pixels: int) -> float:
        """The size of the largest perturbation that there is between two images of so many numbers in [0, 1]."""
        raise NotImplementedError


norms: dict[str, Norm] = {}
Kind = TypeVar("Kind", bound=type[Norm])


def register(kind: Kind) -> Kind:
    """Enters a norm into the registry under its name."""
    if kind.name in norms:
        raise ValueError(f"{kind.name!r} is taken: {type(norms[kind.name]).__name__} is a norm of that name")
    norms[kind.name] = kind()
    return kind


def as_norm(name: str) -> Norm:
    if name not in norms:
        raise unknown("norm", name, norms)
    return norms[name]


def each(of_images: Tensor, like: Tensor) -> Tensor:
    """One number per image, against [N, ...]."""
    return of_images.view(-1, *[1] * (like.dim() - 1))


@register
class Linf(Norm):
    """The largest change of any pixel."""

    name = "linf"

    def size(self, delta: Tensor) -> Tensor:
        return delta.flatten(1).abs().amax(1)

    def projected(self, delta: Tensor, epsilon: Tensor | float) -> Tensor:
        return delta.clamp(-epsilon, epsilon)  # type: ignore[arg-type]

    def steepest(self, gradient: Tensor) -> Tensor:
        return gradient.sign()

    def scattered(self, like: Tensor, rows: Tensor, seed: int) -> Tensor:
        return (2 * draws.uniform(seed, rows, like.shape[1:]) - 1).to(like.dtype)

    def largest(self, pixels: int) -> float:
        return 1.0


@register
class L2(Norm):
    """The root of the sum of the squares of all changes."""

    name = "l2"

    def size(self, delta: Tensor) -> Tensor:
        return torch.linalg.vector_norm(delta.flatten(1), dim=1)

    def projected(self, delta: Tensor, epsilon: Tensor | float) -> Tensor:
        size = self.size(delta).clamp(min=torch.finfo(delta.dtype).tiny)
        return delta * each((epsilon / size).clamp(max=1), delta)

    def steepest(self, gradient: Tensor) -> Tensor:
        # Divided by the largest entry first: where a softmax is sure, the squares of gradients are below any float32.
        scaled = gradient / each(_or_one(gradient.flatten(1).abs().amax(1)), gradient)
        return scaled / each(_or_one(self.size(scaled)), gradient)

    def scattered(self, like: Tensor, rows: Tensor, seed: int) -> Tensor:
        direction = self.steepest(draws.normal(mixed(seed, 0), rows, like.shape[1:]))
        # The share of a ball within a radius grows with its power of as many as there are dimensions.
        radius = draws.uniform(mixed(seed, 1), rows) ** (1 / like[0].numel())
        return (direction * each(radius, direction)).to(like.dtype)

    def largest(self, pixels: int) -> float:
        return math.sqrt(pixels)


def _or_one(sizes: Tensor) -> Tensor:
    return torch.where(sizes == 0, 1, sizes)
