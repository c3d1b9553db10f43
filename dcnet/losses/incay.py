"""Features kept away from zero."""

from torch import Tensor

from dcnet.norms import accumulation_dtype


def feature_incay(features: Tensor, eps: float = 1e-6) -> Tensor:
    """The mean of 1 / (||x||^2 + eps), to be added to a loss: it makes features grow, and small ones most of all.

    Feature incay (Yuan et al., 2017) is the opposite of weight decay, for features. Use it with losses in which ||x||
    counts.

    Args:
        features: [N, D]; the mean over an empty batch is nan.
        eps: keeps the value and its gradient finite for features of zeros.
    """
    if features.dim() != 2:
        raise ValueError(f"features must be [N, features], not {list(features.shape)}")
    features = features.to(accumulation_dtype(features.dtype))
    return (1 / (features.square().sum(1) + eps)).mean()
