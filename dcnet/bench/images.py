"""What goes into a measurement, in the order of memory that is faster: channels last."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def random_images(shape: Sequence[int], device: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Images [N, C, H, W] that depend on shape and seed, and on whether they are made on a GPU."""
    generator = torch.Generator(device).manual_seed(seed)
    images = torch.randn(*shape, generator=generator, device=device)
    return images.to(dtype).to(memory_format=torch.channels_last)


def placed(module: Module, device: str, dtype: torch.dtype = torch.float32) -> Module:
    """The module itself, moved and cast, with its filters channels last."""
    # torch's own types leave out that modules know memory formats, too.
    channels_last: dict[str, Any] = {"memory_format": torch.channels_last}
    return module.to(device, dtype).to(**channels_last)
