"""The code of docs/verification.md runs, with a small network, some photos, and a small folder in LFW's layout."""

from pathlib import Path

from helpers.docs_pages import pasted
from helpers.lfw_folder import DEV_TRAIN, write_image, write_lfw

DOCS = Path(__file__).parent.parent / "docs" / "verification.md"


def test_verification_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = write_lfw(tmp_path / "lfw-deepfunneled")
    # Without the training people, both folds still have pairs of both kinds.
    (folder / "peopleDevTrain.txt").write_text(DEV_TRAIN.replace("2\nAda_One\t3\n", "1\n"))
    fold = "Ada_One\t1\t2\nAda_One\t3\tDi_Four\t2\n"
    (folder / "pairs.txt").write_text(f"2\t1\n{fold}{fold}")
    for place, person in enumerate(("Ada", "Bob", "Cy", "Di", "Eve", "Flo")):
        for number in range(3):
            write_image(tmp_path / "photos" / person / f"{number}.jpg", 10 * place + number)
    photos, retrieval, unseen = ({}, {}, {})
    for group, names in zip(pasted(DOCS), (photos, retrieval, unseen), strict=True):
        for block in group:
            exec(block.compiled(block.code), names)
    assert (len(photos["pairs"]), int(photos["pairs"].same.sum())) == (18 * 17 // 2, 6 * 3)
    # Each fold has three people.
    assert photos["folds"][photos["inside"]].bincount().tolist() == [9 * 8 // 2] * 2
    assert photos["found"].standard_error >= 0
    assert photos["unseen"].same.tolist() == [True, False] * 2
    assert len(photos["result"].accuracies) == 2
    assert photos["answers"].known.tolist() == [True, False, True, True, True, True]
    assert retrieval["result"].recall.keys() == {1, 5, 10}
    assert len(unseen["few"]) == 2000
    assert unseen["parts"].known.num_classes == 6
    assert "rule of three" in capsys.readouterr().out
