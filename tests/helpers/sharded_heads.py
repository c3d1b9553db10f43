"""Program for several processes: sharded heads compared with unsharded ones."""

import copy
import dataclasses
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dcnet.interrupts import end_process
from dcnet.losses import Annealing, MarginSoftmax, ShardedMarginSoftmax, SphereFaceR, registry
from dcnet.losses import sharded as sharding
from dcnet.parameters import Learnable
from helpers.heads_and_batches import ADAPTIVE

FEATURES, CLASSES, OWN = 6, 11, 3
# A process that waits for another one fails after this time.
PATIENCE = timedelta(seconds=60)


def batch(rank, seed):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(OWN, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (OWN,), generator=generator)


def compare(margin, ignored=None, **options):
    """With `ignored`, samples of that class are ignored, more of them in one process than in the others."""
    if ignored is not None:
        options["ignore_index"] = ignored
    rank, world = dist.get_rank(), dist.get_world_size()
    sharded = ShardedMarginSoftmax(FEATURES, CLASSES, margin, **options).double()
    if sharded.bias is not None:
        torch.nn.init.normal_(sharded.bias)
    whole = MarginSoftmax(FEATURES, CLASSES, margin, **options).double()
    first, centers = rank * CLASSES // world, whole.margin.centers()
    rows = slice(first * centers, first * centers + len(sharded.weight))
    with torch.no_grad():
        whole.weight.copy_(sharded.full_weight())
        for name in whole.state_names:
            whole.get_buffer(name).copy_(sharded.get_buffer(name))
        if whole.bias is not None:
            torch.manual_seed(1)
            torch.nn.init.normal_(whole.bias)
            sharded.bias.copy_(whole.bias[rows])
    for step in range(2):
        parts = [batch(r, step) for r in range(world)]
        x = torch.cat([part[0] for part in parts]).requires_grad_()
        labels = torch.cat([part[1] for part in parts])
        own = parts[rank][0].requires_grad_()
        if ignored is not None:
            labels[0] = parts[0][1][0] = ignored
        expected, found = whole(x, labels), sharded(own, parts[rank][1])
        if options.get("reduction") == "none":
            close(found, expected[OWN * rank : OWN * (rank + 1)])
            # Each process computes a different function of its losses; the gradient is that of the mean.
            of_each = torch.arange(1, world + 1, dtype=torch.float64).repeat_interleave(OWN) / world
            expected, found = (of_each * expected.square()).sum(), ((rank + 1) * found.square()).sum()
        else:
            close(found, expected)
        names = [name for name, _ in sharded.named_parameters()]
        wanted, given = gradients(whole, expected, names), gradients(sharded, found, names)
        for name, value in wanted.items():
            close(given[name], value[rows] if name in ("weight", "bias") else value)
        (by_feature,) = torch.autograd.grad(expected, x)
        (own_gradient,) = torch.autograd.grad(found, own)
        close(own_gradient, world * by_feature[OWN * rank : OWN * (rank + 1)])
        compare_states(sharded, whole)
        compare_predictions(sharded, whole, *parts[rank])


def compare_states(sharded, whole):
    """The state of a margin is that of the whole batch, and the same bits in all processes."""
    for name in whole.state_names:
        found = sharded.get_buffer(name)
        torch.testing.assert_close(found, whole.get_buffer(name))
        all_of_them = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of_them, found)
        assert all(torch.equal(found, other) for other in all_of_them), name


def compare_predictions(sharded, whole, x, labels):
    """Compares logits, cosines and diagnosis for the features of this process and all classes."""
    for of in ("logits", "cosines"):
        found, expected = getattr(sharded, of)(x), getattr(whole, of)(x)
        assert found.shape == (OWN, CLASSES)
        close(found, expected)
        by_found, by_expected = (torch.autograd.grad(each.square().sum(), x)[0] for each in (found, expected))
        close(by_found, by_expected)
    found, expected = (dataclasses.asdict(head.diagnose(x, labels)) for head in (sharded, whole))
    for name, value in expected.items():
        close(torch.tensor(found[name]).double(), torch.tensor(value).double())


