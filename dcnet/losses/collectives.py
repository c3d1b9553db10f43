"""Sums over processes that know about gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any


def rank_of(group: Group) -> tuple[int, int]:
    """The number of this process in its group, and how many there are; one where nothing is distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def reduce_(value: Tensor, group: Group, by: Any = dist.ReduceOp.SUM) -> Tensor:
    """The value over all processes, in its place; nothing to do for one."""
    if rank_of(group)[1] > 1:
        dist.all_reduce(value, by, group=group)
    return value


class Gathered(torch.autograd.Function):
    """The rows of all processes, one after the other.

    The gradient is the sum over the processes, each of which sees all rows, times their number: what comes before is
    under DistributedDataParallel, which takes the mean of gradients as if each process had a loss of its own.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.count = group, len(rows)
        return gather_rows(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rank, world = rank_of(ctx.group)
        gradient = reduce_(gradient.contiguous().clone(), ctx.group)
        return gradient[rank * ctx.count : (rank + 1) * ctx.count] * world, None


class OwnRows(torch.autograd.Function):
    """Of the rows of all processes, which all of them have, those of this one.

    The gradient is that of the mean over the processes of what each makes of its own rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        rank, world = rank_of(group)
        count = len(rows) // world
        return rows[rank * count : (rank + 1) * count].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather_rows(gradient, ctx.group) / rank_of(ctx.group)[1], None


class Summed(torch.autograd.Function):
    """The sum over the processes, of which each goes on with the same: its gradient is that of its own term."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        # Detached, since torch 2.11 compiles what is returned as it was changed in place without a gradient.
        return reduce_(value.clone(), group).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Shared(torch.autograd.Function):
    """A value that all processes have, and each uses for its own part: the gradients add up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_(gradient.contiguous().clone(), ctx.group), None


def gather_rows(rows: Tensor, group: Group) -> Tensor:
    """The rows of all processes, which have equally many."""
    _, world = rank_of(group)
    if world == 1:
        return rows
    found = [torch.empty_like(rows) for _ in range(world)]
    dist.all_gather(found, rows.contiguous(), group=group)
    return torch.cat(found)


def largest(value: Tensor, group: Group) -> Tensor:
    """The largest of each entry over the processes, without a gradient."""
    return reduce_(value.detach().clone(), group, dist.ReduceOp.MAX)
