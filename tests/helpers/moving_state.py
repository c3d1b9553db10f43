"""Program: trains a sharded network with sharded heads on 4 processes, and continues on 1, 2, 3 and 8.

It forks processes, which is much faster than starting them. Each saves its results as `<world>/<rank>.pt`.
"""

import itertools
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcnet
from dcnet.losses import ShardedMarginSoftmax
from dcnet.optim import WeightProjection, param_groups
from dcnet.parameters import Learnable
from dcnet.training import archive_state, load_archive, load_state, save_state
from helpers.filter_networks import whole
from helpers.processes import process_group

FEATURES, CLASSES, BATCH = 6, 11, 24
SAVED, CONTINUED = 3, 2


class Heads(nn.Module):
    """Two heads: one with two centers per class and a learned scale, one with a bias."""

    def __init__(self, classes=CLASSES):
        super().__init__()
        options = {"scale": Learnable(8.0), "annealing": "auto"}
        self.centers = ShardedMarginSoftmax(FEATURES, classes, "subcenter-arcface(k=2)", **options)
        self.biased = ShardedMarginSoftmax(FEATURES, classes, "softmax")

    def forward(self, features, labels):
        return self.centers(features, labels) + self.biased(features, labels)


def make(way):
    """A network with learned radii and mean norms, its heads, and their optimizer."""
    torch.manual_seed(4)
    # Seven filters cannot be divided evenly; the radii of the second layer have fewer rows than 8 processes.
    layers = dcnet.DecoupledLinear(5, 7, operator="tanh-cos"), dcnet.DecoupledLinear(7, FEATURES, operator="ball-cos")
    network, heads = nn.Sequential(layers[0], nn.ReLU(), layers[1]).double(), Heads().double()
    if dist.is_initialized():
        dcnet.sync_norms(network)
    if way == "fsdp2":
        fully_shard(network, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    network = nn.parallel.DistributedDataParallel(network) if way == "ddp" else network
    groups = [*param_groups(network, 1e-3), *param_groups(heads, 1e-3)]
    optimizer = torch.optim.Adam([group for group in groups if group["params"]], lr=0.05)
    return {"network": network, "heads": heads}, optimizer


def train(networks, optimizer, steps, rank, world):
    """Trains on the share of this process of each batch; returns the losses."""
    projection = WeightProjection(networks["network"], every=2)
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, 5, generator=generator, dtype=torch.float64).chunk(world)[rank]
        labels = torch.randint(CLASSES, (BATCH,), generator=generator).chunk(world)[rank]
        projection.count = step
        optimizer.zero_grad()
        loss = networks["heads"](networks["network"](x), labels)
        loss.backward()
        optimizer.step()
        projection.step()
        losses.append(loss.item())
    return losses


def values(networks, optimizer):
    """All tensors of this process, by name: whole ones of the network, own rows of the heads."""
    found = {}
    for kind, network in networks.items():
        inner = getattr(network, "module", network)
        found |= {f"{kind}.{name}": whole(value).clone() for name, value in inner.state_dict().items()}
        for name, parameter in inner.named_parameters():
            for key, value in optimizer.state[parameter].items():
                found[f"{kind}.{name}.{key}"] = whole(value).clone()
    return found


def first_part(rank, folder):
    with process_group(rank, folder / "4", 4):
        networks, optimizer = make("fsdp2")
        train(networks, optimizer, range(SAVED - 1), rank, 4)
        # Learning rates of a schedule are a part of the state.
        optimizer.param_groups[0]["lr"] = 0.02
        for step in (SAVED - 1, SAVED):
            train(networks, optimizer, range(step - 1, step), rank, 4) if step == SAVED else None
            save_state(folder / "state", step, networks, optimizer, {"at": step, "list": [1, None]})
        saved = values(networks, optimizer)
        full = networks["heads"].centers.full_weight()
        losses = train(networks, optimizer, range(SAVED, SAVED + CONTINUED), rank, 4)
        torch.save({"saved": saved, "full": full, "losses": losses}, folder / "4" / f"{rank}.pt")


def second_part(rank, folder, world, way):
    with process_group(rank, folder / str(world), world):
        torch.save(continued(rank, folder, world, way), folder / str(world) / f"{rank}.pt")


def continued(rank, folder, world, way):
    networks, optimizer = make(way)
    # A state that loading replaces.
    train(networks, optimizer, range(7, 8), rank, world)
    with torch.no_grad():
        for network in networks.values():
            for parameter in network.parameters():
                parameter.add_(1.0)
    found = {"returned": load_state(folder / "state", networks, optimizer)}
    found["saved"] = values(networks, optimizer)
    found["rates"] = [group["lr"] for group in optimizer.param_groups]
    fresh, _ = make(way)
    load_archive(folder / "archive.safetensors", fresh)
    found["archived"] = values(fresh, optimizer_of(fresh))
    found["errors"] = errors(folder, networks, optimizer)
    after = values(networks, optimizer)
    found["unchanged"] = all(torch.equal(after[name], value) for name, value in found["saved"].items())
    found["losses"] = train(networks, optimizer, range(SAVED, SAVED + CONTINUED), rank, world)
    return found


def optimizer_of(networks):
    return torch.optim.SGD([value for network in networks.values() for value in network.parameters()])


def errors(folder, networks, optimizer):
    """The messages for shards that only one process finds damaged, and for another number of classes."""
    others = {**networks, "heads": Heads(CLASSES + 8).double()}
    calls = {
        "damaged": lambda: load_state(folder / "damaged", networks, optimizer),
        "missing": lambda: load_state(folder / "missing", networks, optimizer),
        "classes": lambda: load_state(folder / "state", others, optimizer_of(others)),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


def break_copies(folder):
    """Copies of the checkpoint, one with a damaged shard and one without a shard."""
    for name in ("damaged", "missing"):
        shutil.copytree(folder / "state", folder / name)
    shard = folder / "damaged" / f"step-{SAVED:08d}" / "shard-1-of-4.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    (folder / "missing" / f"step-{SAVED:08d}" / "shard-2-of-4.safetensors").unlink()


def run(work, folder, world, *arguments):
    (folder / str(world)).mkdir()
    torch.multiprocessing.start_processes(work, (folder, *arguments), world, start_method="fork")


def main(folder):
    torch.set_num_threads(1)
    run(first_part, folder, 4)
    archive_state(folder / "state", folder / "archive.safetensors")
    break_copies(folder)
    # Without a process group.
    (folder / "1").mkdir()
    torch.save(continued(0, folder, 1, "alone"), folder / "1" / "0.pt")
    for world, way in itertools.chain([(2, "ddp"), (3, "fsdp2"), (8, "fsdp2")]):
        run(second_part, folder, world, world, way)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
