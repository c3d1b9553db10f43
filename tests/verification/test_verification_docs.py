"""What docs/verification.md shows, done as it shows it, with a small network and a small folder."""

import re
from pathlib import Path

import torch
from lfw_folder import DEV_TRAIN, write_image, write_lfw

import dcnet

DOCS = Path(__file__).parent.parent.parent / "docs" / "verification.md"


def test_the_docs_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = write_lfw(tmp_path / "lfw-deepfunneled")
    write_image(folder / "Eve_Five" / "Eve_Five_0001.jpg", 99)
    # Both folds keep pairs of both kinds without the people who were trained on.
    (folder / "peopleDevTrain.txt").write_text(DEV_TRAIN.replace("2\nAda_One\t3\n", "1\n"))
    fold = "Ada_One\t1\t2\nAda_One\t3\tDi_Four\t2\n"
    (folder / "pairs.txt").write_text(f"2\t1\n{fold}{fold}")
    model = dcnet.create_model("cnn9", "tanh-cos", 10, width=0.05)
    with torch.no_grad():
        model(torch.rand(8, 3, 32, 32))
    names: dict[str, object] = {"model": model}
    for code in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL):
        exec(code, names)
    assert names["pairs"].same.tolist() == [True, False] * 2
    assert names["found"].standard_error >= 0
    assert names["answers"].known.tolist() == [True, False, True]
    assert len(names["few"]) == 2000
    assert names["parts"].known.num_classes == 6
    assert "rule of three" in capsys.readouterr().out
