"""Networks of many timm families can be decoupled and trained."""

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.packages import timm_or_skip
from torch import nn

import dcnet
from dcnet.convert import decouple, recouple
from dcnet.layers import Decoupled
from dcnet.models import create_model

timm = timm_or_skip()

# The smallest of each family, with the side of the images if 64 is too small.
NETWORKS = {
    "convnext_atto": 64,
    "cspresnet50": 64,
    "darknet17": 64,
    "densenet121": 64,
    "dla46_c": 64,
    "dpn48b": 64,
    "edgenext_xx_small": 64,
    "efficientnet_b0": 64,
    "efficientvit_b0": 64,
    "ese_vovnet19b_slim": 64,
    "fastvit_t8": 64,
    "fbnetc_100": 64,
    "focalnet_tiny_srf": 64,
    "gernet_s": 64,
    "ghostnet_050": 64,
    "hgnetv2_b0": 64,
    "hrnet_w18_small": 64,
    "inception_v3": 96,
    "lcnet_035": 64,
    "legacy_xception": 64,
    "mambaout_femto": 64,
    "mixnet_s": 64,
    "mnasnet_small": 64,
    "mobilenetv3_small_050": 64,
    "mobilenetv4_conv_small_035": 64,
    "mobileone_s0": 64,
    "regnety_002": 64,
    "repvgg_a0": 64,
    "res2net50_14w_8s": 64,
    "resnest14d": 64,
    "resnet10t": 64,
    "resnetv2_18": 64,
    "resnext50_32x4d": 64,
    "rexnet_100": 64,
    "selecsls42": 64,
    "seresnet18": 64,
    "skresnet18": 64,
    "starnet_s1": 64,
    "tinynet_e": 64,
    "vgg11_bn": 64,
    "wide_resnet50_2": 64,
}


QUICK = ("convnext_atto", "mobilenetv3_small_050", "regnety_002", "resnet10t")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NETWORKS]
)
def test_a_decoupled_network_of_timm_runs_and_has_finite_gradients(name):
    model = create_model(f"timm:{name}", "tanh-cos", num_classes=7)
    decoupled = {name: module for name, module in model.named_modules() if isinstance(module, Decoupled)}
    left = {name: module for name, module in model.body.named_modules() if type(module) is nn.Conv2d}
    assert len(decoupled) >= 10 or name.startswith("vgg")
    assert all(module.kernel_size == (1, 1) for module in left.values())
    side = NETWORKS[name]
    output = model(torch.randn(2, 3, side, side))
    assert output.shape == (2, 7)
    assert model.features(torch.randn(2, 3, side, side)).shape == (2, model.num_features)
    nn.functional.cross_entropy(output, torch.tensor([1, 2])).backward()
    for layer, module in decoupled.items():
        assert module.weight.grad is not None, layer
    assert all(value.grad is None or value.grad.isfinite().all() for value in model.parameters())


def test_layers_that_compute_something_else_stay_and_are_reported():
    reports = []
    padded = timm.create_model("tf_mobilenetv3_small_minimal_100", pretrained=False, num_classes=0)
    decouple(padded, "tanh-cos", inplace=True, report=reports.append)
    assert "Conv2dSame may compute something else" in str(reports[0])
    standardized = timm.create_model("resnetv2_50x1_bit", pretrained=False, num_classes=0)
    with pytest.raises(ValueError, match="StdConv2d may compute something else"):
        decouple(standardized, "tanh-cos", inplace=True)


def test_shortcuts_and_classifier_are_plain_and_recoupling_is_exact():
    plain = timm.create_model("resnet10t", pretrained=False, num_classes=3).eval()
    x = torch.randn(2, 3, 64, 64)
    model = decouple(plain, "tanh-cos", shortcuts=False)
    assert type(model.layer2[0].downsample[1]) is nn.Conv2d
    assert type(model.fc) is nn.Linear
    assert type(model.layer2[0].conv1) is dcnet.DecoupledConv2d
    assert torch.equal(recouple(model)(x), plain(x))


def test_options_of_timm_networks():
    model = create_model("timm:resnet10t", "conv", num_classes=0, in_channels=1, image_size=64)
    assert not any(isinstance(module, Decoupled) for module in model.modules())
    assert model(torch.randn(2, 1, 64, 64)).shape == (2, 512)
    normalized = create_model("timm:lcnet_035", "sphere-cos", num_classes=4, classifier="normalized")
    assert str(normalized.classifier.operator) == "linear-cos"
    for option in ({"norm": "batch"}, {"activation": "prelu"}, {"width": 0.5}, {"norm_momentum": 0.1}):
        with pytest.raises(ValueError, match=f"{next(iter(option))}=.* does not apply to 'timm:resnet10t'"):
            create_model("timm:resnet10t", **option)
    with pytest.raises(ValueError, match="unknown timm network 'resnet10': did you mean resnet1"):
        create_model("timm:resnet10")
    with pytest.raises(ValueError, match="unknown classifier 'cosine'"):
        create_model("timm:resnet10t", classifier="cosine")


def test_error_without_timm_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModuleNotFoundError, match="networks of timm require the timm package: pip install timm"):
        create_model("timm:resnet10t")


def test_a_broken_torchvision_raises_import_error(monkeypatch):
    def fail(name, package=None, found=importlib.import_module):
        if name.split(".")[0] not in ("timm", "torchvision"):
            return found(name, package)
        raise RuntimeError("torchvision was compiled with another CUDA")

    monkeypatch.setattr("dcnet.models.timm_models.importlib.import_module", fail)
    with pytest.raises(ImportError, match=r"a torchvision for torch .* does not fit: .* another CUDA"):
        create_model("timm:resnet10t")


def test_timm_works_with_a_torchvision_built_for_another_torch(tmp_path):
    """A torchvision built for another torch: it registers operators that do not exist."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from torchvision import first, second\n")
    for name, operator in (("first", "nms"), ("second", "other_nms")):
        fake = f'@torch.library.register_fake("torchvision::{operator}")\ndef fake(*_): ...\n'
        (package / f"{name}.py").write_text(f"import torch\n\n{fake}")
    (tmp_path / "timm.py").write_text("import torchvision\n\nvalue = torchvision.second.__name__\n")
    program = "from dcnet.models.timm_models import import_timm; print(import_timm().value, import_timm().value)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(dcnet.__file__).parents[1])])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "torchvision.second torchvision.second\n", done.stderr


@pytest.mark.slow
def test_the_example_decouples_and_tunes(capsys):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "finetune_timm.py"))
    example["main"](epochs=3, tuning_epochs=1)
    text = capsys.readouterr().out
    found = dict(re.findall(r"tanh-cos, ([\w-]+): .*? and ([\d.]+) %", text))
    assert float(found["calibrated"]) > 90
    assert float(found["calibrated"]) > float(found["as-is"])
    assert "DecoupledConv2d" in text
