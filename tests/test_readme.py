"""What the README and CONTRIBUTING show, done as they show it."""

import re
from pathlib import Path

import pytest
import torch

import dcnet
from dcnet.testing import assert_decoupled

ROOT = Path(__file__).parent.parent


def blocks(file: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)


def test_readme_runs(capsys):
    names: dict[str, object] = {}
    for code in blocks("README.md"):
        exec(code, names)
    assert names["y"].shape == (8, 128, 16, 16)
    assert "bounded=False" in capsys.readouterr().out
    assert names["penalty"].item() > 0


@pytest.mark.parametrize("file", ["docs/networks.md", "docs/training.md", "docs/inference.md"])
def test_docs_run(file, tmp_path, monkeypatch):
    """With a small network in place of the reader's."""
    monkeypatch.chdir(tmp_path)
    model = dcnet.create_model("cnn9", "tanh-cos", 10, width=0.05)
    batches = [(torch.randn(4, 3, 32, 32), torch.randint(10, (4,)))] * 2
    names = {"torch": torch, "F": torch.nn.functional, "dcnet": dcnet, "model": model, "batches": batches}
    code = "\n".join(blocks(file)).replace('"resnet32"', '"cnn9", width=0.05')
    exec(code.replace("dcnet.convert.finish_blend_(model)", "").replace("steps=1000", "steps=1"), names)


def test_readme_tables_hold_what_there_is():
    text = (ROOT / "README.md").read_text()
    found = re.findall(r"^\| `([a-z]+)[(`]", text.split("### Operators")[1].split("### Networks")[0], re.MULTILINE)
    assert set(found) <= {*dcnet.magnitude.registry, *dcnet.angle.registry}
    paper = {"sphere", "ball", "tanh", "linear", "seg", "log", "mix", "cos", "sigmoid", "sqcos", "relucos"}
    assert paper <= set(found)
    for name in dcnet.weighting.registry:
        assert name == "unweighted" or f"`+{name}`" in text


def test_contributing_adds_a_magnitude():
    code, row = blocks("CONTRIBUTING.md")
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
