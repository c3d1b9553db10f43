"""Running mean norms recomputed from data, and synchronized between processes."""

import copy
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.processes import process_group, results_of
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dcnet
from dcnet.kernels import dispatch
from dcnet.tracing import has_hooks

# --- running mean norms after training, and recomputed from data ---


def network():
    return nn.Sequential(
        dcnet.DecoupledConv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), dcnet.DecoupledConv2d(4, 5, 3)
    )


def test_update_norms_sets_the_mean_over_the_data():
    model = network().double()
    model(100 * torch.randn(4, 3, 8, 8, dtype=torch.float64))
    batches = [torch.randn(4, 3, 8, 8, dtype=torch.float64) * scale for scale in (1, 2, 3)]
    statistics = model[1].running_mean.clone()
    dcnet.update_norms(model, ((batch, None) for batch in batches))
    norms = [dcnet.functional.patch_norm(x, (3, 3), (1, 1), [(0, 0)] * 2, (1, 1)).mean() for x in batches]
    torch.testing.assert_close(model[0].mean_norm, torch.stack(norms).mean())
    assert torch.equal(model[1].running_mean, statistics)
    assert all(module.training for module in model.modules())


def test_update_norms_ignores_non_finite_batches():
    model = network()
    good, bad = torch.randn(4, 3, 8, 8), torch.full((4, 3, 8, 8), torch.nan)
    dcnet.update_norms(model, [good])
    expected = model[0].mean_norm.clone()
    dcnet.update_norms(model, [good, bad])
    assert torch.equal(model[0].mean_norm, expected)
    dcnet.update_norms(model, [bad])
    assert torch.equal(model[0].mean_norm, expected)
    dcnet.update_norms(model, [])
    assert torch.equal(model[0].mean_norm, expected)


def test_failed_update_restores_mean_norms_and_modes():
    model = network().eval()
    model[0].mean_norm.fill_(2.5)
    with pytest.raises(TypeError, match="a batch must be a tensor or a tuple that starts with one, not a str"):
        dcnet.update_norms(model, [torch.randn(4, 3, 8, 8), "x"])
    assert model[0].mean_norm == 2.5
    assert not any(module.training for module in model.modules())


def test_single_tensor_as_data_is_rejected():
    """Iterating over it would give single images, which layers accept."""
    with pytest.raises(TypeError, match=r"an iterable of batches, not one tensor: give \[x\]"):
        dcnet.update_norms(network(), torch.randn(4, 3, 8, 8))


def test_count_is_the_number_of_batches_in_the_mean():
    model = network()
    model(torch.randn(4, 3, 8, 8))
    assert model[0].num_batches_tracked == 1
    dcnet.update_norms(model, [torch.randn(4, 3, 8, 8)] * 3)
    assert model[0].num_batches_tracked == 3
    model[0].reset_parameters()
    assert model[0].num_batches_tracked == model[0].mean_norm == 0


@pytest.mark.parametrize(
    ("operator", "steps"),
    [
        ("tanh-cos", 100),
        pytest.param("tanh-cos", 300, marks=pytest.mark.slow),
        pytest.param("ball-cos", 300, marks=pytest.mark.slow),
    ],
)
def test_evaluation_accuracy_is_within_one_point_of_training_mode(operator, steps):
    """Without batch normalization, norms multiply in these steps; a decay of 0.999 alone would lag behind."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    layers = [dcnet.DecoupledConv2d(1 if i == 0 else 16, 16, 3, padding=1, operator=operator) for i in range(3)]
    body = [module for layer in layers for module in (layer, nn.ReLU())]
    model = nn.Sequential(*body, nn.Flatten(), dcnet.DecoupledLinear(1024, 64, operator=operator), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(steps):
        chosen = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        if step + 1 in (100, 300):
            own, running = accuracy(model, x, y, True), accuracy(model, x, y, False)
            assert own > 85
            assert abs(own - running) < 1


@torch.no_grad()
def accuracy(model, x, y, by_batch):
    """In %, with the mean norm of each batch or with the running one."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = torch.cat([model.train(by_batch)(images).argmax(1) for images in x.split(256)])
    model.load_state_dict(kept, strict=False)
    model.train()
    return 100 * (found == y).double().mean().item()


def test_state_dict_without_a_count_loads_as_warmed_up():
    """Checkpoints of older versions have no count; layers may be at any depth in the model."""
    model, other = network(), network()
    model(torch.randn(4, 3, 8, 8))
    state = {name: value for name, value in model.state_dict().items() if "3.num_batches" not in name}
    assert other.load_state_dict(state).missing_keys == []
    assert other[0].num_batches_tracked == 1
    before = other[3].mean_norm.item()
    other(torch.full((4, 3, 8, 8), 100.0))
    assert other[3].num_batches_tracked == 8991
    assert other[3].mean_norm.item() == pytest.approx(before, rel=0.5)


