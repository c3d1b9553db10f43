"""Certificates: an upper bound on how far any perturbation of a given size can move the logits."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.checks import check_choice, check_images, check_whole
from dcnet.modes import evaluating, frozen_eval
from dcnet.robustness.certificates.matrices import Signal, first_signal
from dcnet.robustness.certificates.propagate import visit
from dcnet.robustness.task import BATCH, batches, check_epsilon, check_labels_of, device_of, share

NORMS = ("linf", "l2")


@dataclass(frozen=True, eq=False)
class Certificate:
    """An upper bound on how far a perturbation of a given size can move the difference of two logits.

    Args:
        epsilon: the size of the perturbation.
        norm: the norm that measures the size.
        lipschitz: Lipschitz constants of the difference of logits i and j, float64 [classes, classes].
        spread: bounds on the change of this difference between any two images; inf if there is none.
        low: a lower bound of each logit for all images, [classes]; -inf if there is none.
        high: an upper bound; inf if there is none.
        images: the number of given images.
        accuracy: the share of them that the network classifies correctly.
        certified: the share that it classifies correctly everywhere within epsilon.
        factor: the bound divided by the largest bound that would certify an image: below 1, some images are certified;
            None if no image is classified correctly.
        reach: the largest epsilon at which the Lipschitz constant certifies an image.
    """

    epsilon: float
    norm: str
    lipschitz: Tensor
    spread: Tensor
    low: Tensor
    high: Tensor
    images: int = 0
    accuracy: float | None = None
    certified: float | None = None
    factor: float | None = None
    reach: float | None = None

    @property
    def movement(self) -> Tensor:
        """A bound on the movement of the difference of logits i and j within epsilon, [classes, classes]."""
        # For epsilon 0 the bound is 0 even if the constant is infinite.
        far = self.epsilon * self.lipschitz if self.epsilon else torch.zeros_like(self.lipschitz)
        return torch.minimum(far, self.spread)

    @property
    def bound(self) -> float:
        """A bound on the movement of the difference of any two logits within epsilon."""
        return float(self.movement.max())

    @property
    def bounded(self) -> bool:
        """Whether the logits are bounded for all images."""
        return bool(self.spread.isfinite().all())

    @property
    def excess(self) -> float:
        """The movement allowed by the Lipschitz constant, divided by the largest possible; 0 for unbounded logits."""
        far, most = self.epsilon * float(self.lipschitz.max()), float(self.spread.max())
        return far / most if 0 < most < math.inf else 0.0

    @property
    def vacuous(self) -> bool:
        """Whether the certificate certifies no image or, without images, does not restrict the movement of logits."""
        if self.images:
            return not self.certified
        return self.excess >= 1

    def summary(self) -> dict[str, Any]:
        """The numbers for a record; None without a bound or an image."""
        return {
            "epsilon": self.epsilon,
            "norm": self.norm,
            "bound": self.bound,
            "lipschitz": float(self.lipschitz.max()),
            "spread": float(self.spread.max()) if self.bounded else None,
            "low": float(self.low.min()) if self.bounded else None,
            "high": float(self.high.max()) if self.bounded else None,
            "images": self.images,
            "accuracy": self.accuracy,
            "certified": self.certified,
            "factor": self.factor,
            "reach": self.reach,
            "vacuous": self.vacuous,
        }

    def __str__(self) -> str:
        """A text with the certified share, or how far it is from certifying, and the bounds of the logits."""
        what = f"A perturbation of {self.epsilon:.4g} in {self.norm}"
        moved = f"{what} moves the difference of two logits by at most {self.bound:.3g}"
        return f"{moved}: {self._verdict()}. {self._logit_range()}."

    def _verdict(self) -> str:
        if self.images and not self.vacuous:
            return f"{self.certified:.1%} of {self.images} images are certified, {self.accuracy:.1%} are correct"
        if self.images and self.factor is None:
            return f"vacuous, since the network classifies none of {self.images} images correctly"
        if self.images:
            surest = f"vacuous, since that is {self.factor:.3g} times the largest margin of {self.images} images"
            return f"{surest}; the Lipschitz constant certifies up to epsilon {self.reach:.3g}"
        if self.vacuous:
            return f"vacuous, since its Lipschitz constant allows {self.excess:.3g} times the largest possible movement"
        return "an image with a larger margin is certified"

    def _logit_range(self) -> str:
        if not self.bounded:
            return "For images farther away the logits are unbounded"
        low, high = float(self.low.min()), float(self.high.max())
        return f"For any image all logits are between {low:.3g} and {high:.3g}"


def lipschitz(module: nn.Module, shape: Sequence[int], norm: str = "l2") -> float:
    """An upper bound of |module(a) - module(b)| / |a - b| for all a and b, with both sizes in the norm.

    Args:
        module: a layer, or anything that `certify` covers, in evaluation mode.
        shape: the shape of one input, without the batch: [channels, height, width], or [features].
        norm: "l2" or "linf".
    """
    signal = _propagate(module, shape, norm)
    found = signal.l2 if norm == "l2" else float(signal.moved.max())
    # The product over very many layers may overflow.
    return math.inf if math.isnan(found) else found


def output_bounds(module: nn.Module, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds on the outputs of each channel for all inputs, float64 [channels] each."""
    signal = _propagate(module, shape, "linf")
    return signal.low, signal.high


