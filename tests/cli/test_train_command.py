"""`dcnet train`: options, runs and errors."""

import sys
from dataclasses import fields

import pytest
from helpers.cli_runs import color_run
from helpers.data_files import cifar_files, write_files

from dcnet.cli.app import main
from dcnet.cli.train import AUGMENTATION, NetworkOptions, RecipeOptions
from dcnet.training import RunConfig, all_runs

SMALL = ["--train-images", "60", "--batch-size", "20", "--width", "0.1", "--epochs", "2", "--device", "cpu"]


def train(root, *arguments):
    return main(["train", *SMALL, "--runs", str(root), *arguments])


def test_networks_are_compared(tmp_path, capsys):
    assert train(tmp_path, "--operators", "conv", "tanh-cos", "--seeds", "0", "1") == 0
    out = capsys.readouterr().out
    assert "digits, cnn9-small, last step, mean ± deviation of 2 seeds" in " ".join(out.split())
    assert "conv" in out
    assert "tanh-cos" in out
    assert "±" in out
    assert len(all_runs(tmp_path)) == 4


def test_a_transformer_learns_cifar_by_its_recipe(tmp_path, capsys):
    folder, contents, _ = cifar_files("cifar100", "binary")
    write_files(tmp_path / "data" / folder, contents)
    options = ["--width", "0.05", "--batch-size", "4", "--device", "cpu", "--runs", str(tmp_path / "runs")]
    words = ["--recipe", "vit-cifar", "--operators", "conv", "tanh-cos", "--steps", "2", *options]
    assert main(["train", *words, "--data-dir", str(tmp_path / "data")]) == 0
    assert "cifar100, vit-tiny, last step" in " ".join(capsys.readouterr().out.split())
    records = [run.record() for run in all_runs(tmp_path / "runs")]
    assert sorted(record.config["operator"] for record in records) == ["conv", "tanh-cos"]
    assert all(record.config["optimizer"] == "adamw" for record in records)


def test_finished_measurements_are_not_repeated(tmp_path, capsys):
    assert train(tmp_path) == 0
    (run,) = all_runs(tmp_path)
    before = run.record()
    capsys.readouterr()
    assert train(tmp_path) == 0
    assert "is already done" in capsys.readouterr().out
    assert run.record() == before
    assert train(tmp_path, "--again") == 0
    assert run.record().environment["date"] != before.environment["date"] or run.record() != before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--operators", "tanh-cosine"], "cosine"),
        (["--operators"], "--operators is empty"),
        (["--seeds"], "--seeds is empty"),
        (["--lr", "0"], "lr must be positive, not 0"),
        (["--steps", "5"], "--steps 5 and --epochs 2 exclude each other"),
        (["--resume", "nothing"], "no run 'nothing'"),
        (["--resume", "some", "--again"], "--resume and --again exclude each other"),
        (["--checkpoint-every", "0"], "--checkpoint-every must be 1 or more, not 0"),
        (["--operators", "tanh-cos+linear", "--projection-every", "3"], "needs an unweighted operator"),
        (["--dataset", "cifr10"], "cifar10"),
        (["--model", "resnet33"], "resnet32"),
        (["--batch-size", "500"], "must be from 1 to 60"),
        (["--pretrained", "nowhere"], "no weights at"),
        (["--pretrained", ""], "--pretrained is ''"),
        (["--train-images", "9000"], "from 1 to 600, not 9000"),
        (["--pad", "-1"], "pad"),
        (["--cutout", "9"], "cutout must be a whole number from 0 to 8, not 9"),
        (["--margin", "arcface", "--margin-scale", "big"], "scale must be a number, 'norm' or 'learned', not 'big'"),
        (["--margin", "sphereface2", "--label-smoothing", "0.1"], "does not support label_smoothing (got 0.1)"),
        (["--momentum", "0.5"], "optimizer 'adam' has no momentum (got 0.5)"),
        (["--norm", "none", "--norm-momentum", "0.5"], "norm 'none' has no norm_momentum (got 0.5)"),
        (["--shard-head", "True"], "shard_head=True needs a head with a margin: give a margin, such as a-softmax"),
        (["--features", "2"], "features=2 needs a head with a margin"),
        (["--seeds", "-1"], "seed must be a whole number, 0 or more, not -1"),
        (["--image-size", "16"], "image_size=16 does not match digits, whose images have the size 8"),
        (["--tracker", "aim"], "tracker 'aim' is not installed"),
        (
            ["--recipe", "paper-imagenet", "--dataset", "digits", "--image-size", "8", "--operators", "conv"],
            "pixel_mean of the recipe 'paper-imagenet' has 3 values, but the images of 'digits' have 1 channel:",
        ),
    ],
)
def test_wrong_options_give_a_one_line_error(tmp_path, capsys, arguments, words):
    assert train(tmp_path, *arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("words", [["train"], ["reproduce", "table1", "--status"]])
@pytest.mark.parametrize("below", ["", "runs"])
def test_runs_folder_must_not_be_a_file(tmp_path, capsys, words, below):
    file = tmp_path / "file"
    file.touch()
    assert main([*words, "--runs", str(file / below)]) == 2
    message = f"runs cannot be written to {str(file / below)!r}: {str(file)!r} is not a folder"
    assert capsys.readouterr() == ("", f"dcnet: {message}\n")


def test_missing_dataset_error_says_how_to_get_it(tmp_path, capsys):
    assert train(tmp_path, "--dataset", "imagefolder", "--data-dir", str(tmp_path)) == 2
    assert "train" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["train-images", "pad", "cutout"])
