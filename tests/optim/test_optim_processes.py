"""The tricks among several processes."""

import datetime

import pytest
import torch
import torch.distributed as dist
from filter_networks import BOTH, examples, network, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcnet.ending import end_process
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


def work(rank, folder, way):
    """One of two processes, which has every other example."""
    torch.set_num_threads(1)
    rendezvous = {"init_method": f"file://{folder}/rendezvous", "timeout": datetime.timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **rendezvous)
    results = {}
    for on in BOTH:
        torch.manual_seed(0)
        model = train(wrap(network(), way), examples()[rank::2], on)
        results[on] = {name.removeprefix("module."): whole(v.detach()) for name, v in model.named_parameters()}
    torch.save(results, f"{folder}/{rank}.pt")
    # What averages gradients waits for its group when it goes, and must not find it gone.
    del model
    dist.barrier()
    dist.destroy_process_group()
    end_process()


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_processes_train_as_one_does(way, tmp_path):
    processes = torch.multiprocessing.spawn(work, (str(tmp_path), way), nprocs=2, join=False)
    try:
        # It gives False when one of them has ended, too.
        assert any(processes.join(timeout=100) for _ in range(3)), "two processes wait for each other"
    finally:
        for process in processes.processes:
            process.kill()
    for on in BOTH:
        torch.manual_seed(0)
        alone = {name: value.detach() for name, value in train(network(), examples(), on).named_parameters()}
        for rank in (0, 1):
            torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt")[on], alone)
