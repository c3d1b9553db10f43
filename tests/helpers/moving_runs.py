"""Program: `dcnet train` on several numbers of processes, stopped, resumed on other numbers, and with failures.

With the argument "heads", the runs have heads whose classes are divided among the processes. It forks processes, which
is much faster than starting them. The exit codes and messages are in `results.json`.
"""

import errno
import json
import math
import os
import shutil
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._dynamo  # Imported by optimizers; here before the processes are forked.
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcnet.cli.app import main
from dcnet.data import load_dataset
from dcnet.training import setup, tensor_files
from dcnet.training.step import Step
from dcnet.training.trainer import Trainer
from helpers.processes import free_port

SIZES = ["--train-images", "60", "--batch-size", "24", "--width", "0.1", "--steps", "8", "--norm", "none"]
TRICKS = ["--projection-every", "4", "--evaluate-every", "4", "--device", "cpu"]
COMMAND = ["train", *SIZES, *TRICKS]
# A learned scale and the share of the margin depend on all classes.
HEAD = ["--margin", "arcface", "--annealing", "auto", "--margin-scale", "learned", "--features", "6"]
DECAY, SHARDED = ["--weight-decay", "1e-3"], ["--shard-head", "True"]
STOPPED = 5
# Steps are numbered from 0.
FAILS_AT = 2


class ShardingAccelerator(Accelerator):
    """Shards the network by FSDP2, which accelerate does on GPUs only."""

    distributed_type = DistributedType.FSDP
    is_fsdp2 = True

    def prepare(self, model, optimizer):
        names = {id(value): name for name, value in model.named_parameters()}
        groups = [[names[id(value)] for value in group["params"]] for group in optimizer.param_groups]
        fully_shard(model, mesh=init_device_mesh("cpu", (self.num_processes,)))
        named = dict(model.named_parameters())
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [named[name] for name in own]
        return model, SimpleNamespace(optimizer=optimizer)


def shard():
    setup.Accelerator = ShardingAccelerator


def stop():
    """The second process gets SIGINT."""
    read_meter = Trainer._read_meter

    def read_and_stop(self):
        if self.done == STOPPED and int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return read_meter(self)

    Trainer._read_meter = read_and_stop


def at_one_step(action):
    """Calls the action in the second process, at one step, with the labels of its batch and the network."""
    call, seen = Step.__call__, []

    def changed(self, images, labels):
        seen.append(labels)
        if len(seen) == FAILS_AT + 1 and os.environ["RANK"] == "1":
            action(labels, self.objective.model)
        call(self, images, labels)

    Step.__call__ = changed


def fill_disk():
    """The first process cannot write after the first rows of a head."""
    bytes_of = tensor_files._bytes_of

    def fails_after(value):
        if os.environ["RANK"] == "0" and value.shape == (5, 6):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return bytes_of(value)

    tensor_files._bytes_of = fails_after


def give_up_early():
    """Processes wait for others for one second only."""
    options = [InitProcessGroupKwargs(timeout=timedelta(seconds=1))]
    setup.process_group_options = lambda: options


ACTIONS = {
    "give up early": give_up_early,
    "shard": shard,
    "fill disk": fill_disk,
    "stop": stop,
    "label": lambda: at_one_step(lambda labels, _: labels[1:2].fill_(99)),
    "slow": lambda: at_one_step(lambda *_: time.sleep(2)),
    "kill": lambda: at_one_step(lambda *_: os.kill(os.getpid(), signal.SIGKILL)),
    "nan": lambda: at_one_step(lambda _, model: model.network.head.weight.register_hook(lambda x: x * math.nan)),
}


