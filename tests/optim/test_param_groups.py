"""What decays and what does not."""

import pytest
import torch
from filter_networks import examples, gradients, network
from torch import nn
from torch.nn.utils import prune

import dcnet
from dcnet.models import create_model
from dcnet.optim import param_groups


def names_of(model):
    decayed, kept = param_groups(model, weight_decay=5e-4, named=True)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (5e-4, 0.0)
    names = [*decayed["param_names"], *kept["param_names"]]
    values = [*decayed["params"], *kept["params"]]
    found = {name: id(value) for name, value in zip(names, values, strict=True)}
    assert len(names) == len(found)
    assert found == {name: id(value) for name, value in model.named_parameters()}
    return [decayed["param_names"], kept["param_names"]]


def test_what_decays_in_a_resnet():
    decayed, kept = names_of(create_model("resnet32", "tanh-sigmoid(learnable=True)", width=0.05))
    units = [f"body.conv{stage}.unit{i}" for stage in (1, 2, 3) for i in (1, 2, 3, 4, 5)]
    convs = ["body.conv0", *(f"{unit}.{half}" for unit in units for half in ("first", "second"))]
    shortcuts = ["body.conv2.unit1.shortcut", "body.conv3.unit1.shortcut"]
    assert set(kept) == {f"{conv}.conv.{value}" for conv in convs for value in ("weight", "radius", "k")}
    batch_norms = {f"{layer}.norm.{value}" for layer in (*convs, *shortcuts) for value in ("weight", "bias")}
    assert set(decayed) == {f"{layer}.conv.weight" for layer in shortcuts} | batch_norms | {"classifier.weight"}


def test_what_decays_elsewhere():
    weighted, kept = names_of(create_model("resnet32", "tanh-cos+linear", width=0.05))
    assert {name.rpartition(".")[2] for name in kept} == {"radius"}
    assert "body.conv0.conv.weight" in weighted
    _, kept = names_of(create_model("resnet18-modified", "conv", width=0.02, classifier="normalized"))
    assert [name for name in kept if "activation" not in name] == ["classifier.weight"]
    assert "body.conv0.activation.weight" in kept
    decayed, kept = names_of(network())
    assert decayed == ["0.bias", "1.bias", "3.weight", "3.bias", "4.bias"]
    assert kept == ["0.weight", "1.weight", "4.weight"]
    assert names_of(nn.Linear(3, 2)) == [["weight", "bias"], []]


def test_the_scale_that_a_head_learns_does_not_decay():
    """It is kept as its logarithm, which decay would draw to 0, where classes can hardly be told apart."""
    assert names_of(dcnet.losses.MarginSoftmax(4, 3, scale="learned")) == [["weight"], ["scale.log"]]
    assert names_of(dcnet.losses.MarginSoftmax(4, 3, scale=16.0)) == [["weight"], []]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_filters_that_a_hook_computes_decay_where_their_norm_matters():
    model = nn.Sequential(
        *(
            dcnet.DecoupledLinear(3, 3, bias=False, operator=f"log-cos{ending}")
            for ending in ("", "+linear", "", "+linear")
        )
    )
    for layer in model[:2]:
        prune.random_unstructured(layer, "weight", 0.5)
    for layer in model[2:]:
        nn.utils.weight_norm(layer)
    assert names_of(model) == [
        ["1.weight_orig", "3.weight_g", "3.weight_v"],
        ["0.weight_orig", "2.weight_g", "2.weight_v"],
    ]


def test_shared_parameters_are_in_one_group_and_decay_where_a_norm_matters():
    model = nn.Sequential(*[dcnet.DecoupledLinear(4, 4, operator="linear-cos", bias=False) for _ in range(3)])
    model[1].weight = model[0].weight
    assert names_of(model) == [[], ["0.weight", "2.weight"]]
    model.append(nn.Linear(4, 4, bias=False))
    model[3].weight = model[2].weight
    assert names_of(model) == [["2.weight"], ["0.weight"]]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("build", [network, lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, 2)).double()])
def test_groups_suit_torchs_optimizers(make, named, build):
    model = build()
    optimizer = make(param_groups(model, weight_decay=0.1, named=named), lr=0.01)
    gradients(model, examples())
    optimizer.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    make(param_groups(model, weight_decay=0.1, named=named), lr=0.01).load_state_dict(optimizer.state_dict())
