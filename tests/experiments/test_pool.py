"""Tasks side by side: all are done, none takes another with it, and what is interrupted goes on."""

import dataclasses
import io
import os
import signal
from pathlib import Path

import pytest
from fake_records import small
from processes import wait_until
from rich.console import Console

from dcnet.experiments import evaluations
from dcnet.experiments.board import Board
from dcnet.experiments.pool import Pool
from dcnet.experiments.tasks import Task
from dcnet.experiments.worker import Place, Teller, attempt
from dcnet.training import Execution, Run, Watcher

LONG = 100_000


def carried_out(tasks, root, jobs=2, board=Board):
    log = io.StringIO()
    place = Place(root, Execution(device="cpu"), threads=1)
    with board(Console(file=log, width=200), len(tasks)) as shown:
        pool = Pool(tasks, place, jobs, shown)
        finished = pool.run()
    return pool.outcomes, finished, log.getvalue()


class KillsAfter(Board):
    """Kills the process of the first task when it has begun to train; the pool is `pool`."""

    signal = signal.SIGKILL

    def hears(self, task, kind, *values):
        super().hears(task, kind, *values)
        if kind == "steps" and task.config.steps == LONG:
            os.kill(workers()[0], self.signal)


class PressesCtrlC(Board):
    def hears(self, task, kind, *values):
        super().hears(task, kind, *values)
        if kind == "steps" and not getattr(self, "pressed", False):
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)


def workers():
    """The processes that this one has started to work."""
    pids = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def first_worker():
    """The first that was started, as soon as it is Python."""
    return wait_until(workers)[0]


class CtrlCReachesAWorker(Board):
    """As a terminal sends it, to all processes, one of which has only just begun."""

    def begins(self, task):
        super().begins(task)
        os.kill(first_worker(), signal.SIGINT)


class LosesOneWhileStopping(Board):
    def begins(self, task):
        super().begins(task)
        pid = first_worker()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def alone(config, root):
    assert attempt(Task(config), Place(root, Execution(device="cpu")), Watcher()) == ("done", "")
    return Run.of(config, root)


def test_all_tasks_are_done_and_said_and_give_the_same_as_alone(tmp_path):
    tasks = [Task(small(seed=seed)) for seed in range(3)]
    outcomes, finished, log = carried_out(tasks, tmp_path)
    assert finished
    assert outcomes == {task.name: "done" for task in tasks}
    assert log.count(": done, ") == 3
    assert "done, 3 of 3" in log
    for task in tasks:
        beside = Run.of(task.config, tmp_path)
        assert beside.model_file.read_bytes() == alone(task.config, tmp_path / "alone").model_file.read_bytes()


def test_a_task_that_fails_is_one_sentence_and_the_others_are_done(tmp_path):
    good = Task(small())
    bad = Task(small("conv", pretrained=str(tmp_path / "nowhere")))
    outcomes, finished, log = carried_out([bad, good], tmp_path, jobs=1)
    assert finished
    assert outcomes == {bad.name: "failed", good.name: "done"}
    assert "nowhere" in log
    assert "Traceback" not in log


def test_a_process_that_is_killed_loses_its_own_task_alone(tmp_path):
    killed, other = Task(small(steps=LONG)), Task(small())
    outcomes, finished, log = carried_out([killed, other], tmp_path, jobs=1, board=KillsAfter)
    assert finished
    assert outcomes == {killed.name: "failed", other.name: "done"}
    assert "its process ended with -9; the same command goes on" in log


def test_ctrl_c_saves_what_is_under_way_and_begins_nothing_more(tmp_path):
    task, other = Task(small(steps=LONG)), Task(small())
    outcomes, finished, _ = carried_out([task, other], tmp_path, jobs=1, board=PressesCtrlC)
    assert not finished
    assert outcomes == {task.name: "interrupted"}
    run = Run.of(task.config, tmp_path)
    assert run.record()["status"] == "interrupted"
    assert run.checkpoints.newest()[0].step == run.record()["steps_done"] > 0
    assert not Run.of(other.config, tmp_path).exists


def test_ctrl_c_is_not_for_the_workers(tmp_path, capfd):
    """They are told by the pool; while they import torch, it would end them with a traceback."""
    task = Task(small())
    outcomes, _, _ = carried_out([task], tmp_path, board=CtrlCReachesAWorker)
    assert outcomes == {task.name: "done"}
    assert capfd.readouterr().err == ""


