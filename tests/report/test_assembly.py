"""The page as HTML: complete, self-contained, with all numbers of the records and their commands."""

import functools
import itertools
import re
from pathlib import Path

import pytest
from helpers.page_records import RESULTS, a_run, drawn, put, real_page, real_tree

from dcnet.experiments import select_experiments
from dcnet.experiments.experiment import NOT_CONVERGED
from dcnet.report.page import Sources, page
from dcnet.report.page.assembly import registry, section, sections

EXPERIMENTS = select_experiments(["all"])
LOADING = ("src", "srcset", "data", "action", "poster")


def test_page_is_small_and_self_contained():
    text, tree = real_page(), real_tree()
    assert len(text.encode()) < 5_000_000
    for node in tree.walk():
        for name, value in node.attributes.items():
            assert name not in LOADING, (node.name, name)
            if name in ("href", "xlink:href"):
                assert (value or "").startswith(("#", "data:,"))
    style = tree.one("style").text
    assert "@import" not in style
    assert not re.search(r"url\((?!#)", style)
    assert "default-src 'none'" in text
    assert not re.search(r"\b(fetch|XMLHttpRequest|import)\(", text)


def test_ids_are_unique_and_links_have_targets():
    nodes = list(real_tree().walk())
    ids = [node.attributes["id"] for node in nodes if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[A-Za-z][\w.-]*", str(name)) for name in ids)
    for node in nodes:
        for name in ("for", "aria-labelledby", "aria-controls"):
            assert name not in node.attributes or node.attributes[name] in ids, (node.name, node.attributes)
        if node.name == "a":
            assert str(node.attributes["href"])[1:] in ids
        for clip in re.findall(r"url\(#(.*?)\)", str(node.attributes.get("clip-path"))):
            assert clip in ids


def test_headings_are_in_order():
    levels = [int(node.name[1]) for node in real_tree().walk() if re.fullmatch("h[1-6]", node.name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_every_control_has_an_accessible_name():
    tree = real_tree()
    labelled = {node.attributes["for"] for node in tree.all("label")}
    assert {node.attributes["id"] for node in tree.all("input")} <= labelled
    assert all(node.text for node in [*tree.all("button"), *tree.all("summary"), *tree.all("a"), *tree.all("label")])
    assert all(node.all("title") for node in tree.all("svg", role="img"))
    for box in tree.all("div", class_="scroll"):
        assert box.attributes["tabindex"] == "0"
        assert box.attributes["role"] == "region"
    assert tree.one("html").attributes["lang"] == "en"
    assert tree.one("a", class_="skip").attributes["href"] == f"#{tree.one('main').attributes['id']}"
    assert "width=device-width" in str(tree.one("meta", name_="viewport").attributes["content"])


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_page_has_every_number_of_the_tables(experiment):
    (box,) = [one for one in real_tree().all("div", class_="scroll") if experiment.name in _caption(one)]
    rows = {row.all("th")[0].text: row.all("td") for row in box.one("tbody").all("tr")}
    # The cells of a contest depend on the records.
    experiment, cells = cells_by_name()[experiment.name]
    assert list(rows) == experiment.rows
    for found in cells:
        status, cell = found.status, found.status.cell
        shown = rows[cell.row][experiment.columns.index(cell.column)]
        if isinstance(cell.paper, float | int):
            assert f"paper {cell.paper:.2f}" in shown.text
        elif cell.paper is not None:
            assert f"paper {cell.paper}" in shown.text
        if found.records:
            summary = shown.one("summary")
            assert summary.text.startswith(NOT_CONVERGED if status.mean is None else f"{status.mean:.2f}")
            for record in found.records:
                assert record.command in str(summary.attributes["title"])
                assert record.command in shown.one("details").text
                assert record.hash in shown.one("details").text
        elif cell.config is not None:
            assert shown.one("summary").text in ("missing", "not run")
            assert "dcnet " in str(shown.one("summary").attributes["title"])
        if status.difference is not None:
            assert f"{status.difference:+.2f}" in shown.text


@functools.cache
def cells_by_name():
    return {experiment.name: (experiment, found) for experiment, found in Sources((RESULTS,)).experiments}


def _caption(box):
    name = str(box.attributes["aria-labelledby"])
    return [name.removesuffix("-table-caption")]


def test_page_is_deterministic():
    assert page(Sources((RESULTS,))) == real_page()


def test_sections_without_records_show_the_command(tmp_path: Path):
    tree = drawn(tmp_path)
    for name in ("curves", "features", "robustness", "speed", "heads", "records"):
        empty = tree.one("section", id=name).all("p", class_="empty")
        assert empty, name
        assert all("dcnet " in one.all("code")[0].text for one in empty)
    assert "missing" in tree.one("section", id="tables").text
    assert not any(re.search(r"\d", node.text) for node in tree.all("summary"))


def test_text_of_records_is_escaped(tmp_path: Path):
    evil = '</script><script>alert(1)</script><b title="\'">'
    record = a_run(name=evil.replace("/", ""), command=evil)
    record["config"]["operator"] = evil
    put(tmp_path, "evil", record)
    tree = drawn(tmp_path)
    kinds = [node.attributes.get("type") for node in tree.all("script")]
    assert kinds.count(None) == 1
    assert not tree.all("b")
    assert any(evil in node.text for node in tree.all("code"))


def test_additional_seeds_count_in_the_mean_and_deviation():
    summary = [node.text for node in real_tree().all("summary")]
    assert any("±" in text for text in summary)


def test_title_mentions_seeds_only_if_there_are_several():
    tree = real_tree()
    assert tree.one("head").one("title").text == tree.one("h1").text == "dcnet: reproduction of the paper"


def with_error(folder: Path, row: str, column: str, error: float) -> None:
    """Writes a record with this error for a cell of Table 3."""
    (experiment,) = [one for one in EXPERIMENTS if one.name == "table3"]
    config = experiment.cell(row, column).config
    record = {"name": config.name, "hash": config.hash, "status": "done", "results": {"test_error": error}}
    put(folder, config.hash, record | {"config": config.described(), "curves": {}, "command": "dcnet train"})


@pytest.mark.parametrize(
    ("difference", "place"), [(-5.0, "apart"), (-1.1, "apart"), (-0.9, "ahead"), (0.5, "behind"), (5.0, "behind")]
)
def test_large_improvement_on_the_paper_is_not_marked_as_success(tmp_path: Path, difference: float, place: str):
    with_error(tmp_path, "seg", "sqcos, no ReLU", 24.29 + difference)
    tree = drawn(tmp_path)
    (shown,) = [node for node in tree.all("span") if node.text == f"{difference:+.2f}"]
    assert shown.attributes["class"] == place
    overview = tree.one("section", id="overview").one("tbody").text
    word = "worse" if difference > 0 else "better"
    assert f"{difference:+.2f} ({word}): seg, sqcos, no ReLU" in overview


def test_overview_has_the_largest_difference_in_either_direction(tmp_path: Path):
    with_error(tmp_path, "seg", "sqcos, no ReLU", 24.29 + 2.0)
    with_error(tmp_path, "baseline", "cos, no ReLU", 58.24 - 20.0)
    assert "-20.00 (better): baseline, cos, no ReLU" in drawn(tmp_path).one("section", id="overview").text


def test_section_is_registered_by_one_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(registry, "_entries", dict(registry))

    @section("One more", order=5)
    def one_more(sources):
        return "1 < 2"

    assert [one.name for one in sections()][:3] == ["overview", "one_more", "tables"]
    assert drawn(tmp_path).one("section", id="one_more").text == "One more 1 < 2"
    with pytest.raises(ValueError, match="'one_more' is taken"):
        section("Again", order=6)(one_more)


def test_colors_have_contrast_in_light_and_dark_mode():
    """Contrast ratios of WCAG: 4.5 for text, 3 for lines."""
    for block in re.findall(r"--paper: .*?--s9: #\w+;", real_page(), re.DOTALL):
        colors = dict(re.findall(r"--(\w+): (#\w{6})", block))
        for name in ("ink", "soft", "link", "ahead", "behind", *(f"s{i}" for i in range(10))):
            wanted = 3.0 if re.fullmatch(r"s\d", name) else 4.5
            assert contrast(colors[name], colors["paper"]) >= wanted, name
        assert contrast(colors["soft"], colors["box"]) >= 4.5


def contrast(first: str, second: str) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
