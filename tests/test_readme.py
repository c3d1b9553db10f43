"""The code of README and CONTRIBUTING works."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import dcnet
from dcnet import kernels
from dcnet.kernels.plan import has_device_functions
from dcnet.testing import assert_decoupled

ROOT = Path(__file__).parent.parent


def blocks(file: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)


def test_readme_runs():
    (code,) = blocks("README.md")
    names = {}
    exec(code, names)
    assert names["layer"](torch.randn(2, 64, 8, 8)).shape == (2, 128, 8, 8)
    assert names["model"].eval()(torch.randn(2, 3, 32, 32)).shape == (2, 100)
    assert isinstance(names["mine"][0], dcnet.DecoupledConv2d)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_operator_tables_list_every_operator():
    text = (ROOT / "docs" / "operators.md").read_text()
    found = re.findall(r"^\| `([a-z]+)[(`]", text.split("## All operators")[1].split("## Layers")[0], re.MULTILINE)
    assert set(found) == {*dcnet.magnitude.registry, *dcnet.angle.registry}
    for name in dcnet.weighting.registry:
        assert name == "unweighted" or f"`+{name}`" in text


def test_contributing_adds_a_magnitude(monkeypatch):
    # A developer who follows the page has registered this magnitude.
    monkeypatch.delitem(dcnet.magnitude.registry, "root", raising=False)
    code, row, _ = blocks("CONTRIBUTING.md")
    scope = {**vars(dcnet.magnitude)}
    exec(code, scope)
    try:
        op = dcnet.Operator.parse("root(radius=1.0)-cos")
        expected = re.search(r"\((.*?), (.*?)\)", row)
        h = op.h(torch.tensor([0.5, 3.0], dtype=torch.float64), op.constants({}))
        assert h.tolist() == pytest.approx([float(expected[1]), float(expected[2])])
        assert_decoupled(dcnet.DecoupledConv2d(3, 4, 3, operator="root-sigmoid+product"))
    finally:
        del dcnet.magnitude.registry["root"]


def test_contributing_makes_it_fast(tmp_path, monkeypatch):
    """The magnitude is in a file, because Triton reads the source of a device function."""
    # A developer who follows the page has registered this magnitude.
    monkeypatch.delitem(dcnet.magnitude.registry, "root", raising=False)
    code, _, device = blocks("CONTRIBUTING.md")
    function, fields = device.split("class Root(Magnitude):\n")
    names = "import dcnet.magnitude\nglobals().update(vars(dcnet.magnitude))\n"
    whole = code.replace("    name: ClassVar", f"{fields}    name: ClassVar", 1)
    (tmp_path / "root_magnitude.py").write_text(f"{names}\n{function}\n{whole}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("root_magnitude")
    try:
        assert has_device_functions(dcnet.Operator.parse("root-cos"))
        place = "cuda" if torch.cuda.is_available() else "cpu"
        layer = dcnet.DecoupledConv2d(3, 4, 3, operator="root(learnable=True)-sqcos").to(place)
        x = torch.randn(2, 3, 5, 6, device=place)
        inputs = [x.requires_grad_(), *layer.parameters()]
        fused = kernels.conv2d(x, layer.weight, layer.bias, 1, 0, 1, 1, layer.options())
        with kernels.use_kernels(False):
            plain = layer(x)
        torch.testing.assert_close(fused, plain)
        both = [torch.autograd.grad(y.square().sum(), inputs) for y in (fused, plain)]
        for found, expected in zip(*both, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    finally:
        del dcnet.magnitude.registry["root"]