def test_state_dict_of_plain_layers_gets_no_count():
    plain = nn.Sequential(nn.Conv2d(3, 4, 3))
    missing = nn.Sequential(dcnet.DecoupledConv2d(3, 4, 3)).load_state_dict(plain.state_dict(), strict=False)
    assert missing.missing_keys == ["0.radius", "0.mean_norm", "0.num_batches_tracked"]


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = dcnet.DecoupledLinear(4, 4)

    def forward(self, x):
        return self.layer(x) + self.layer(10 * x)


def test_mean_norm_covers_every_call_of_a_layer():
    model, x = CalledTwice(), torch.randn(50, 4)
    dcnet.update_norms(model, [x, x])
    expected = 5.5 * (x.square().sum(1) + 1e-4).sqrt().mean()
    torch.testing.assert_close(model.layer.mean_norm, expected, rtol=1e-3, atol=0)
    assert not has_hooks(model.layer)


def test_empty_tuple_as_a_batch_is_rejected():
    with pytest.raises(TypeError, match="a batch must be a tensor or a tuple that starts with one"):
        dcnet.update_norms(CalledTwice(), [()])


# --- several processes, each with a part of the batch, compared with one process with the whole batch ---


PROCESSES, STEPS = 2, 2
EXACT = {"rtol": 1e-10, "atol": 1e-10}

NETWORKS = ["conv2d", "linear", "sum of magnitudes", "weighted"]


def shared_network(kind):
    torch.manual_seed(1)
    relative = {"sum of magnitudes": "tanh&log-cos", "weighted": "seg(learnable=True)-sigmoid+product"}
    operator = relative.get(kind, "tanh-cos")
    if kind == "linear":
        layers = [dcnet.DecoupledLinear(6, 5, operator=operator), nn.ELU(), dcnet.DecoupledLinear(5, 4)]
    else:
        convolutions = {"padding": 1, "operator": operator}
        layers = [dcnet.DecoupledConv2d(4, 6, 3, **convolutions), nn.ELU()]
        layers += [dcnet.DecoupledConv2d(6, 4, 3, groups=2, **convolutions)]
    return nn.Sequential(*layers).double()


def batches(kind):
    """One batch per step; its first half has much smaller norms than the second."""
    torch.manual_seed(2)
    shape = (8, 6) if kind == "linear" else (8, 4, 5, 5)
    sizes = torch.tensor([0.3] * 4 + [3.0] * 4, dtype=torch.float64).view(-1, *[1] * (len(shape) - 1))
    return [torch.randn(shape, dtype=torch.float64) * sizes for _ in range(STEPS)]


def share(batch, rank):
    return batch.chunk(PROCESSES)[rank]


def trained(model, inputs):
    """Outputs and gradients of each step, and the running means after all."""
    results = {}
    for step, x in enumerate(inputs):
        model.zero_grad()
        x = x.clone().requires_grad_()
        output = model(x)
        (output * output.detach().cos()).flatten(1).sum(1).mean().backward()
        results |= {f"{step} output": output.detach(), f"{step} input": x.grad}
        results |= {f"{step} {name}": value.grad.clone() for name, value in plain_names(model.named_parameters())}
    return results | {name: value.clone() for name, value in plain_names(model.named_buffers())}


def plain_names(named):
    return [(name.removeprefix("module.").removeprefix("_orig_mod."), value) for name, value in named]


# --- the work of each process ---


def in_one_process(rank, folder):
    results = {}
    with process_group(rank, folder, PROCESSES):
        for kind in NETWORKS:
            inputs = [share(batch, rank) for batch in batches(kind)]
            results[kind] = trained(DistributedDataParallel(dcnet.sync_norms(shared_network(kind))), inputs)
            results[f"{kind} apart"] = trained(DistributedDataParallel(shared_network(kind)), inputs)
        results |= edge_cases(rank)
        torch.save(results, f"{folder}/{rank}.pt")


def edge_cases(rank):
    """Groups, pickling, evaluation, updates, compilation, and batches of different sizes."""
    inputs = [share(batch, rank) for batch in batches("conv2d")]
    both, alone = dist.new_group(), [dist.new_group([other]) for other in range(PROCESSES)][rank]
    named = copy.deepcopy(dcnet.sync_norms(shared_network("conv2d"), both))
    results = {"group": trained(DistributedDataParallel(named), inputs)}
    results["group of one"] = trained(dcnet.sync_norms(shared_network("conv2d"), alone), inputs)
    results["alone"] = trained(shared_network("conv2d"), inputs)
    marked = pickle.loads(pickle.dumps(dcnet.sync_norms(shared_network("conv2d"))))
    results["evaluation"] = {"output": marked.eval()(inputs[0]).detach()}
    results["update"] = updated(copy.deepcopy(marked), inputs)
    compiled = torch.compile(copy.deepcopy(marked).train(), backend="aot_eager")
    results["compiled"] = trained(DistributedDataParallel(compiled), inputs)
    uneven = batches("conv2d")[0][slice(0, 5) if rank == 0 else slice(5, 8)]
    results["uneven"] = {"output": marked.train()(uneven).detach()}
    return results


