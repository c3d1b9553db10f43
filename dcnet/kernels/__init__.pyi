from dcnet.kernels.attention_rows import unit_vectors
from dcnet.kernels.block_dispatch import block, find_known_block, fits_block, uses_blocks
from dcnet.kernels.dispatch import (
    conv1d,
    conv2d,
    find_known,
    fits,
    fits_folded,
    folded,
    is_plain_eager,
    linear,
    use_kernels,
)
from dcnet.kernels.filter_products import penalty_gradient_
from dcnet.kernels.folded_inference import folded_rows, folded_table

__all__ = [
    "block",
    "conv1d",
    "conv2d",
    "find_known",
    "find_known_block",
    "fits",
    "fits_block",
    "fits_folded",
    "folded",
    "folded_rows",
    "folded_table",
    "is_plain_eager",
    "linear",
    "penalty_gradient_",
    "unit_vectors",
    "use_kernels",
    "uses_blocks",
]
