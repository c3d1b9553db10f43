"""Heads for many classes: each process holds some of the classes, and the softmax is over all of them."""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.checks import check_number
from dcnet.losses.annealing import BY_MARGIN, AnyAnnealing
from dcnet.losses.collectives import Gathered, Group, OwnRows, Shared, Summed, gather_rows, largest, rank_of, reduce_
from dcnet.losses.cosine import directions
from dcnet.losses.head import IGNORED, MarginSoftmax, Scale, without_autocast
from dcnet.losses.margins import Margin

# Weight rows that are drawn at once; a multiple of 16, which torch draws together on a CPU.
DRAWN_ROWS = 2**14
# Logits of a process that `score` computes at once.
SCORED_LOGITS = 2**26


class Joint(NamedTuple):
    """The joint batch of N samples, and its cosines with the C classes that this process uses.

    `own` [N] marks samples with a label among these classes, and `places` are the columns of the labels.
    """

    norms: Tensor
    size: Tensor
    kept: Tensor
    own: Tensor
    places: Tensor
    classes: Tensor
    cos: Tensor
    of_label: Tensor
    weight_norms: Tensor
    bias: Tensor | None

    @property
    def hidden(self) -> Tensor:
        """The entries of the labels, bool [N, C]."""
        columns = torch.arange(self.cos.shape[1], device=self.cos.device)
        return self.own[:, None] & (columns == self.places[:, None])