def updated(model, data):
    dcnet.update_norms(model, data)
    return dict(model.named_buffers())


# --- comparisons ---


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of every process."""
    return results_of(in_one_process, tmp_path_factory.mktemp("processes"), PROCESSES)


def expected(kind, rank):
    """The results of one process with the joint batch; outputs and input gradients of this rank only."""
    results = trained(shared_network(kind), batches(kind))
    for name in results:
        if name.endswith("output"):
            results[name] = share(results[name], rank)
        elif name.endswith("input"):
            results[name] = PROCESSES * share(results[name], rank)
    return results


@pytest.mark.parametrize("kind", NETWORKS)
def test_synced_processes_match_one_process_with_the_joint_batch(found, kind):
    for rank, results in enumerate(found):
        torch.testing.assert_close(results[kind], expected(kind, rank), **EXACT)


@pytest.mark.parametrize("kind", NETWORKS)
def test_processes_without_sync_differ_from_one_process(found, kind):
    """Shows that the test above can fail."""
    for rank, results in enumerate(found):
        wanted = expected(kind, rank)
        for name, value in results[f"{kind} apart"].items():
            # The counts of batches are equal.
            if value.is_floating_point():
                assert (value - wanted[name]).norm() > 1e-4 * wanted[name].norm(), name


def test_sync_within_a_process_group(found):
    for rank, results in enumerate(found):
        torch.testing.assert_close(results["group"], expected("conv2d", rank), **EXACT)
        torch.testing.assert_close(results["group of one"], results["alone"], rtol=0, atol=0)


def test_compiled_network_syncs(found):
    for rank, results in enumerate(found):
        torch.testing.assert_close(results["compiled"], expected("conv2d", rank), **EXACT)


def test_evaluation_does_not_sync(found):
    for rank, results in enumerate(found):
        wanted = shared_network("conv2d").eval()(share(batches("conv2d")[0], rank))
        torch.testing.assert_close(results["evaluation"]["output"], wanted, rtol=0, atol=0)


def test_batches_of_different_sizes_have_one_mean(found):
    wanted = shared_network("conv2d")(batches("conv2d")[0])
    outputs = torch.cat([results["uneven"]["output"] for results in found])
    torch.testing.assert_close(outputs, wanted, **EXACT)


def test_synced_update_norms_matches_the_joint_batches(found):
    wanted = updated(shared_network("conv2d"), batches("conv2d"))
    for results in found:
        torch.testing.assert_close(results["update"], wanted, **EXACT)


# --- a single process ---


def test_sync_with_one_process_changes_nothing():
    model, marked = shared_network("conv2d"), dcnet.sync_norms(shared_network("conv2d"))
    assert list(marked.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(trained(marked, batches("conv2d")), trained(model, batches("conv2d")), rtol=0, atol=0)


def test_sync_with_one_process_compiles_without_graph_breaks():
    torch.compiler.reset()
    model, marked = shared_network("conv2d"), dcnet.sync_norms(shared_network("conv2d"))
    x = batches("conv2d")[0]
    torch.testing.assert_close(torch.compile(marked, fullgraph=True, backend="aot_eager")(x), model(x), **EXACT)
    torch.testing.assert_close(dict(marked.named_buffers()), dict(model.named_buffers()), **EXACT)


def test_sync_applies_only_to_layers_with_a_relative_radius():
    model = nn.Sequential(dcnet.DecoupledLinear(3, 4), dcnet.DecoupledLinear(4, 2, operator="sphere-cos"), nn.ReLU())
    assert dcnet.sync_norms(model) is model
    assert model[0].sync is not None
    assert model[1].sync is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_sync(copied):
    assert copied(dcnet.sync_norms(shared_network("linear")))[0].sync == dcnet.norms.Processes()


def test_process_group_is_copied_but_not_pickled():
    model = dcnet.sync_norms(shared_network("linear"), group=object())
    assert copy.deepcopy(model)[0].sync is model[0].sync
    with pytest.raises(TypeError, match="cannot be pickled: pickle the state_dict"):
        pickle.dumps(model)


def test_kernels_are_not_used_while_syncing(monkeypatch):
    layer = dcnet.sync_norms(dcnet.DecoupledConv2d(3, 4, 3))
    with torch._subclasses.FakeTensorMode():
        x, w = torch.empty(2, 3, 5, 5, device="cuda"), torch.empty(4, 3, 3, 3, device="cuda")

    def fits():
        return dispatch.fits(x, w, None, 0, 1, {**layer.options(), "constants": None})

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert fits()
    with mock.patch.object(dcnet.norms.Processes, "several", True):
        assert not fits()
        layer.eval()
        assert fits()
