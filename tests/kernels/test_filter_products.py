"""The gradient of the orthonormality penalty by one kernel, compared with autograd."""

import pytest
import torch

from dcnet.kernels import filter_products, use_kernels
from dcnet.regularizers import NORM_EPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def products_of(blocks, filters, zero):
    w = torch.randn(blocks, filters, 7, generator=torch.Generator().manual_seed(filters))
    w[:, 0] *= 0 if zero else 1
    return torch.bmm(w, w.mT).to(DEVICE)


def by_autograd(products):
    products = products.double().requires_grad_()
    inverse = (products.diagonal(dim1=-2, dim2=-1) + NORM_EPS).rsqrt()
    cosines = products * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    penalty = (cosines - torch.eye(products.shape[-1], device=DEVICE)).square().sum()
    return torch.autograd.grad(penalty, products)[0]


def by_kernel(products, inverse):
    filter_products._launch(*products.shape[:2], products.device)(products, inverse, stream=None, aligned=False)
    return products


def by_torch(products, inverse):
    return filter_products.penalty_gradient_(products.double(), inverse.double())


@pytest.mark.parametrize("way", [by_torch, by_kernel])
@pytest.mark.parametrize(("blocks", "filters", "zero"), [(1, 1, False), (3, 5, False), (2, 16, False), (2, 9, True)])
def test_gradient_matches_autograd(way, blocks, filters, zero):
    products = products_of(blocks, filters, zero)
    wanted = by_autograd(products)
    inverse = (products.diagonal(dim1=-2, dim2=-1) + NORM_EPS).rsqrt()
    found = way(products.clone(), inverse)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=1e-6 * float(wanted.abs().max()) + 1e-9)


def test_every_gpu_has_its_own_launch():
    """A compiled kernel is loaded on one GPU."""
    first, second = (filter_products._launch(3, 5, torch.device("cuda", i)) for i in range(2))
    assert first is not second


def test_grid_of_many_depthwise_layers_is_within_the_limits():
    blocks, *others = filter_products._launch(100_000, 1, torch.device("cuda", 0)).grid
    assert blocks == 100_000
    assert max(others) <= 65_535


def test_kernel_is_used_only_where_kernels_are(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(filter_products, "modern", lambda device: True)
    products = torch.ones(1, 2, 2)
    assert filter_products._fits(products)
    assert not filter_products._fits(products.double())
    with use_kernels(False):
        assert not filter_products._fits(products)
    monkeypatch.setattr(filter_products, "modern", lambda device: False)
    assert not filter_products._fits(products)
