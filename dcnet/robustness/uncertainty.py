"""How well a network knows what it does not know: calibration, and detection of images of other classes."""

import math

import torch
from scipy.optimize import minimize_scalar
from scipy.stats import rankdata
from torch import Tensor

# Bins of equal width, as usual for this error.
BINS = 15
# The range of temperatures that are tried.
TEMPERATURES = (0.05, 20.0)


def calibration_error(logits: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Returns the expected calibration error: the mean gap between confidence and accuracy, over bins of confidence.

    The confidence of a prediction is its probability by softmax; bins are weighted by their number of predictions.
    """
    confidence, predicted = logits.double().softmax(1).max(1)
    right = (predicted == labels).double()
    place = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64, device=logits.device).index_add_(0, place, confidence - right)
    return (gaps.abs().sum() / len(labels)).item()


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """Returns the number by which to divide logits for the lowest cross-entropy."""
    values, target = logits.double(), labels.to(logits.device)

    def loss(log_temperature: float) -> float:
        return torch.nn.functional.cross_entropy(values / math.exp(log_temperature), target).item()

    low, high = (math.log(limit) for limit in TEMPERATURES)
    return math.exp(minimize_scalar(loss, bounds=(low, high), method="bounded").x)


def scaled_calibration_error(logits: Tensor, labels: Tensor) -> float:
    """Returns the calibration error after temperature scaling.

    The temperature of each half of the images comes from the other half.
    """
    even = torch.arange(len(labels), device=logits.device) % 2 == 0
    scaled = logits.double().clone()
    for half in (even, ~even):
        scaled[half] /= best_temperature(logits[~half], labels[~half])
    return calibration_error(scaled, labels)


def auroc(known: Tensor, unknown: Tensor) -> float:
    """Returns the probability that a known image has a higher score than an unknown one; equal scores count half."""
    scores = torch.cat([known, unknown]).double().cpu().numpy()
    ranks = rankdata(scores)[: len(known)].sum()
    return float((ranks - len(known) * (len(known) + 1) / 2) / (len(known) * len(unknown)))
