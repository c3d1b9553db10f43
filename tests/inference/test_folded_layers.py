"""What folded layers keep for the kernels follows their buffers, in every copy."""

import copy
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import dcnet
from dcnet.inference.fold_network import fold
from dcnet.inference.folded_layers import FoldedConv


@pytest.fixture
def layer() -> FoldedConv:
    model = dcnet.DecoupledConv2d(3, 4, 3, operator="tanh-cos")
    model(torch.randn(2, 3, 5, 5))
    return fold(model)


def radius(layer: FoldedConv) -> float:
    """The radius in the table of the kernels."""
    return float(layer.table()[list(layer.operator.slots).index("radius"), 0])


class Table(nn.Module):
    """Returns the table of a layer."""

    def __init__(self, layer: FoldedConv):
        super().__init__()
        self.layer = layer

    def forward(self) -> torch.Tensor:
        return self.layer.table()


def test_the_table_follows_buffers_at_the_same_address(layer: FoldedConv):
    memory, tables = np.ones(4, dtype=np.float32), []
    for value in (1.0, 2.0):
        memory[:] = value
        given = {"layer.constant_radius": torch.from_numpy(memory)}
        tables.append(functional_call(Table(layer), given, ()))
    assert not torch.equal(*tables)


def test_the_table_follows_the_data_of_a_buffer(layer: FoldedConv):
    """Assigning to `data` changes neither the tensor nor its version, only its address."""
    layer.table()
    layer.constant_radius.data = torch.full((4,), 2.0)
    assert radius(layer) == 2


def test_the_table_is_built_once(layer: FoldedConv):
    before = layer.table()
    assert layer.table() is before
    layer.constant_radius = torch.full((4,), 3.0)
    assert radius(layer) == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_build_their_own_table(layer: FoldedConv, copied):
    before = layer.table().clone()
    with torch.no_grad():
        layer.constant_radius.fill_(2.0)
    other = copied(layer)
    assert layer._kept
    assert not other._kept
    assert other.state_dict().keys() == layer.state_dict().keys()
    assert radius(other) == radius(layer) == 2
    assert not torch.equal(before, layer.table())


def test_large_tensors_are_freed_when_the_layer_moves(layer: FoldedConv):
    layer.table()
    layer.rows(None)
    old = weakref.ref(layer.weight)
    layer.double()
    assert old() is None
    assert radius(layer) == pytest.approx(float(layer.constant_radius[0]))


def test_graphs_of_given_constants_are_freed(layer: FoldedConv):
    source = torch.ones(4, requires_grad=True)
    given = source * 2
    functional_call(Table(layer), {"layer.constant_radius": given}, ())
    old = weakref.ref(given)
    del given
    assert old() is None
