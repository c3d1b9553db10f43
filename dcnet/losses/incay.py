"""Features kept away from zero."""

from torch import Tensor

from dcnet.norms import accumulation_dtype


def feature_incay(features: Tensor, eps: float = 1e-6) -> Tensor:
    """The mean of 1 / (||x||^2 + eps): added to the loss, it lets features grow, and small ones most of all.

    Feature incay (Yuan et al., 2017): what weight decay is to weights, the other way round. For losses in which ||x||
    counts.
    """
    if features.dim() != 2:
        raise ValueError(f"features must be [N, features], not {list(features.shape)}")
    features = features.to(accumulation_dtype(features.dtype))
    return (1 / (features.square().sum(1) + eps)).mean()
