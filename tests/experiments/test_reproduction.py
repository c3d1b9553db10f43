"""`dcnet reproduce` from the command line."""

import json
import re
from pathlib import Path

import pytest
from helpers.fake_records import bring

from dcnet.cli.app import main
from dcnet.experiments import get_experiment, select_experiments
from dcnet.experiments.reproduction import parse_jobs, smoke_test
from dcnet.experiments.status import RecordIndex
from dcnet.report.figures import shade_errors, shade_plot


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Changes to a folder outside of this repository, whose records would be used."""
    monkeypatch.chdir(tmp_path)


def run_command(capsys, *words):
    code = main([str(word) for word in words])
    return code, capsys.readouterr()


def test_status_runs_nothing(tmp_path, capsys):
    bring(tmp_path / "brought", get_experiment("table1").cell("weight projection", "tanh-cos").config, 21.5)
    words = ("reproduce", "table1", "--status", "--runs", tmp_path / "runs", "--records", tmp_path / "brought")
    code, seen = run_command(capsys, *words)
    assert code == 0
    assert "21.50 (21.17, +0.33)" in seen.out
    furthest = "largest difference from the paper: +0.33 (worse) at weight projection, tanh-cos"
    assert f"table1: 1 of 10 cells done; {furthest}" in seen.out
    assert not (tmp_path / "runs").exists()
    cells = json.loads(run_command(capsys, *words, "--json")[1].out)["table1"]["cells"]
    assert [cell["state"] for cell in cells] == ["missing"] * 7 + ["done", "missing", "missing"]
    assert cells[7]["misses_by"] == pytest.approx(0.33)


def test_damaged_records_are_reported_and_other_files_ignored(tmp_path, capsys):
    brought, config = tmp_path / "brought", get_experiment("table1").cells[0].config
    cut = bring(brought, config)
    cut.write_text(cut.read_text()[:100])
    (brought / "other.json").write_text("[1]")
    (brought / "folder.json").mkdir()
    words = ("reproduce", "table1", "--status", "--json", "--runs", tmp_path / "runs", "--records", brought)
    code, seen = run_command(capsys, *words)
    assert code == 0
    assert seen.err.startswith(f"dcnet: skipped {str(cut)!r}, which cannot be read: ")
    assert seen.err.count("\n") == 1
    assert json.loads(seen.out)["table1"]["cells"][0]["state"] == "missing"


def test_a_record_with_nan_is_reported_and_not_collected(tmp_path, capsys):
    """NaN could not be written as JSON."""
    brought, cells = tmp_path / "brought", get_experiment("table1").cells
    whole, strange = bring(brought, cells[0].config), bring(brought, cells[1].config, loss=float("nan"))
    words = ("--status", "--runs", tmp_path / "runs", "--records", brought, "--collect", tmp_path / "kept")
    code, seen = run_command(capsys, "reproduce", "table1", *words)
    assert (code, seen.err) == (0, f"dcnet: skipped {str(strange)!r}, which cannot be read: JSON has no NaN\n")
    assert [file.name for file in (tmp_path / "kept").iterdir()] == [whole.name]


def test_findings_are_printed_and_in_json(tmp_path, capsys):
    plain, _, sphere, *_ = get_experiment("table3").cells
    for config, error in zip((*plain.configs(2), sphere.config), (50.0, 51.0, 60.0), strict=True):
        bring(tmp_path / "brought", config, error)
    words = ("reproduce", "table3", "--status", "--runs", tmp_path / "runs", "--records", tmp_path / "brought")
    seen = run_command(capsys, *words)[1].out
    assert (
        "table3: 0 of 2 compared cells are within 1.00 of the paper; 1 is better by more: baseline in cos, no "
        "ReLU (-7.74); 1 is worse by more: sphere in cos, no ReLU (+26.69)." in seen
    )
    assert "rank as in the paper; not baseline and sphere in cos, no ReLU." in seen
    found = json.loads(run_command(capsys, *words, "--json")[1].out)["table3"]
    assert (found["near"]["cells"], found["near"]["worse"]) == (2, [["sphere", "cos, no ReLU", 26.69]])
    assert (found["order"]["pairs"], found["order"]["turned"]) == (1, [["cos, no ReLU", "baseline", "sphere"]])


def test_a_narrow_terminal_truncates_no_number(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, seen = run_command(capsys, "reproduce", "table2", "--status", "--runs", tmp_path)
    assert "normalization" in seen.out
    assert "\N{HORIZONTAL ELLIPSIS}" not in seen.out


def test_only_selects_rows_and_columns_by_prefix(tmp_path, capsys):
    words = ("reproduce", "table3", "table1", "--status", "--json", "--runs", tmp_path, "--only")
    found = json.loads(run_command(capsys, *words, "seg", "cos, ReLU")[1].out)
    assert list(found) == ["table3"]
    cells = {(cell["row"], cell["column"]) for cell in found["table3"]["cells"]}
    assert cells == {
        (cell.row, cell.column)
        for cell in get_experiment("table3").cells
        if cell.row == "seg" or cell.column == "cos, ReLU"
    }
    found = json.loads(run_command(capsys, *words, "seg, sqcos")[1].out)
    assert [cell["column"] for cell in found["table3"]["cells"]] == ["sqcos, no ReLU", "sqcos, ReLU"]
    code, seen = run_command(capsys, *words, "seg", "os, ReLU")
    assert code == 2
    assert "--only 'os, ReLU' matches no row or column: choose from baseline; sphere;" in seen.err
    _, seen = run_command(capsys, "reproduce", "table3", "--only", "", "--status")
    assert "--only is '', which matches every cell" in seen.err
    code, seen = run_command(capsys, "reproduce", "figure4", "--only", "seg", "--runs", tmp_path)
    message = "dcnet: --only 'seg' selects cells of tables, but no table is given: name one, such as table3\n"
    assert (code, seen.err) == (2, message)


def test_results_is_the_default_folder_of_records(tmp_path, capsys):
    bring(tmp_path / "results", get_experiment("table1").cell("weight projection", "tanh-cos").config, 21.5)
    words = ("reproduce", "table1", "--status", "--runs", tmp_path / "runs")
    assert "table1: 1 of 10 cells done" in run_command(capsys, *words)[1].out
    (tmp_path / "others").mkdir()
    assert "table1: 0 of 10 cells done" in run_command(capsys, *words, "--records", tmp_path / "others")[1].out


def test_a_smoke_test_of_part_of_a_table(tmp_path, capsys, monkeypatch):
    # The worker shares the cores with other tests: more threads would slow each other down.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("reproduce", "table1", "--only", "linearly weighted", "--smoke", "--device", "cpu")
    own = ("--runs", tmp_path, "--collect", tmp_path / "kept")
    code, seen = run_command(capsys, *words, *own)
    assert code == 0
    assert "table1: 2 of 2 cells done" in seen.out
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("smoke/*/record.json")}
    assert len(before) == len(list((tmp_path / "kept").glob("*.json"))) == 2
    assert run_command(capsys, *words, *own)[0] == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}
    elsewhere = ("--status", "--runs", tmp_path / "new", "--records", tmp_path / "kept")
    assert "table1: 2 of 2 cells done" in run_command(capsys, *words, *elsewhere)[1].out


# Their networks and recipes are like those of smaller tables.
LARGE = {"attack_hunt", "rate_transfer", "speedrun_trials", "table3", "table4"}


@pytest.mark.slow
def test_a_smoke_test_of_all_small_tables_and_a_contest(tmp_path, capsys, monkeypatch):
    """All contests have the same stages; one of them is enough."""
    monkeypatch.setenv("COLUMNS", "200")
    # The worker shares the cores with other tests: more threads would slow each other down.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tables = [each for each in select_experiments(["all"]) if each.rules is None and each.name not in LARGE]
    chosen = [*tables, get_experiment("contest_few_images_10")]
    names = [experiment.name for experiment in chosen]
    code, seen = run_command(capsys, "reproduce", *names, "--smoke", "--runs", tmp_path, "--device", "cpu")
    assert code == 0, seen.err
    for experiment in chosen:
        cells = sum(cell.config is not None for cell in smoke_test(experiment).cells)
        if experiment.rules is not None:
            # A final run for each side.
            cells += len(experiment.rules.sides)
        assert f"{experiment.name}: {cells} of {cells} cells done" in seen.out
    for name in ("faces", "attacks_today"):
        part = seen.out.partition(f"{name}: ")[0].rpartition("┡")[2]
        assert "not in a" in part
        assert not re.search(r"\d\d\.\d\d", part)
    assert "the numbers are meaningless" in " ".join(seen.out.split())


@pytest.mark.parametrize(("ended", "code"), [("done", 0), ("interrupted", 130)])
def test_exit_code_after_an_interruption(ended, code, tmp_path, capsys, monkeypatch):
    def interrupted(pool):
        pool.outcomes = {task.label: "done" for task in pool.pending[1:]} | {pool.pending[0].label: ended}
        return False

    monkeypatch.setattr("dcnet.experiments.pool.Pool.run", interrupted)
    found, seen = run_command(capsys, "reproduce", "table1", "--smoke", "--runs", tmp_path, "--device", "cpu")
    assert found == code
    assert ("interrupted with 1 of 10 tasks left" in seen.out) == (ended == "interrupted")


def test_after_an_interruption_no_table_is_printed(tmp_path, capsys, monkeypatch):
    def stopped(work, console):
        console.print("interrupted with 3 of 10 tasks left; run the same command again to resume")
        return 130

    monkeypatch.setattr("dcnet.experiments.reproduction.Reproduction.run", stopped)
    words = ("reproduce", "table1", "figure3", "--runs", tmp_path, "--collect", tmp_path / "kept")
    code, seen = run_command(capsys, *words)
    assert code == 130
    assert seen.out == "interrupted with 3 of 10 tasks left; run the same command again to resume\n"
    code, seen = run_command(capsys, *words, "--json")
    assert code == 130
    assert list(json.loads(seen.out)) == ["table1"]
    assert seen.err.startswith("interrupted with 3 of 10 tasks left")


def test_the_status_of_all_has_one_line_per_experiment(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for column, error in (("cos", 22.0), ("sqcos", 28.0)):
        bring(tmp_path / "results", get_experiment("table4").cell("tanh", column).config, error)
    code, seen = run_command(capsys, "reproduce", "all", "--status", "--runs", tmp_path / "runs")
    assert code == 0
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in seen.out.splitlines() if line[:1] == "│"]
    assert [row[0] for row in rows] == [experiment.name for experiment in select_experiments(["all"])]
    assert ["table4", "2", "0", "20", "1 of 2"] in rows
    assert ["table6", "0", "0", "not run", ""] in rows
    assert "figure3: can be drawn" in seen.out
    assert json.loads(run_command(capsys, "reproduce", "all", "--status", "--json")[1].out)["table4"]["cells"]


def test_status_uses_all_seeds_by_default(tmp_path, capsys):
    cell = get_experiment("table1").cell("weight projection", "tanh-cos")
    for config, error in zip(cell.configs(3), (21.0, 22.0, 23.0), strict=True):
        bring(tmp_path / "results", config, error)
    words = ("reproduce", "table1", "--status", "--runs", tmp_path / "runs")
    assert "22.00 ± 1.00 (21.17, +0.83)" in run_command(capsys, *words)[1].out
    assert "21.50 ± 0.71 (21.17, +0.33)" in run_command(capsys, *words, "--seeds", "2")[1].out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "name what to reproduce"),
        (("table33",), "'table33'"),
        (("figure44",), "unknown figure 'figure44'"),
        (("table1", "figure44", "--smoke"), "unknown figure 'figure44'"),
        (("figures", "--smoke"), "--smoke draws no figures: name what to reproduce, such as table3 or all"),
        (("table1", "--seeds", "0"), "--seeds"),
        (("table1", "--jobs", "many"), "--jobs must be a number from 1 to 64 or auto, not 'many'"),
        (("table1", "--jobs", "0"), "--jobs must be a number from 1 to 64 or auto, not '0'"),
        (("table1", "--records", "nowhere"), "there is no folder 'nowhere'"),
        (("table1", "--collect", "/proc/nothing"), "/proc/nothing"),
        (("figure3", "--out", "/proc/nothing"), "/proc/nothing"),
        (("table4", "--refresh-batches", "-1"), "--refresh-batches must be 0 or more, not -1"),
    ],
)
def test_invalid_options_give_a_one_line_error(words, problem, tmp_path, capsys):
    code, seen = run_command(capsys, "reproduce", *words, "--runs", tmp_path)
    assert code == 2
    assert problem in seen.err
    assert seen.err.count("\n") == 1


def test_auto_jobs_depend_on_mps(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert [parse_jobs("auto", device) for device in ("cpu", "cuda")] == [1, 1]
    (tmp_path / "control").touch()
    assert [parse_jobs("auto", device) for device in ("cpu", "cuda")] == [1, 4]
    assert parse_jobs("3", "cpu") == 3


def test_figures_are_drawn_from_records(tmp_path, capsys):
    words = ("reproduce", "figure3", "figure4", "figure6", "--runs", tmp_path, "--out", tmp_path / "drawn")
    code, seen = run_command(capsys, *words)
    assert code == 0
    assert f"figure3: {tmp_path / 'drawn' / 'figure3.png'}" in seen.out
    assert "figure4: figure4 needs at least two records of ResNet-32: run `dcnet reproduce table4 --refresh" in seen.out
    assert "figure6: figure6 needs records of features: run `dcnet train --recipe features" in seen.out
    assert [file.name for file in (tmp_path / "drawn").iterdir()] == ["figure3.png"]


def test_the_picture_of_shades_is_drawn_from_records(tmp_path, capsys):
    words = ("reproduce", "figure_shade", "--runs", tmp_path, "--records", tmp_path, "--out", tmp_path)
    wanted = "figure_shade needs records of digits_in_shade: run `dcnet reproduce digits-in-shade`"
    assert wanted in run_command(capsys, *words)[1].out
    for seed in (0, 1):
        for place, row in enumerate(("plain", "sphere-cos")):
            config = get_experiment("digits_in_shade").cell(row, "noise").configs(2)[seed]
            shades = [0.1 + 0.1 * place + 0.01 * severity for severity in range(5)]
            found = {"corruptions": {"by_kind": {"shade": shades}}}
            bring(tmp_path, config, 5.0 + place + seed, evaluations=found)
    errors = shade_errors(RecordIndex(tmp_path / "none", [tmp_path]))
    assert errors["plain"][0] == [5.0, 6.0]
    assert errors["sphere-cos"][5] == pytest.approx([24.0, 24.0])
    lines = shade_plot(errors).subfigs[1].axes[0].lines
    assert [line.get_label() for line in lines] == ["plain", "sphere-cos"]
    assert list(lines[0].get_ydata()) == pytest.approx([5.5, 10, 11, 12, 13, 14])
    assert f"figure_shade: {tmp_path / 'figure_shade.png'}" in run_command(capsys, *words)[1].out


def test_figure4_of_this_repository(tmp_path, capsys):
    results = Path(__file__).parents[2] / "results"
    words = ("reproduce", "figure4", "--runs", tmp_path, "--records", results, "--out", tmp_path)
    assert run_command(capsys, *words, "--status")[1].out == "figure4: can be drawn\n"
    assert not (tmp_path / "figure4.png").exists()
    assert run_command(capsys, *words)[0] == 0
    assert (tmp_path / "figure4.png").stat().st_size > 10_000


def figure1(folder: Path, records: Path, capsys) -> str:
    """The output for figure1, with records in that folder."""
    code, seen = run_command(capsys, "reproduce", "figure1", "--runs", folder, "--records", records, "--out", folder)
    assert code == 0
    return seen.out


def test_features_are_found_in_any_folder(tmp_path, capsys):
    results = Path(__file__).parents[2] / "results"
    assert figure1(tmp_path, results / "features", capsys) == f"figure1: {tmp_path / 'figure1.png'}\n"


@pytest.mark.parametrize("other", ["[1]", '{"half": ', '{"some": "thing"}'])
def test_other_files_among_features_are_ignored(other, tmp_path, capsys):
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "other.json").write_text(other)
    assert "figure1 needs records of features" in figure1(tmp_path, tmp_path, capsys)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"config": None}, "it is damaged: TypeError"),
        ({"points": [[1.0]]}, "its points must all have 2 numbers, or all 3, but number 0 has 1"),
    ],
)
def test_error_for_damaged_features(changes, problem, tmp_path, capsys):
    file = next((Path(__file__).parents[2] / "results" / "features").glob("mnist-cnn9-small-conv-softmax-seed0-*.json"))
    (tmp_path / "some.json").write_text(json.dumps(json.loads(file.read_text()) | changes))
    said = f"figure1: the features of the record 'some' cannot be drawn: {problem}"
    assert figure1(tmp_path, tmp_path, capsys).startswith(said)


def test_a_damaged_record_is_ignored(tmp_path, capsys):
    config = get_experiment("table1").cells[0].config
    folder = tmp_path / f"{config.name}-{config.hash}"
    folder.mkdir()
    (folder / "record.json").write_text('{"half": ')
    code, seen = run_command(capsys, "reproduce", "table1", "--status", "--runs", tmp_path)
    assert code == 0
    assert "table1: 0 of 10 cells done" in seen.out