class ShardedMarginSoftmax(MarginSoftmax):
    """MarginSoftmax with the classes divided among the processes of a group, all of which call it together.

    Each process passes its own features and labels, equally many, and gets the mean loss over the joint batch. The
    gradients of features are those that DistributedDataParallel expects. The gradients of weights are exact: do not
    wrap the head. `logits`, `cosines` and `diagnose` use the features of the process and the gathered weights of all
    classes, without a gradient for the weights; all processes must also call them together. `score` gathers no weights.
    On CPUs, and from the same seed in all processes, the initial weights are those of a MarginSoftmax. Without
    torch.distributed it is a MarginSoftmax with the option `sample`.

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

    group: Group

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

    @torch.no_grad()
    def _init_weight(self, deviation: float) -> None:
        """Draws the weights of all classes in blocks and keeps its own: processes do not change the result."""
        rows = self.margin.centers()
        first, total = self._bounds(rank_of(self.group)[0]) * rows, self.num_classes * rows
        starts = range(0, max(total - DRAWN_ROWS, 0) + 1, DRAWN_ROWS)
        for start in starts:
            end = total if start == starts[-1] else start + DRAWN_ROWS
            block = nn.init.normal_(self.weight.new_empty(end - start, self.in_features), std=deviation)
            begin, stop = max(start, first), min(end, first + len(self.weight))
            if begin < stop:
                self.weight[begin - first : stop - first] = block[begin - start : stop - start]

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        self._check_rank()
        if self.world == 1 and self.sample == 1:
            return super().forward(features, labels)
        return self.joint_loss(features, self._checked_batch(features, labels))

    def joint_loss(self, features: Tensor, labels: Tensor) -> Tensor:
        """The loss of the joint batch, from the features and labels of this process; `forward` checks them first."""
        with without_autocast(features):
            return self._shared_loss(self._gathered(features, labels))

    def loss_and_predictions(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the predicted classes [N] without a margin: of all classes, or of those that the step uses."""
        self._check_rank()
        if self.world == 1 and self.sample == 1:
            return super().loss_and_predictions(features, labels)
        labels = self._checked_batch(features, labels)
        with without_autocast(features):
            joint = self._gathered(features, labels)
            # The scale is positive, so without weight norms and biases the largest cosine has the largest logit.
            plain = self.margin.unit_weights and joint.bias is None
            found = self._predicted(joint, joint.cos.detach() if plain else self._plain_logits(joint))
            return self._shared_loss(joint), found[self.rank * len(labels) : (self.rank + 1) * len(labels)]

    @torch.no_grad()
    def score(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy without a margin and predicted classes, both [N], of a batch that is the same in all processes.

        All classes count, also in training mode; the loss of an ignored sample is 0. All processes must call this
        together; the features of the first one count. No process holds the weights of another one.
        """
        labels, features = self._checked(features, labels), features.clone()
        if self.world > 1:
            dist.broadcast(features, group_src=0, group=self.group)
        count = max(SCORED_LOGITS // (self.num_classes // self.world), 1)
        with without_autocast(features):
            parts = zip(features.split(count), labels.split(count), strict=True)
            losses, classes = zip(*(self._scored(*part) for part in parts), strict=True)
        return torch.cat(losses), torch.cat(classes)

    def _scored(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        joint = self._joint(features, labels, features.dtype, sampled=False)
        logits = self._plain_logits(joint)
        of_label = logits.gather(1, joint.places[:, None])[:, 0].masked_fill(~joint.own, 0.0)
        classes = self._predicted(joint, logits)
        others = logits.masked_fill_(joint.hidden, -math.inf)
        losses = self._shared_softmax(others, Summed.apply(of_label, self.group))
        return losses.masked_fill(~joint.kept, 0.0), classes

    @torch.no_grad()
    def _plain_logits(self, joint: Joint) -> Tensor:
        """The logits [N, C] without a margin."""
        return self._logits(joint.cos, joint.size, joint.weight_norms, joint.bias)

    @torch.no_grad()
    def _predicted(self, joint: Joint, values: Tensor) -> Tensor:
        """The class with the largest value for each sample; of equal ones the first, as `argmax` returns."""
        highest, column = values.max(1)
        elsewhere = highest < largest(highest, self.group)
        return reduce_(joint.classes[column].masked_fill(elsewhere, self.num_classes), self.group, dist.ReduceOp.MIN)

    def _checked_batch(self, features: Tensor, labels: Tensor) -> Tensor:
        """The labels of this process in int64; raises ValueError in all processes if one has an invalid batch."""
        labels = self._checked(features, labels)
        self._check_counts(labels)
        return labels

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

    def _gathered(self, features: Tensor, labels: Tensor) -> Joint:
        """The joint batch, from the features and labels of this process."""
        joint = Gathered.apply(features.to(self._dtype), self.group)
        return self._joint(joint, gather_rows(labels, self.group), features.dtype)

    def _joint(self, features: Tensor, labels: Tensor, given: torch.dtype, sampled: bool = True) -> Joint:
        """The joint batch, from features and labels of all processes; `given` is the dtype of the features before.

        In training mode it has the classes of this step only, if `sampled`.
        """
        unit, norms = directions(features, self._dtype, given)
        size = self.scale(norms)
        if self.scale.log is not None:
            size = Shared.apply(size, self.group)
        kept = labels != self.ignore_index
        own = kept & (labels >= self.first) & (labels < self.first + self.held_classes)
        places = (labels - self.first).clamp(0, self.held_classes - 1)
        classes, weight, bias, places = self._used(places, own, sampled)
        cos, of_label, weight_norms = self._class_cosines(unit, weight, places)
        return Joint(norms, size, kept, own, places, self.first + classes, cos, of_label * own, weight_norms, bias)

    def _shared_loss(self, joint: Joint) -> Tensor:
        norms, size, kept, own, cos = joint.norms, joint.size, joint.kept, joint.own, joint.cos
        of_labels = Summed.apply(joint.of_label, self.group)
        share, batch = self._next_share(of_labels, kept), self._next_batch(of_labels, norms, kept)
        # Entries of classes that other processes hold are multiplied by zero.
        scaled = self._target(joint.of_label, share, batch) * size
        held = self._target_logits(scaled, joint.weight_norms, joint.bias, joint.places)
        target = Summed.apply(held * own, self.group)
        logits = self._logits(self._others(cos, share, batch), size, joint.weight_norms, joint.bias)
        logits = self._without_duplicates(logits, cos)
        if self.margin.binary:
            losses = self._shared_binary(logits, target, joint.hidden, size.detach())
        else:
            losses = self._shared_softmax(logits.masked_fill(joint.hidden, -math.inf), target)
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

    def _used(self, places: Tensor, own: Tensor, sampled: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """The classes of this process used in this step, their weights and biases, and the labels among them."""
        if self.sample == 1 or not (sampled and self.training):
            return torch.arange(self.held_classes, device=places.device), self.weight, self.bias, places
        chance = torch.rand(self.held_classes, device=places.device)
        chance[places[own]] = 2.0
        wanted = max(math.ceil(self.sample * self.held_classes), int((chance == 2).sum()), 1)
        chosen = chance.topk(wanted).indices.sort().values
        where = torch.searchsorted(chosen, places).clamp(max=wanted - 1)
        weight = self._by_class(self.weight)[chosen].flatten(0, 1)
        return chosen, weight, None if self.bias is None else self.bias[chosen], where

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

    def rows_of(self, rank: int, held: Tensor) -> Tensor:
        """The weights or biases `held` by another process; all processes must call it together."""
        count = self._bounds(rank + 1) - self._bounds(rank)
        shape = (count * (len(held) // self.held_classes), *held.shape[1:])
        rows = held.detach() if rank == self.rank else held.new_empty(shape, requires_grad=False)
        if self.world > 1:
            dist.broadcast(rows, group_src=rank, group=self.group)
        return rows

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
        for rank in range(self.world):
            rows = found[self._bounds(rank) : self._bounds(rank + 1)]
            if rank == self.rank:
                rows.copy_(held)
            dist.broadcast(rows, group_src=rank, group=self.group)
        return found


def sharded_heads(model: nn.Module) -> dict[str, ShardedMarginSoftmax]:
    """The sharded heads of a network by name, even if one process holds all classes."""
    return {name: head for name, head in model.named_modules() if isinstance(head, ShardedMarginSoftmax)}