def test_nobody_is_hired_for_one_that_is_lost_while_stopping(tmp_path):
    tasks = [Task(small(seed=seed)) for seed in range(2)]
    outcomes, finished, log = carried_out(tasks, tmp_path, jobs=1, board=LosesOneWhileStopping)
    assert not finished
    assert outcomes == {tasks[0].name: "failed"}
    assert log.count(": begins, ") == 1


def test_a_run_that_was_interrupted_goes_on(tmp_path):
    config = small(steps=40)
    outcomes, _, _ = carried_out([Task(config)], tmp_path, jobs=1, board=PressesCtrlC)
    assert outcomes[Task(config).name] in ("interrupted", "done")
    assert carried_out([Task(config)], tmp_path)[0] == {Task(config).name: "done"}
    again = alone(config, tmp_path / "alone")
    assert Run.of(config, tmp_path).model_file.read_bytes() == again.model_file.read_bytes()


def test_a_run_that_diverges_says_so(tmp_path):
    outcome, problem = attempt(Task(small(lr=1e30, steps=5)), Place(tmp_path, Execution(device="cpu")), Watcher())
    assert outcome == "diverged"
    assert "is not finite" in problem


@pytest.fixture
def counted(monkeypatch):
    """An evaluation by the name of "counted", and how often it was asked for."""
    calls = []

    def evaluate(model, record, runs, data_dir):
        assert not model.training
        calls.append(record["name"])
        return {"value": 5.0}

    monkeypatch.setitem(evaluations.evaluations, "counted", evaluate)
    return calls


def test_evaluations_are_written_into_the_record_once(tmp_path, counted):
    task, place = Task(small(), ("counted",)), Place(tmp_path, Execution(device="cpu"))
    for _ in range(2):
        assert attempt(task, place, Watcher()) == ("done", "")
    assert counted == [task.config.name]
    assert Run.of(task.config, tmp_path).record()["evaluations"] == {"counted": {"value": 5.0}}


def evaluated(config, *before):
    return Task(config, ("unheard",), frozenset(task.name for task in before))


def test_evaluations_begin_once_the_runs_that_they_need_are_at_their_end(tmp_path):
    first, other, last = Task(small()), Task(small(seed=1)), Task(small(seed=2))
    # Nobody knows the evaluation, so that it fails, which takes nothing else with it.
    asked = evaluated(first.config, first, other)
    outcomes, finished, log = carried_out([first, other, asked, last], tmp_path, jobs=1)
    assert finished
    assert outcomes == {task.name: "done" for task in (first, other, last)} | {asked.label: "failed"}
    begun = [line.partition(": begins")[0] for line in log.splitlines() if ": begins" in line]
    assert begun == [first.name, other.name, asked.label, last.name]
    (tmp_path / "again").mkdir()
    outcomes, _, log = carried_out([asked, last, first, other], tmp_path / "again", jobs=1)
    begun = [line.partition(": begins")[0] for line in log.splitlines() if ": begins" in line]
    assert begun == [last.name, first.name, other.name, asked.label]


def test_networks_that_came_to_nothing_are_not_evaluated(tmp_path):
    lost = Task(small(lr=1e30, steps=5))
    asked, other = evaluated(lost.config, lost), Task(small())
    outcomes, finished, log = carried_out([lost, asked, other], tmp_path, jobs=1)
    assert finished
    assert outcomes == {lost.name: "diverged", other.name: "done"}
    assert "done, 2 of 2" in log


def test_a_worker_is_hired_again_for_what_had_to_wait(tmp_path):
    """Of two, one has nothing to do until the other ends, and then there is work for both."""
    first = Task(small())
    asked = [evaluated(first.config, first), evaluated(small(seed=1), first)]
    outcomes, finished, log = carried_out([first, *asked], tmp_path, jobs=2)
    assert finished
    assert outcomes.keys() == {first.label, *(task.label for task in asked)}
    last_begins = max(log.index(f"{task.label}: begins") for task in asked)
    assert last_begins < log.index("unknown evaluation")


def test_an_evaluation_that_nobody_knows_is_an_error(tmp_path):
    task = dataclasses.replace(Task(small()), evaluations=("unheard",))
    outcome, problem = attempt(task, Place(tmp_path, Execution(device="cpu")), Watcher())
    assert outcome == "failed"
    assert "unheard" in problem


def test_nothing_is_lost_if_nobody_listens_any_more(tmp_path):
    class Gone:
        def send(self, message):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        attempt(Task(small()), Place(tmp_path, Execution(device="cpu")), Teller(Gone()))
