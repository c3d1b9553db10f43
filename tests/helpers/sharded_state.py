"""Program for each of two processes: gathers and restores sharded weights and moments."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcnet
from dcnet.interrupts import end_process
from dcnet.training.build import build_optimizer
from dcnet.training.state import gather, restore_
from helpers.small_runs import tiny


def make(optimizer, shard):
    torch.manual_seed(0)
    # Three filters on two processes: the shards have different sizes.
    model = torch.nn.Sequential(dcnet.DecoupledConv2d(2, 3, 3, operator="tanh-cos"), torch.nn.Flatten())
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, build_optimizer(tiny(optimizer=optimizer), model, torch.device("cpu"), sharded=shard)


def steps(model, optimizer, count):
    torch.manual_seed(1)
    for _ in range(count):
        model(torch.randn(4, 2, 5, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check(optimizer):
    plain, sharded, fresh = make(optimizer, False), make(optimizer, True), make(optimizer, True)
    for made in (plain, sharded):
        steps(*made, 3)
    wanted, found = gather(*plain), gather(*sharded)
    assert wanted.keys() == found.keys(), (sorted(wanted), sorted(found))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    restore_(*fresh, found)
    assert_equal(gather(*fresh), found)
    steps(*sharded, 2)
    steps(*fresh, 2)
    assert_equal(gather(*fresh), gather(*sharded))


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for optimizer in ("adam", "sgd"):
        check(optimizer)
    # The first process to end must not close the connection of the other.
    dist.barrier()
    dist.destroy_process_group()
    print("equal")
    end_process()