@torch.inference_mode(False)
@torch.no_grad()
def _propagate(module: nn.Module, shape: Sequence[int], norm: str) -> Signal:
    """Bounds on the module's outputs for inputs that move by 1 in the norm."""
    # Other norms may be registered for attacks, without bounds here.
    check_choice("norm", norm, NORMS)
    if not isinstance(module, nn.Module):
        raise ValueError(f"the model must be an nn.Module, not {type(module).__name__}")
    _check_shape(shape)
    _check_finite(module)
    # Constants on the CPU work with tensors of any device.
    with evaluating(module), torch.device("cpu"):
        return visit(module, first_signal(tuple(shape), norm, device_of(module, torch.empty(0))))


def _check_shape(shape: Sequence[Any]) -> None:
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in shape)
    if not len(shape) or not whole:
        raise ValueError(f"the shape of an input must be whole numbers above 0, such as (3, 32, 32), not {shape!r}")


def _check_finite(module: nn.Module) -> None:
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name!r} of the network is not finite, so its outputs have no bound")


def certify(
    model: nn.Module,
    epsilon: float,
    norm: str = "linf",
    image_size: int | tuple[int, int] | None = None,
    channels: int = 3,
    *,
    x: Tensor | None = None,
    y: Tensor | None = None,
    batch_size: int = BATCH,
) -> Certificate:
    """An upper bound on how far a perturbation of size epsilon can move the logits of any image, in evaluation mode.

    It is the smaller of two bounds: epsilon times a Lipschitz constant of the network, and the range of the logits
    where operators are bounded. Both hold in exact arithmetic; they do not include the rounding of float32.

    Args:
        model: maps pixels to logits [N, classes]; each layer needs a rule in dcnet.robustness.certificates.
        epsilon: the size of the perturbation.
        norm: "linf" or "l2".
        image_size: side of the images, or height and width; by default that of x.
        channels: the channels of the images; by default those of x.
        x: images [N, channels, height, width] in [0, 1], or uint8.
        y: their labels, int [N]; with x, the certificate says how many images it certifies.
        batch_size: images per forward pass.
    """
    if (x is None) != (y is None):
        raise ValueError("x and y go together: give both, or neither")
    images = None if x is None else check_images(x)
    shape = _shape(image_size, channels, images)
    size = check_epsilon(epsilon, norm, torch.empty(1, *shape, device="meta"))
    signal = _propagate(model, shape, norm)
    if len(signal.shape) != 1 or signal.channels < 2:
        raise ValueError(f"{type(model).__name__} must return two logits or more, not {list(signal.shape)}")
    lipschitz, spread = signal.pair_bounds()
    bounds = Certificate(size, norm, lipschitz, spread, signal.low, signal.high)
    if images is None or y is None:
        return bounds
    return _with_images(model, bounds, images, y, batch_size)


def _shape(image_size: int | tuple[int, int] | None, channels: int, images: Tensor | None) -> tuple[int, ...]:
    """The shape of an image, from the images if they are given."""
    sides = tuple(image_size) if isinstance(image_size, tuple | list) else (image_size, image_size)
    if images is not None:
        if image_size is not None and sides != images.shape[2:]:
            raise ValueError(f"the images are {list(images.shape[1:])}, not of image_size={image_size!r}: omit it")
        return tuple(images.shape[1:])
    if image_size is None:
        raise ValueError("image_size is missing: give the side of the images, such as 32")
    _check_shape(shape := (channels, *sides))
    return shape


@torch.no_grad()
def _with_images(model: nn.Module, bounds: Certificate, images: Tensor, y: Tensor, batch_size: int) -> Certificate:
    size = check_whole("batch_size", batch_size, 1)
    with frozen_eval(model):
        labels = check_labels_of(model, images, y)
        found = [_ratios(model(x).double(), own, bounds) for _, x, own in batches(model, images, labels, size)]
    factors, per_epsilon, right = torch.cat(found, 1)
    return dataclasses.replace(
        bounds,
        images=len(images),
        accuracy=share(right),
        certified=share(factors < 1),
        factor=float(factors.min()) if right.any() else None,
        reach=float(1 / per_epsilon.min()) if right.any() else None,
    )


def _ratios(logits: Tensor, labels: Tensor, bounds: Certificate) -> Tensor:
    """Three values per image, [3, N]: bound / margin, Lipschitz constant / margin, and whether the network is right.

    Both ratios are the largest over the other classes; they are inf where the network is wrong or a bound is infinite.
    """
    margins = logits.gather(1, labels[:, None]) - logits
    own = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    moved = torch.stack((bounds.movement, bounds.lipschitz))[:, labels]
    # Not `margins <= 0`, since NaN counts as wrong.
    ratios = torch.where(margins > 0, moved / margins, math.inf)
    right = ((margins > 0) | own).all(1)
    return torch.cat((torch.where(own, 0.0, ratios).amax(2), right[None]))
