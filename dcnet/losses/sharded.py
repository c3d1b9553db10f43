"""Heads for many classes: each process holds its share of them, and the softmax is over all."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.losses.annealing import BY_MARGIN, Easing
from dcnet.losses.collectives import Gathered, OwnRows, Shared, Summed, gather_rows, largest, rank_of
from dcnet.losses.cosine import cosines, directions
from dcnet.losses.head import IGNORED, MarginSoftmax, _full_precision
from dcnet.losses.margin import Margin
from dcnet.losses.scale import Scale


class ShardedMarginSoftmax(MarginSoftmax):
    """MarginSoftmax with the classes shared out over the processes of a group; all of them call it together.

    Each process gives its own features and labels, equally many, and gets the mean loss over the joint batch. The
    features' gradients are those that DistributedDataParallel expects, and the weights' are exact: keep the head out
    of it.
    `logits`, `cosines` and `diagnose` are of a process's own features and of all classes, whose weights it gathers: all
    processes call them together, too, and nothing of that has a gradient by the weights. Without torch.distributed it
    is a MarginSoftmax, of which a share of the classes may be used.

    Args:
        in_features: the number of features of a sample, as in `MarginSoftmax`.
        num_classes: the number of classes of all processes together.
        margin: a spec such as "arcface(m=0.3)" or "cosface", or a `Margin`.
        scale: the scale s: a number, "norm", "learned" or a `Learnable`; None for the margin's default.
        annealing: as in `MarginSoftmax`.
        sample: the share of its classes that a process uses in a step: all classes of the batch, however many they
            are, and others at random.
        group: a group of torch.distributed; None for all processes.
        reduction: "mean" or "sum" over the joint batch without ignored samples, which is the same number in all
            processes, or "none" for the losses of the process's own samples. With "none" the gradients are those of
            the mean over the processes of what each makes of its losses, as with DistributedDataParallel.
        ignore_index: samples with this label are ignored, as in `MarginSoftmax`.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        margin: Margin | str = "a-softmax",
        scale: Scale = None,
        annealing: Easing | str | None = BY_MARGIN,
        sample: float = 1.0,
        group: Any = None,
        reduction: str = "mean",
        ignore_index: int = IGNORED,
    ):
        # Before torch's own module is there, since it decides how many weights there are.
        object.__setattr__(self, "group", group)
        if not 0 < sample <= 1:
            raise ValueError(f"sample must be a share above 0 and at most 1, not {sample!r}")
        super().__init__(
            in_features, num_classes, margin, scale, annealing, reduction=reduction, ignore_index=ignore_index
        )
        self.sample = sample
        self.rank, self.world = rank_of(group)
        self.first = self._bounds(self.rank)

    def _bounds(self, rank: int) -> int:
        """The first class of a process; shares differ by one at most."""
        return rank * self.num_classes // rank_of(self.group)[1]

    def _held(self, num_classes: int) -> int:
        rank, world = rank_of(self.group)
        if num_classes < world:
            raise ValueError(f"{num_classes} classes cannot be shared by {world} processes")
        return (rank + 1) * num_classes // world - rank * num_classes // world

    def _chance(self) -> torch.Generator | None:
        """Of its own in each process, which would have the same weights otherwise."""
        if self.weight.is_meta:
            return None
        # One number of torch's own generator, which moves on by it: the next head is another one.
        drawn = int(torch.randint(2**62, (), device="cpu"))
        return torch.Generator(self.weight.device).manual_seed(drawn + 7919 * rank_of(self.group)[0])

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        self._check_place()
        if self.world == 1 and self.sample == 1:
            return super().forward(features, labels)
        labels = self._checked(features, labels)
        self._check_counts(labels)
        with _full_precision(features):
            joint = Gathered.apply(features.to(self._dtype), self.group)
            return self._shared_loss(joint, gather_rows(labels, self.group), features.dtype)

    def _strange(self, labels: Tensor) -> int | None:
        """The first of any process: where one of them ended by itself, the others would wait for it."""
        own = super()._strange(labels)
        # A class where there is nothing to tell: it is not strange to anybody.
        told = torch.tensor([0 if own is None else own], device=labels.device)
        return super()._strange(gather_rows(told, self.group))

    def _check_place(self) -> None:
        """Refuses to go on with the classes of another place, which would be too many, or too few."""
        rank, world = rank_of(self.group)
        if (rank, world) != (self.rank, self.world):
            raise ValueError(
                f"the head was made in process {self.rank} of {self.world} and is called in process {rank} of {world}: "
                "make it after torch.distributed is initialized"
            )

    def _check_counts(self, labels: Tensor) -> None:
        """Refuses batches of other sizes, in all processes: what gathers them would end the process, or never end."""
        if labels.is_cuda or torch.compiler.is_compiling():
            return  # As for labels.
        counts = gather_rows(torch.tensor([len(labels)], device=labels.device), self.group).tolist()
        if len(set(counts)) > 1:
            given = f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
            raise ValueError(
                f"all processes must give equally many features, not {given}: leave out the last batch, or fill it up"
            )

    def _shared_loss(self, features: Tensor, labels: Tensor, given: torch.dtype) -> Tensor:
        unit, norms = directions(features, self._dtype, given)
        size = self._shared_scale(norms)
        kept = labels != self.ignore_index
        own = kept & (labels >= self.first) & (labels < self.first + len(self.weight))
        weight, bias, places = self._used((labels - self.first).clamp(0, len(self.weight) - 1), own)
        cos, chosen, weight_norms = cosines(unit, weight.to(self._dtype), places)
        chosen = chosen * own
        share = self._next_share(Summed.apply(chosen, self.group), kept)
        held = self._held_target(self._target(chosen, share) * size, weight_norms, bias, places)
        target = Summed.apply(held * own, self.group)
        logits = self._scaled(self._others(cos, share), size, weight_norms)
        logits = logits if bias is None else logits + bias
        hidden = own[:, None] & (torch.arange(len(weight), device=logits.device) == places[:, None])
        if self.margin.binary:
            losses = self._shared_binary(logits, target, hidden) / size.detach()
        else:
            losses = self._shared_softmax(logits.masked_fill(hidden, -math.inf), target)
        return self._of_own(self._reduced(losses, kept))

    def _of_own(self, losses: Tensor) -> Tensor:
        """Of the losses of the joint batch those of this process; what is reduced is of all."""
        return losses if self.reduction != "none" else OwnRows.apply(losses, self.group)

    def _shared_scale(self, norms: Tensor) -> Tensor:
        size = self.scale(norms)
        return size if self.scale.log is None else Shared.apply(size, self.group)

    def _held_target(self, target: Tensor, weight_norms: Tensor, bias: Tensor | None, places: Tensor) -> Tensor:
        """The target logits of the classes that are held here; what it is for others does not count."""
        if not self.margin.unit_weights:
            target = target * weight_norms[places]
        return target if bias is None else target + bias[places]

    def _shared_softmax(self, logits: Tensor, target: Tensor) -> Tensor:
        highest = torch.maximum(largest(logits.amax(1), self.group), target.detach())
        # In the place of the logits, of which there would be three copies otherwise.
        others = Summed.apply(logits.sub_(highest[:, None]).exp_().sum(1), self.group)
        total = others + (target - highest).exp()
        return highest + total.log() - target

    def _shared_binary(self, logits: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
        assert self.offset is not None
        offset = Shared.apply(self.offset, self.group)
        # The label's own part is computed by all, and must count once in what they share.
        own = F.softplus(-(target + offset / self.world - offset.detach() / self.world + offset.detach()))
        others = Summed.apply(F.softplus(logits + offset).masked_fill(hidden, 0.0).sum(1), self.group)
        share = self.margin.label_share()
        return share * own + (1 - share) * others

    def _used(self, places: Tensor, own: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Weights and biases of the classes of this step, and where the labels are among them."""
        if self.sample == 1 or not self.training:
            return self.weight, self.bias, places
        chance = torch.rand(len(self.weight), device=places.device)
        chance[places[own]] = 2.0
        wanted = max(math.ceil(self.sample * len(self.weight)), int((chance == 2).sum()), 1)
        chosen = chance.topk(wanted).indices.sort().values
        where = torch.searchsorted(chosen, places).clamp(max=wanted - 1)
        return self.weight[chosen], None if self.bias is None else self.bias[chosen], where

    def full_weight(self) -> Tensor:
        """The weights of all classes, in every process, all of which call it together."""
        return self._of_all(self.weight)

    def _all_classes(self) -> tuple[Tensor, Tensor | None]:
        if self.world == 1:
            return super()._all_classes()
        return self.full_weight(), None if self.bias is None else self._of_all(self.bias)

    def _of_all(self, held: Tensor) -> Tensor:
        """What each process holds for its classes, put together in their order, without a gradient."""
        held = held.detach()
        if self.world == 1:
            return held
        most = -(-self.num_classes // self.world)
        padded = torch.cat([held, held.new_zeros(most - len(held), *held.shape[1:])])
        shares = gather_rows(padded, self.group).view(self.world, *padded.shape)
        counts = [self._bounds(rank + 1) - self._bounds(rank) for rank in range(self.world)]
        return torch.cat([share[:count] for share, count in zip(shares, counts, strict=True)])
