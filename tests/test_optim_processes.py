"""Weight projection, weighted gradients and regularizers in several processes."""

import itertools

import pytest
import torch
from helpers.filter_networks import BOTH, Tokens, examples, gradients, network, tokens, whole
from helpers.processes import process_group, results_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcnet
from dcnet.optim import WeightedGradients, WeightProjection, param_groups
from dcnet.regularizers import orthonormal


def train(model, x, on):
    optimizer = torch.optim.Adam(param_groups(model, weight_decay=0.1), lr=0.05)
    WeightedGradients(model, optimizer, on=on)
    projection = WeightProjection(model, every=2, norm=2.0)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean() + 0.01 * orthonormal(model)
        loss.backward()
        optimizer.step()
        projection.step()
    return model


def wrap(model, way):
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    settings = {"mesh": init_device_mesh("cpu", (2,)), "shard_placement_fn": WAYS[way]}
    fully_shard(next(layer for layer in model.modules() if isinstance(layer, dcnet.layers.Decoupled)), **settings)
    return fully_shard(model, **settings)


def within_filters(parameter):
    """Divides the filters themselves if that is possible evenly."""
    return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % 2 == 0 else None


# How `fully_shard` divides parameters.
WAYS = {"ddp": None, "fsdp2": None, "fsdp2 within filters": within_filters}
NETWORKS = {"images": (network, examples), "tokens": (lambda: dcnet.sync_norms(Tokens()), tokens)}


def work(rank, folder):
    """One of two processes, which trains on every other example."""
    results = {}
    with process_group(rank, folder, 2):
        for way, kind, on in itertools.product(WAYS, NETWORKS, BOTH):
            torch.manual_seed(0)
            make, data = NETWORKS[kind]
            model = train(wrap(make(), way), data()[rank::2], on)
            results[way, kind, on] = {name.removeprefix("module."): whole(v) for name, v in model.state_dict().items()}
            # DDP waits for its process group when it is deleted.
            del model
        torch.manual_seed(0)
        results["tensor parallel"] = projected(parallel(Tokens()))
        results["error"] = error_for_partial_sums()
        torch.save(results, f"{folder}/{rank}.pt")


def parallel(model):
    """Divides the filters of the first layer among processes, and each filter of the second one."""
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def projected(model):
    """All gradients, and the filters after a projection."""
    gradients(model.eval(), tokens())
    WeightProjection(model, norm=2.0).project_()
    named = dict(model.named_parameters())
    return {name: (whole(value.grad), whole(value.detach())) for name, value in named.items()}


def error_for_partial_sums():
    model = network()
    model[0].weight = nn.Parameter(DTensor.from_local(model[0].weight, init_device_mesh("cpu", (2,)), [Partial()]))
    with pytest.raises(ValueError, match="must be sharded or replicated") as raised:
        WeightProjection(model).project_()
    return str(raised.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The parameters after training in two processes, by rank."""
    return results_of(work, tmp_path_factory.mktemp("processes"), 2)


@pytest.mark.parametrize("on", BOTH)
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_like_one(way, kind, on, trained):
    """Parameters, and the running mean norms."""
    torch.manual_seed(0)
    make, data = NETWORKS[kind]
    alone = train(make(), data(), on).state_dict()
    for found in trained:
        torch.testing.assert_close(found[way, kind, on], dict(alone))


def test_tensor_parallel_layers(trained):
    torch.manual_seed(0)
    alone = projected(Tokens())
    for found in trained:
        torch.testing.assert_close(found["tensor parallel"], alone)


def test_partial_sums_raise(trained):
    assert all("Partial" in found["error"] for found in trained)
