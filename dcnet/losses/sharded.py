"""Heads for many classes: each process holds some of the classes, and the softmax is over all of them."""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dcnet.checks import check_number
from dcnet.losses.annealing import BY_MARGIN, AnyAnnealing
from dcnet.losses.cosine import directions
from dcnet.losses.head import IGNORED, MarginSoftmax, Scale, without_autocast
from dcnet.losses.margins import Margin

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


class ShardedMarginSoftmax(MarginSoftmax):
    """MarginSoftmax with the classes divided among the processes of a group, all of which call it together.

    Each process passes its own features and labels, equally many, and gets the mean loss over the joint batch. The
    gradients of features are those that DistributedDataParallel expects. The gradients of weights are exact: do not
    wrap the head. `logits`, `cosines` and `diagnose` use the features of the process and the gathered weights of all
    classes, without a gradient for the weights; all processes must also call them together. Without torch.distributed
    it is a MarginSoftmax with the option `sample`.

    Args:
        in_features: the number of features of a sample, as in `MarginSoftmax`.
        num_classes: the number of classes of all processes together.
        margin: a spec such as "arcface(m=0.3)" or "cosface", or a `Margin`.
        scale: the scale s: a number, "norm", "learned" or a `Learnable`; None for the margin's default.
        annealing: as in `MarginSoftmax`.
        sample: the fraction of its classes that a process uses in a step: all classes of the batch, even if this
            exceeds the fraction, and others at random.
        group: a group of torch.distributed; None for all processes.
        reduction: "mean" or "sum" over the joint batch without ignored samples, which is the same number in all
            processes, or "none" for the losses of the process's own samples. With "none" the gradients are those of
            the mean over the processes of what each computes from its losses, as with DistributedDataParallel.
        ignore_index: samples with this label are ignored, as in `MarginSoftmax`.
        interclass_filtering_threshold: as in `MarginSoftmax`.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        margin: Margin | str = "a-softmax",
        scale: Scale = None,
        annealing: AnyAnnealing | str | None = BY_MARGIN,
        sample: float = 1.0,
        group: Any = None,
        reduction: str = "mean",
        ignore_index: int = IGNORED,
        interclass_filtering_threshold: float | None = None,
    ):
        # Before nn.Module is initialized, since it determines the number of weights.
        object.__setattr__(self, "group", group)
        check_number("sample", sample, above=0, most=1)
        super().__init__(
            in_features,
            num_classes,
            margin,
            scale,
            annealing,
            reduction=reduction,
            ignore_index=ignore_index,
            interclass_filtering_threshold=interclass_filtering_threshold,
        )
        self.sample = sample
        self.rank, self.world = rank_of(group)
        self.first = self._bounds(self.rank)

    def _bounds(self, rank: int) -> int:
        """The first class of a process; the numbers of classes differ by at most one."""
        return rank * self.num_classes // rank_of(self.group)[1]

    def _held_classes(self, num_classes: int) -> int:
        rank, world = rank_of(self.group)
        if num_classes < world:
            raise ValueError(f"num_classes must be at least the number of processes, {world}, not {num_classes}")
        return (rank + 1) * num_classes // world - rank * num_classes // world

    def _generator(self) -> torch.Generator | None:
        """A generator with another seed in each process, so that their weights differ."""
        if self.weight.is_meta:
            return None
        # One draw from the global generator, which advances it: the next head gets other weights.
        drawn = int(torch.randint(2**62, (), device="cpu"))
        return torch.Generator(self.weight.device).manual_seed(drawn + 7919 * rank_of(self.group)[0])

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        self._check_rank()
        if self.world == 1 and self.sample == 1:
            return super().forward(features, labels)
        labels = self._checked(features, labels)
        self._check_counts(labels)
        return self.joint_loss(features, labels)

    def joint_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """The loss of the joint batch, from the features and labels of this process; `forward` checks them first."""
        with without_autocast(features):
            joint = Gathered.apply(features.to(self._dtype), self.group)
            return self._shared_loss(joint, gather_rows(labels, self.group), features.dtype)

    def _first_invalid(self, labels: Tensor) -> int | None:
        """The first invalid label of any process: all processes must raise, or the others would wait forever."""
        own = super()._first_invalid(labels)
        # Class 0, which is valid, means "none".
        found = torch.tensor([0 if own is None else own], device=labels.device)
        return super()._first_invalid(gather_rows(found, self.group))

    def _check_rank(self) -> None:
        """Raises ValueError if rank or number of processes differ from those that the classes were divided for."""
        rank, world = rank_of(self.group)
        if (rank, world) != (self.rank, self.world):
            raise ValueError(
                f"the head was created in process {self.rank} of {self.world}, but is called in {rank} of {world}: "
                "create it after torch.distributed is initialized"
            )

    def _check_counts(self, labels: Tensor) -> None:
        """Raises ValueError in all processes if batch sizes differ: gathering would crash or hang."""
        if labels.is_cuda or torch.compiler.is_compiling():
            return  # It would synchronize with the host, as for labels.
        counts = gather_rows(torch.tensor([len(labels)], device=labels.device), self.group).tolist()
        if len(set(counts)) > 1:
            given = f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
            raise ValueError(
                f"all processes must have the same batch size, not {given}: drop the last batch, or pad it"
            )

    def _shared_loss(self, features: Tensor, labels: Tensor, given: torch.dtype) -> Tensor:
        unit, norms = directions(features, self._dtype, given)
        size = self.scale(norms)
        if self.scale.log is not None:
            size = Shared.apply(size, self.group)
        kept = labels != self.ignore_index
        own = kept & (labels >= self.first) & (labels < self.first + self.held_classes)
        weight, bias, places = self._used((labels - self.first).clamp(0, self.held_classes - 1), own)
        cos, chosen, weight_norms = self._class_cosines(unit, weight, places)
        chosen = chosen * own
        of_labels = Summed.apply(chosen, self.group)
        share, batch = self._next_share(of_labels, kept), self._next_batch(of_labels, norms, kept)
        # Entries of classes that other processes hold are multiplied by zero.
        held = self._target_logits(self._target(chosen, share, batch) * size, weight_norms, bias, places)
        target = Summed.apply(held * own, self.group)
        logits = self._logits(self._others(cos, share, batch), size, weight_norms, bias)
        logits = self._without_duplicates(logits, cos)
        hidden = own[:, None] & (torch.arange(cos.shape[1], device=logits.device) == places[:, None])
        if self.margin.binary:
            losses = self._shared_binary(logits, target, hidden, size.detach())
        else:
            losses = self._shared_softmax(logits.masked_fill(hidden, -math.inf), target)
        penalty = self.margin.penalty(norms)
        if penalty is not None:
            # Only the process that holds the label adds it: its gradient must count once.
            losses = losses + Summed.apply(penalty * own, self.group)
        loss = self._reduced(losses, kept)
        return loss if self.reduction != "none" else OwnRows.apply(loss, self.group)

    def _shared_softmax(self, logits: Tensor, target: Tensor) -> Tensor:
        highest = torch.maximum(largest(logits.amax(1), self.group), target.detach())
        # In place: otherwise there would be three copies of the logits.
        others = Summed.apply(logits.sub_(highest[:, None]).exp_().sum(1), self.group)
        total = others + (target - highest).exp()
        return highest + total.log() - target

    def _shared_binary(self, logits: Tensor, target: Tensor, hidden: Tensor, size: Tensor) -> Tensor:
        assert self.offset is not None
        offset = Shared.apply(self.offset, self.group)
        # All processes compute the term of the label, but its gradient for the shared offset must count once.
        own = F.softplus(-(target + offset / self.world - offset.detach() / self.world + offset.detach()))
        others = Summed.apply(F.softplus(logits + offset).masked_fill(hidden, 0.0).sum(1), self.group)
        of_own, of_others = self.margin.loss_weights(size)
        return of_own * own + of_others * others

    def _used(self, places: Tensor, own: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Weights and biases of the classes used in this step, and the places of the labels among them."""
        if self.sample == 1 or not self.training:
            return self.weight, self.bias, places
        chance = torch.rand(self.held_classes, device=places.device)
        chance[places[own]] = 2.0
        wanted = max(math.ceil(self.sample * self.held_classes), int((chance == 2).sum()), 1)
        chosen = chance.topk(wanted).indices.sort().values
        where = torch.searchsorted(chosen, places).clamp(max=wanted - 1)
        weight = self._by_class(self.weight)[chosen].flatten(0, 1)
        return weight, None if self.bias is None else self.bias[chosen], where

    def _by_class(self, weight: Tensor) -> Tensor:
        """Weights as [classes, centers, in_features]."""
        return weight.unflatten(0, (-1, self.margin.centers()))

    @property
    def divided(self) -> dict[str, tuple[int, int]]:
        """The parameters that are divided among the processes: their first row here, and the rows of all processes."""
        rows = self.margin.centers()
        return {
            name: (self.first * rows, self.num_classes * rows)
            for name, value in (("weight", self.weight), ("bias", self.bias))
            if value is not None
        }

    def full_weight(self) -> Tensor:
        """The weights of all classes, which are in memory once; all processes must call it together."""
        return self._gather_classes(self._by_class(self.weight)).flatten(0, 1)

    def _all_classes(self) -> tuple[Tensor, Tensor | None]:
        if self.world == 1:
            return super()._all_classes()
        return self.full_weight(), None if self.bias is None else self._gather_classes(self.bias)

    def _gather_classes(self, held: Tensor) -> Tensor:
        """The rows that the processes hold for their classes, concatenated in order, without a gradient."""
        held = held.detach()
        if self.world == 1:
            return held
        found = held.new_empty(self.num_classes, *held.shape[1:])
        group: Group = self.group
        for rank in range(self.world):
            rows = found[self._bounds(rank) : self._bounds(rank + 1)]
            if rank == self.rank:
                rows.copy_(held)
            dist.broadcast(rows, group_src=rank, group=group)
        return found