def compare_scores(margin, **options):
    """Compares training predictions, and scores of a batch that all processes have, with those of logits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    head = ShardedMarginSoftmax(FEATURES, CLASSES, margin, **options).double()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    x, labels = batch(rank, 0)
    # Equal logits of all classes: the first one is predicted.
    x[1], labels[1] = 0.0, CLASSES - 1
    twin = copy.deepcopy(head)
    loss, found = head.loss_and_predictions(x, labels)
    close(loss, twin(x, labels))
    logits = twin.logits(x)
    assert torch.equal(found, logits.argmax(1))
    everything, of_all = (sharding.gather_rows(value, None) for value in (x, labels))
    expected = sharding.gather_rows(F.cross_entropy(logits, labels, reduction="none").detach(), None)
    # The features of the first process count.
    losses, classes = head.score(everything if rank == 0 else torch.zeros_like(everything), of_all)
    close(losses, expected)
    assert torch.equal(classes, sharding.gather_rows(found, None))
    assert len(losses) == world * OWN


def check_scores():
    at_once, sharding.SCORED_LOGITS = sharding.SCORED_LOGITS, 2 * CLASSES // dist.get_world_size()
    for margin in ("softmax", "arcface", "subcenter-arcface(k=2)", "sphereface2", "curricularface"):
        compare_scores(margin)
    compare_scores("arcface", scale=Learnable(10.0), annealing="auto")
    sharding.SCORED_LOGITS = at_once


def check_sampled_predictions():
    """They are classes of the sample, and among them the one with the largest cosine."""
    # As many classes in each process.
    head = ShardedMarginSoftmax(FEATURES, 1200, "arcface", sample=0.01).double()
    x, labels = batch(dist.get_rank(), 0)
    x = x.requires_grad_()
    loss, found = head.loss_and_predictions(x, labels)
    loss.backward()
    used = sharding.gather_rows(head.weight.grad.abs().sum(1) > 0, None)
    assert used.sum() < 20 + OWN * dist.get_world_size()
    cosines = head.cosines(x).masked_fill(~used, -2.0)
    assert torch.equal(found, cosines.argmax(1))


def check_weights_of_blocks():
    """The processes hold the initial weights of an unsharded head, and later draws are the same."""
    rows, sharding.DRAWN_ROWS = sharding.DRAWN_ROWS, 16
    for classes in (11, 32, 100):
        found = []
        for kind in (ShardedMarginSoftmax, MarginSoftmax):
            torch.manual_seed(7)
            head = kind(FEATURES, classes, "subcenter-arcface")
            found.append((head.full_weight() if kind is ShardedMarginSoftmax else head.weight, torch.rand(3)))
        for one, two in zip(*found, strict=True):
            assert torch.equal(one, two)
    sharding.DRAWN_ROWS = rows


def check_first_weights():
    """They differ between processes and heads, and are reproducible from a seed."""
    heads = {}
    for name in ("first", "again"):
        torch.manual_seed(3)
        heads[name] = [ShardedMarginSoftmax(FEATURES, 4000).full_weight() for _ in range(2)]
    one, two = heads["first"]
    assert one.shape == (4000, FEATURES)
    assert len(torch.cat([one, two]).unique(dim=0)) == 8000
    assert torch.equal(one, heads["again"][0])
    assert torch.equal(two, heads["again"][1])


def gradients(head, loss, names):
    found = torch.autograd.grad(loss, [head.get_parameter(name) for name in names], retain_graph=True)
    return dict(zip(names, found, strict=True))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def check_compiled(margin):
    """Compares loss and gradients of a compiled head."""
    head = ShardedMarginSoftmax(FEATURES, CLASSES, margin, annealing=None).double()
    x, labels = batch(dist.get_rank(), 0)
    x.requires_grad_()
    twin = copy.deepcopy(head)
    losses = twin(x, labels), torch.compile(head, backend="aot_eager")(x, labels)
    expected, found = (
        torch.autograd.grad(loss, (x, each.weight)) for loss, each in zip(losses, (twin, head), strict=True)
    )
    for one, two in zip(head.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, two)
    for one, two in zip((losses[1], *found), (losses[0], *expected), strict=True):
        close(one, two)


def check_all_ignored():
    """The mean is nan, as in torch, with gradients of 0."""
    head = ShardedMarginSoftmax(FEATURES, CLASSES, "am-softmax").double()
    x, labels = batch(dist.get_rank(), 0)
    x.requires_grad_()
    loss = head(x, torch.full_like(labels, -100))
    assert loss.isnan()
    for gradient in torch.autograd.grad(loss, (x, head.weight)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def check_samples():
    """All classes of the batch are used, so the loss over fewer classes is smaller."""
    torch.manual_seed(5)
    whole = ShardedMarginSoftmax(FEATURES, CLASSES, "am-softmax").double()
    some = ShardedMarginSoftmax(FEATURES, CLASSES, "am-softmax", sample=0.3).double()
    some.load_state_dict(whole.state_dict())
    x, labels = batch(dist.get_rank(), 0)
    loss = some(x, labels)
    assert 0 < loss <= whole(x, labels) + 1e-12
    close(some.eval()(x, labels), whole(x, labels))
    some.train()(x, labels).backward()
    used = (some.weight.grad.abs().sum(1) > 0).sum().item()
    assert used < len(some.weight) or len(some.weight) < 5


def message_of(call, labels):
    try:
        call(torch.randn(len(labels), FEATURES), torch.tensor(labels, dtype=torch.int64))
    except ValueError as error:
        return str(error)
    return None


def check_invalid_label(call, bad, rank, count):
    """All processes raise if one of them has an invalid label, and continue with the next batch."""
    labels = [rank] * (count - 1) + [bad if dist.get_rank() == rank else 0]
    expected = f"label {bad} must be one of the {CLASSES} classes, from 0 to {CLASSES - 1}"
    assert message_of(call, labels) == expected, (bad, rank)
    assert message_of(call, [0] * count) is None


def check_invalid_labels():
    head = ShardedMarginSoftmax(FEATURES, CLASSES, "arcface")
    for rank in range(dist.get_world_size()):
        for bad in (-1, CLASSES, 10**12):
            check_invalid_label(head, bad, rank, count=3)
            check_invalid_label(head.diagnose, bad, rank, count=1 + dist.get_rank())


def check_batch_sizes():
    """All processes raise if the sizes of their batches differ, and continue with the next batch."""
    head, (rank, world) = ShardedMarginSoftmax(FEATURES, CLASSES, "arcface"), (dist.get_rank(), dist.get_world_size())
    sizes = ", ".join(["4", *["3"] * (world - 2)]) + " and 3"
    expected = f"all processes must have the same batch size, not {sizes}: drop the last batch, or pad it"
    assert message_of(head, [0] * (4 if rank == 0 else 3)) == expected
    assert message_of(head, [0] * 3) is None


def check_margins():
    for kind in registry:
        compare(kind, annealing=None)


def check_options():
    schedule = Annealing(start=3, rate=1, floor=1)
    compare("a-softmax", annealing=schedule)
    compare("a-softmax", annealing="auto")
    compare("arcface", scale=Learnable(10.0))
    compare("sphereface2", scale="learned")
    compare(SphereFaceR(version=2, detach=False))
    compare(SphereFaceR(version=2), annealing=schedule)
    compare("sphereface2", annealing="auto")


def check_adaptive_margins():
    """With statistics and limits near the norms of the batches, annealed, and with filtered classes."""
    for margin in ADAPTIVE:
        compare(margin)
        compare(margin, annealing="auto")
        compare(margin, ignored=4, annealing=Annealing(start=3, rate=1, floor=1), reduction="none")
    for margin in ("arcface", "uniface", "subcenter-arcface(k=2)", "curricularface(momentum=0.5)"):
        compare(margin, interclass_filtering_threshold=0.3)


def check_sampled_states():
    """A sample of the classes leaves the state of the margin, and all classes are as without sampling."""
    for margin in ADAPTIVE:
        torch.manual_seed(5)
        whole = ShardedMarginSoftmax(FEATURES, CLASSES, margin).double()
        some, almost = (ShardedMarginSoftmax(FEATURES, CLASSES, margin, sample=share).double() for share in (0.3, 0.99))
        x, labels = batch(dist.get_rank(), 0)
        for head in (some, almost):
            head.load_state_dict(whole.state_dict())
        for _ in range(2):
            expected = whole(x, labels)
            close(almost(x, labels), expected)
            assert some(x, labels).isfinite()
        for one, two in zip(some.buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(one, two)
        some(x, labels).backward()
        used = some.weight.grad.abs().sum(1) > 0
        assert used.any()


def check_ignored_samples():
    for reduction in ("mean", "sum", "none"):
        compare("a-softmax", ignored=-100, annealing="auto", reduction=reduction)
        compare("sphereface2", ignored=4, annealing=None, reduction=reduction)
        compare("softmax", ignored=4, reduction=reduction)
    check_all_ignored()


CHECKS = {
    "margins": check_margins,
    "options": check_options,
    "adaptive margins": check_adaptive_margins,
    "sampled states": check_sampled_states,
    "ignored samples": check_ignored_samples,
    "compiled": lambda: [check_compiled(margin) for margin in ("arcface", "adaface", "subcenter-arcface")],
    "samples": check_samples,
    "first weights": check_first_weights,
    "weights of blocks": check_weights_of_blocks,
    "scores": check_scores,
    "sampled predictions": check_sampled_predictions,
    "invalid labels": check_invalid_labels,
    "batch sizes": check_batch_sizes,
}


def main():
    dist.init_process_group("gloo", timeout=PATIENCE)
    for name, check in CHECKS.items():
        torch.manual_seed(3)
        check()
        # One write per line, since processes share the stream.
        sys.stdout.write(f"passed: {name}\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    end_process()


if __name__ == "__main__":
    main()
