"""What a network makes of images, to be compared by cosine."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from dcnet.arrays import Numbers, as_tensor

JOINS = ("sum", "concatenate")
# Resizing may leave a float image a little beyond its range; bytes as floats, and normalised images, are far beyond.
SLACK = 1e-3


@torch.no_grad()
def embed(
    model: nn.Module,
    batches: Iterable[Numbers | Sequence[Numbers]],
    device: torch.device | str = "cpu",
    flip: bool = True,
    join: str = "sum",
    names: Sequence[str] | None = None,
) -> Tensor:
    """The embeddings float32 [N, D] of images, on the device, computed in evaluation mode and `precisely`.

    Args:
        model: a network with `features`, which is moved to the device.
        batches: images [B, C, H, W], uint8 or float from 0 to 1, as tensors or NumPy arrays; of a batch with labels
            the images are taken.
        device: where it is computed.
        flip: takes the mirrored image into account, too.
        join: how: "sum" adds the two embeddings, "concatenate" makes [N, 2 D] of them.
        names: of the images, for the errors.
    """
    if join not in JOINS:
        raise ValueError(f"join must be one of {', '.join(JOINS)}, not {join!r}")
    if not callable(getattr(model, "features", None)):
        raise ValueError(f"{type(model).__name__} has no method `features`, which gives [N, D] for [N, C, H, W]")
    found: list[Tensor] = []
    with evaluating(model.to(device)), precisely():
        for number, batch in enumerate(batches):
            images = as_tensor(batch if isinstance(batch, Tensor | np.ndarray) else batch[0], "images")
            found.append(_embedded(model, _pixels(images.to(device), number), flip, join))
    if not found:
        raise ValueError("there are no images to embed: expected one batch or more, found none")
    embeddings = torch.cat(found)
    _check(embeddings, names)
    return embeddings


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, after which every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def precisely() -> Iterator[None]:
    """All digits of float32 on a GPU, whose convolutions and products keep three of them unless they are told not to.

    A threshold from one machine is used on another, and must not depend on how many digits are kept.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    cudnn = torch.backends.cudnn
    try:
        with cudnn.flags(cudnn.enabled, deterministic=cudnn.deterministic, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def normalized(embeddings: Numbers) -> Tensor:
    """The embeddings [N, D] in float32 with norm 1; an embedding of zero, or one that is not finite, is an error."""
    embeddings = as_tensor(embeddings, "embeddings").detach()
    _check(embeddings, None)
    # Divided by the largest entry first, since squares leave the range of float32 long before the entries do.
    scaled = embeddings.float() / embeddings.float().abs().amax(1, keepdim=True)
    return scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)


def _pixels(images: Tensor, number: int) -> Tensor:
    if images.dim() != 4:
        found = f"not {list(images.shape)}: give batches, such as images.split(256)"
        raise ValueError(f"batch {number} must be images [B, C, H, W], {found}")
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    low, high = (float(end) for end in pixels.aminmax()) if pixels.numel() else (0.0, 0.0)
    if not (low >= -SLACK and high <= 1 + SLACK):
        raise ValueError(
            f"images must be uint8, or float from 0 to 1, but batch {number} is {images.dtype} from {low:g} to {high:g}"
        )
    return pixels.contiguous(memory_format=torch.channels_last) if pixels.is_cuda else pixels


def _embedded(model: nn.Module, pixels: Tensor, flip: bool, join: str) -> Tensor:
    views = [pixels, pixels.flip(-1)] if flip else [pixels]
    found: list[Tensor] = [model.features(view).float() for view in views]  # type: ignore[operator]
    if found[0].dim() != 2:
        raise ValueError(f"`features` must give [N, D], not {list(found[0].shape)}: pool and flatten them there")
    return torch.cat(found, dim=1) if join == "concatenate" else torch.stack(found).sum(0)


def _check(embeddings: Tensor, names: Sequence[str] | None) -> None:
    if embeddings.dim() != 2 or not embeddings.numel():
        raise ValueError(f"embeddings must be [N, D] and not empty, not {list(embeddings.shape)}")
    largest = embeddings.float().abs().amax(1)
    bad = (~torch.isfinite(largest) | (largest == 0)).nonzero()[:, 0].tolist()
    if bad:
        which = f"{bad[0]} ({names[bad[0]]})" if names else str(bad[0])
        norm = "zero" if largest[bad[0]] == 0 else "not finite"
        raise ValueError(
            f"the norm of embedding {which} is {norm}, and of {len(bad)} of {len(embeddings)} in all: "
            "a cosine needs finite embeddings other than zero"
        )
