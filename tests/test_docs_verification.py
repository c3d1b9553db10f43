"""What docs/verification.md shows, done as it shows it, with a small network and a small folder."""

from pathlib import Path

from helpers.docs_pages import pasted
from helpers.lfw_folder import DEV_TRAIN, write_image, write_lfw

DOCS = Path(__file__).parent.parent / "docs" / "verification.md"


def test_the_docs_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = write_lfw(tmp_path / "lfw-deepfunneled")
    write_image(folder / "Eve_Five" / "Eve_Five_0001.jpg", 99)
    # Both folds keep pairs of both kinds without the people who were trained on.
    (folder / "peopleDevTrain.txt").write_text(DEV_TRAIN.replace("2\nAda_One\t3\n", "1\n"))
    fold = "Ada_One\t1\t2\nAda_One\t3\tDi_Four\t2\n"
    (folder / "pairs.txt").write_text(f"2\t1\n{fold}{fold}")
    lfw, retrieval, unseen = ({}, {}, {})
    for group, names in zip(pasted(DOCS), (lfw, retrieval, unseen), strict=True):
        for block in group:
            exec(block.compiled(block.code), names)
    assert lfw["pairs"].same.tolist() == [True, False] * 2
    assert lfw["found"].standard_error >= 0
    assert lfw["answers"].known.tolist() == [True, False, True]
    assert retrieval["result"].recall.keys() == {1, 5, 10}
    assert len(unseen["few"]) == 2000
    assert unseen["parts"].known.num_classes == 6
    assert "rule of three" in capsys.readouterr().out
