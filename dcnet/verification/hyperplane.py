"""Similarity by separating hyperplanes (Jones and Kobori, 2017), for networks that were trained by a softmax.

A softmax learns for each class a hyperplane that has the class on one side and all others on the other; it never
compares features by distance or angle. Of a person who was not trained on there is no hyperplane, but one can be made
that has the feature at hand on one side and those of many others, the background, on the other. Two features are alike
if each lies on the right side of the other's hyperplane, and far from it.
"""

import math

import torch
from torch import Tensor

from dcnet.arrays import Numbers, as_tensor
from dcnet.verification.embeddings import precisely


class HyperplaneSimilarity:
    """Scores of pairs of features, larger for those that are alike.

    The hyperplane of x is that of least squares between x, which counts as much as all the background, and the
    background: its normal is (S + ridge I)^-1 (x - mu), with mu and S the background's mean and covariance, and it
    lies halfway between x and mu. That is a closed form where the paper has an iterative search for the hyperplane of
    the softmax; the two agree in what they separate.

    Args:
        background: features [N, D] of others than those that are compared, such as one of each person trained on.
        ridge: what is added to the covariance, as a share of its mean variance.
    """

    def __init__(self, background: Numbers, ridge: float = 0.1):
        background = as_tensor(background, "background").detach()
        if background.dim() != 2 or len(background) < 2 or not torch.isfinite(background).all():
            raise ValueError(f"background must be finite features [N, D] of two or more, not {list(background.shape)}")
        if not 0 < ridge < math.inf:
            raise ValueError(f"ridge must be above 0 and finite, not {ridge!r}")
        rows = background.double()
        self.mean = rows.mean(0)
        centred = rows - self.mean
        covariance = centred.T @ centred / len(rows)
        variance = float(covariance.diagonal().mean())
        _check_variance(rows, variance)
        covariance.diagonal().add_(ridge * variance)
        self.factor = torch.linalg.cholesky(covariance)

    def normals(self, features: Numbers) -> Tensor:
        """The normals of norm 1 of the features' hyperplanes, float64 [N, D]."""
        solved = torch.cholesky_solve(self._centred(features).T, self.factor).T
        size = torch.linalg.vector_norm(solved, dim=1, keepdim=True)
        if bool((size == 0).any()):
            raise ValueError("a feature that is the mean of the background has no hyperplane: give another background")
        return solved / size

    def distances(self, hyperplanes_of: Numbers, features: Numbers) -> Tensor:
        """How far each feature lies beyond the hyperplane of its partner, float64 [N]; negative on the other side."""
        normals = self.normals(hyperplanes_of)
        halfway = self._centred(hyperplanes_of) / 2
        return (normals * (self._centred(features) - halfway)).sum(1)

    def __call__(self, first: Numbers, second: Numbers) -> Tensor:
        """The mean of the distances from each other's hyperplane, float64 [N], of features [N, D] each."""
        first, second = as_tensor(first, "features"), as_tensor(second, "features")
        if first.shape != second.shape:
            raise ValueError(f"pairs need features of one shape, not {list(first.shape)} and {list(second.shape)}")
        with precisely():
            return (self.distances(first, second) + self.distances(second, first)) / 2

    def _centred(self, features: Numbers) -> Tensor:
        features = as_tensor(features, "features")
        if features.dim() != 2 or features.shape[1] != len(self.mean):
            raise ValueError(f"features must be [N, {len(self.mean)}] as the background, not {list(features.shape)}")
        if bad := int((~torch.isfinite(features)).any(1).sum()):
            raise ValueError(f"features must be finite, but {bad} of {len(features)} are not")
        return features.to(self.mean) - self.mean


def _check_variance(rows: Tensor, variance: float) -> None:
    """Refuses a background that tells nothing about the directions in which features differ."""
    # Their mean may be rounded, and then differ from all of them.
    if bool((rows == rows[0]).all()):
        raise ValueError(f"the features of the background must differ, but all {len(rows)} are the same")
    if not torch.finfo(torch.float64).tiny <= variance < math.inf:
        raise ValueError(f"the variance of the background must be a finite number above 0, not {variance}")