def test_options_without_effect_on_a_folder_of_images_are_rejected(tmp_path, capsys, option):
    color_run(tmp_path / "run", tmp_path / "images")
    small = ["--dataset", "imagefolder", "--data-dir", str(tmp_path / "images"), "--image-size", "14"]
    others = ["--batch-size", "2", "--width", "0.1", "--epochs", "1", "--device", "cpu", "--workers", "0"]
    assert main(["train", *small, *others, f"--{option}", "4", "--runs", str(tmp_path)]) == 2
    assert f"{option.replace('-', '_')}=4 does not apply to imagefolder, a folder of images" in capsys.readouterr().err


def test_runs_on_folders_with_different_images_are_different(tmp_path, capsys):
    for name in ("one", "two"):
        color_run(tmp_path / f"run of {name}", tmp_path / name)
    for part in ("train", "val"):
        (tmp_path / "two" / part / "dark").rename(tmp_path / "two" / part / "dim")
    small = ["--dataset", "imagefolder", "--image-size", "14", "--batch-size", "2", "--width", "0.1", "--epochs", "1"]

    def words(name):
        return ["train", *small, "--workers", "0", "--device", "cpu", "--runs", str(tmp_path), "--data-dir", name]

    assert main(words(str(tmp_path / "one"))) == 0
    capsys.readouterr()
    assert main(words(str(tmp_path / "one"))) == 0
    assert "is already done" in capsys.readouterr().out
    assert main(words(str(tmp_path / "nowhere"))) == 2
    assert f"imagefolder is not in {tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert main(words(str(tmp_path / "two"))) == 0
    assert "is already done" not in capsys.readouterr().out
    # Both runs stay, and the path of a folder does not matter.
    (tmp_path / "one").rename(tmp_path / "moved")
    for name, folder in {"moved": "one", "two": "two"}.items():
        assert main(words(str(tmp_path / name))) == 0
        out = capsys.readouterr().out
        assert "is already done" in out
        (run,) = [run for run in all_runs(tmp_path) if run.folder.name in out]
        assert run.record().data.folder == str(tmp_path / folder)


def test_one_operator_in_two_spellings_is_one_run(tmp_path, capsys):
    assert train(tmp_path, "--operators", "tanh-cos", "tanh(scale=1.0)-cos", "--seeds", "0", "0") == 0
    out = capsys.readouterr().out
    assert "one seed" in out
    assert out.count("wrote") == 1


def test_missing_package_gives_a_one_line_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert train(tmp_path, "--model", "timm:resnet18", "--epochs", "1") == 2
    error = capsys.readouterr().err
    assert error.startswith("dcnet train: ")
    assert "timm" in error
    assert error.count("\n") == 1


def test_train_accepts_large_seeds(tmp_path):
    assert train(tmp_path, "--seeds", str(2**63 - 1)) == 0


# --- existing runs ---


@pytest.mark.parametrize("where", ["renamed", "."])
def test_resume_works_in_a_renamed_folder(tmp_path, capsys, monkeypatch, where):
    assert train(tmp_path) == 0
    (run,) = all_runs(tmp_path)
    folder = run.folder.rename(tmp_path / "renamed")
    monkeypatch.chdir(tmp_path if where == "renamed" else folder)
    capsys.readouterr()
    assert main(["train", "--resume", where, "--device", "cpu"]) == 0
    assert "is already done" in capsys.readouterr().out
    assert not list(tmp_path.rglob("digits-*"))


def test_runs_that_cannot_be_resumed_are_rejected(tmp_path, capsys):
    assert train(tmp_path, "--operators", "conv") == 0
    assert (
        main(["convert", "digits", "--runs", str(tmp_path), "--operator", "tanh-cos", "--out", str(tmp_path / "x")])
        == 0
    )
    capsys.readouterr()
    assert main(["train", "--resume", "x", "--runs", str(tmp_path)]) == 2
    assert "was converted but not trained, so it cannot be resumed" in capsys.readouterr().err
    (tmp_path / "x" / "record.json").write_text('{"config": {}, "status": "running", "curves": {}}')
    assert main(["train", "--resume", "x", "--runs", str(tmp_path)]) == 2
    assert "does not describe its network" in capsys.readouterr().err


def test_pretrained_accepts_the_name_of_a_run(tmp_path):
    assert train(tmp_path, "--operators", "conv") == 0
    (plain,) = all_runs(tmp_path)
    assert train(tmp_path, "--pretrained", plain.folder.name[-8:]) == 0
    found = {run.record().config["pretrained"] for run in all_runs(tmp_path)}
    assert found == {None, str(plain.folder)}


@pytest.mark.parametrize("choice", ["--optimizer", "--precision", "--norm", "--schedule"])
def test_choices_are_listed(tmp_path, capsys, choice):
    assert train(tmp_path, choice, "nonsense") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dcnet: {choice} must be one of ")
    assert error.endswith(", not 'nonsense'; see `dcnet train --help`\n")


def test_help_reads_well(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "digits" in out
    assert "--operators" in out


def test_every_value_of_a_config_has_an_option():
    options = {declared.name for kind in (NetworkOptions, RecipeOptions) for declared in fields(kind)}
    elsewhere = {"recipe", "operator", "seed"}
    by_recipe_only = {"pixel_mean", "pixel_std", "data", "network"}
    values = {declared.name for declared in fields(RunConfig)} - elsewhere - by_recipe_only
    assert options == values - {"augmentation"} | set(AUGMENTATION)
