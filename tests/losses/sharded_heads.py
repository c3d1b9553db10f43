"""Run by each of several processes: a head whose classes are shared out, against one that has them all."""

import dataclasses

import torch
import torch.distributed as dist

from dcnet.ending import end_process
from dcnet.learnable import Learnable
from dcnet.losses import Annealing, MarginSoftmax, ShardedMarginSoftmax, SphereFaceR, registry

FEATURES, CLASSES, OWN = 6, 11, 3


def batch(rank, seed):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(OWN, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (OWN,), generator=generator)


def compare(margin, ignored=None, **options):
    """With `ignored`, samples of that class are ignored: more of them in one process than in the other."""
    if ignored is not None:
        options["ignore_index"] = ignored
    rank, world = dist.get_rank(), dist.get_world_size()
    sharded = ShardedMarginSoftmax(FEATURES, CLASSES, margin, **options).double()
    if sharded.bias is not None:
        torch.nn.init.normal_(sharded.bias)
    whole = MarginSoftmax(FEATURES, CLASSES, margin, **options).double()
    first = rank * CLASSES // world
    rows = slice(first, first + len(sharded.weight))
    with torch.no_grad():
        whole.weight.copy_(sharded.full_weight())
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
            # Each process does something of its own with its losses, and the mean of that is what counts.
            of_each = torch.arange(1, world + 1).repeat_interleave(OWN) / world
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
        compare_predictions(sharded, whole, *parts[rank])


def compare_predictions(sharded, whole, x, labels):
    """Of the features of this process with all classes, wherever they are held."""
    for of in ("logits", "cosines"):
        found, expected = getattr(sharded, of)(x), getattr(whole, of)(x)
        assert found.shape == (OWN, CLASSES)
        close(found, expected)
        by_found, by_expected = (torch.autograd.grad(each.square().sum(), x)[0] for each in (found, expected))
        close(by_found, by_expected)
    found, expected = (dataclasses.asdict(head.diagnose(x, labels)) for head in (sharded, whole))
    for name, value in expected.items():
        close(torch.tensor(found[name]).double(), torch.tensor(value).double())


def check_first_weights():
    """Other ones in each process and in each head, and the same ones from the same seed."""
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
    """Loss and gradients of a head that is compiled."""
    head = ShardedMarginSoftmax(FEATURES, CLASSES, margin, annealing=None).double()
    x, labels = batch(dist.get_rank(), 0)
    x.requires_grad_()
    losses = head(x, labels), torch.compile(head, backend="aot_eager")(x, labels)
    expected, found = (torch.autograd.grad(loss, (x, head.weight)) for loss in losses)
    for one, two in zip((losses[1], *found), (losses[0], *expected), strict=True):
        close(one, two)


def check_all_ignored():
    """nan for the mean, as torch has it, and gradients of 0."""
    head = ShardedMarginSoftmax(FEATURES, CLASSES, "am-softmax").double()
    x, labels = batch(dist.get_rank(), 0)
    x.requires_grad_()
    loss = head(x, torch.full_like(labels, -100))
    assert loss.isnan()
    for gradient in torch.autograd.grad(loss, (x, head.weight)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def check_samples():
    """All classes of the batch are among those that are used, so that a loss over fewer classes is a smaller one."""
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
    assert used < len(some.weight) or len(some.weight) < 4


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    for kind in registry:
        compare(kind, annealing=None)
    compare("a-softmax", annealing=Annealing(start=3, rate=1, floor=1))
    compare("a-softmax", annealing="auto")
    compare("arcface", scale=Learnable(10.0))
    compare("sphereface2", scale="learned")
    compare(SphereFaceR(version=2, detach=False))
    compare(SphereFaceR(version=2), annealing=Annealing(start=3, rate=1, floor=1))
    compare("sphereface2", annealing="auto")
    for reduction in ("mean", "sum", "none"):
        compare("a-softmax", ignored=-100, annealing="auto", reduction=reduction)
        compare("sphereface2", ignored=4, annealing=None, reduction=reduction)
        compare("softmax", ignored=4, reduction=reduction)
    check_all_ignored()
    check_compiled("arcface")
    check_samples()
    check_first_weights()
    dist.barrier()
    dist.destroy_process_group()
    print("equal")
    end_process()
