"""Weight projection, weighted gradients and regularizers in several processes."""

import itertools

import pytest
import torch
from helpers.filter_networks import BOTH, examples, network, whole
from helpers.processes import process_group, results_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS = ("ddp", "fsdp2")


def work(rank, folder):
    """One of two processes, which trains on every other example."""
    results = {}
    with process_group(rank, folder, 2):
        for way, on in itertools.product(WAYS, BOTH):
            torch.manual_seed(0)
            model = train(wrap(network(), way), examples()[rank::2], on)
            results[way, on] = {name.removeprefix("module."): whole(v.detach()) for name, v in model.named_parameters()}
            # DDP waits for its process group when it is deleted.
            del model
        torch.save(results, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The parameters after training in two processes, by rank."""
    return results_of(work, tmp_path_factory.mktemp("processes"), 2)


@pytest.mark.parametrize("on", BOTH)
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_like_one(way, on, trained):
    torch.manual_seed(0)
    alone = {name: value.detach() for name, value in train(network(), examples(), on).named_parameters()}
    for found in trained:
        torch.testing.assert_close(found[way, on], alone)