def process(rank, world, port, folder, arguments, actions):
    """The code of a forked process; its output goes to files."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY), number)
    if world > 1:
        sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {**sizes, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for action in actions:
        ACTIONS[action]()
    code = main([*map(str, arguments)])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launch(name, world, folder, arguments, *actions):
    """Forks the processes of a command; returns exit codes, messages and seconds."""
    place, port, start = folder / "output" / name, free_port(), time.monotonic()
    place.mkdir(parents=True)
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            process(rank, world, port, place, arguments, actions)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    errors = [(place / f"{rank}.err").read_text() for rank in range(world)]
    return {"codes": codes, "errors": errors, "seconds": time.monotonic() - start}


def the_run(folder):
    (found,) = [path for path in folder.iterdir() if path.is_dir()]
    return found


class Launches:
    """Launches of a command, and their results by name."""

    def __init__(self, folder, command):
        self.folder, self.command, self.results = folder, command, {}

    def start(self, name, world, runs, *actions, options=()):
        words = [*self.command, *options, "--runs", self.folder / runs]
        self.results[name] = launch(name, world, self.folder, words, *actions)

    def resume(self, name, world, source, *actions, options=()):
        shutil.copytree(self.folder / source, self.folder / name)
        words = ["train", "--resume", the_run(self.folder / name), "--device", "cpu", *options]
        self.results[name] = launch(name, world, self.folder, words, *actions)


def networks(folder):
    """Runs under DDP and FSDP2."""
    runs = Launches(folder, COMMAND)
    start, resume = runs.start, runs.resume
    start("whole", 1, "whole")
    start("stopped on 4", 4, "sharded", "shard", "stop")
    resume("4 to 1", 1, "sharded")
    resume("4 to 2", 2, "sharded")
    resume("4 to 3", 3, "sharded", "shard")
    start("stopped on 1", 1, "one", "stop")
    resume("1 to 2", 2, "one", "shard")
    shutil.copytree(folder / "sharded", folder / "incomplete")
    next(the_run(folder / "incomplete").glob("checkpoints/*/shard-2-of-4.safetensors")).unlink()
    resume("incomplete on 2", 2, "incomplete")
    start("slow", 2, "slow", "slow")
    start("too slow", 2, "too slow", "give up early", "slow")
    start("label", 2, "label", "label")
    start("kill", 2, "kill", "kill")
    return runs.results


def heads(folder):
    """Runs whose heads have their classes divided among the processes; the number of classes is 10."""
    runs = Launches(folder, [*COMMAND, *HEAD, *DECAY])
    start, resume = runs.start, runs.resume
    start("whole", 1, "whole")
    start("stopped on 4", 4, "sharded", "stop", options=SHARDED)
    for world in (1, 2, 3, 8):
        resume(f"4 to {world}", world, "sharded")
    start("stopped on 1", 1, "one", "stop")
    resume("1 to 2", 2, "one", options=SHARDED)
    softmax = ["--margin", "l2-softmax", "--annealing", "none", "--precision", "bfloat16"]
    start("softmax", 3, "softmax", options=softmax)
    start("sharded softmax", 3, "sharded softmax", options=[*softmax, *SHARDED])
    pretrained = ["--pretrained", the_run(folder / "whole"), "--optimizer", "sgd"]
    start("pretrained", 1, "pretrained", options=pretrained)
    start("pretrained on 3", 3, "pretrained on 3", options=[*pretrained, *SHARDED])
    sample = ["--sample-classes", "0.3", "--norm", "batch"]
    start("sample", 2, "sample", options=sample)
    start("stopped sample", 2, "stopped sample", "stop", options=sample)
    resume("resumed sample", 2, "stopped sample")
    start("nan", 2, "nan", "nan", options=SHARDED)
    start("full", 2, "full", "fill disk", options=SHARDED)
    start("fsdp", 2, "fsdp", "shard", options=SHARDED)
    return runs.results


def main_program(folder, program="networks"):
    torch.set_num_threads(1)
    # Imports scikit-learn before the processes are forked.
    load_dataset("digits")
    results = {"networks": networks, "heads": heads}[program](folder)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main_program(Path(sys.argv[1]), *sys.argv[2:])
