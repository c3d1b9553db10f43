"""Sums and gathers over processes, with the gradients that a head with divided classes needs."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any


def rank_of(group: Group) -> tuple[int, int]:
    """The rank of this process in its group and the size of the group; 0 and 1 without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def reduce_(value: Tensor, group: Group, by: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduces the value over all processes, in place."""
    if rank_of(group)[1] > 1:
        dist.all_reduce(value, by, group=group)
    return value


class Gathered(torch.autograd.Function):
    """The rows of all processes, concatenated.

    The gradient is the sum over the processes, each of which uses all rows, times the number of processes: the network
    before it is under DistributedDataParallel, which averages gradients as if each process had its own loss.
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
    """The rows of this process, from the concatenated rows of all processes.

    The gradient is that of the mean, over the processes, of the value that each computes from its own rows.
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
    """The sum over the processes, which all continue with it: the gradient of each term is that of the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        # Detached: torch 2.11 compiles an output that was changed in place without a gradient.
        return reduce_(value.clone(), group).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Shared(torch.autograd.Function):
    """A value that all processes hold and each uses for its own classes: the gradients are summed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_(gradient.contiguous().clone(), ctx.group), None


def gather_rows(rows: Tensor, group: Group) -> Tensor:
    """The rows of all processes, concatenated; all have the same number of rows."""
    _, world = rank_of(group)
    if world == 1:
        return rows
    found = [torch.empty_like(rows) for _ in range(world)]
    dist.all_gather(found, rows.contiguous(), group=group)
    return torch.cat(found)


def largest(value: Tensor, group: Group) -> Tensor:
    """The elementwise maximum over the processes, without a gradient."""
    return reduce_(value.detach().clone(), group, dist.ReduceOp.MAX)
