"""Worker processes: all tasks are done, one failure does not stop the others, interrupted runs resume."""

import io
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
from helpers.fake_records import small
from helpers.processes import wait_until
from rich.console import Console

from dcnet.experiments.experiment import evaluations
from dcnet.experiments.pool import PipeCallback, Pool, ProgressBoard, WorkerSettings, run_task, spawn_worker
from dcnet.experiments.status import Task
from dcnet.training import Callback, Evaluation, Execution, Run

LONG = 100_000


def run_pool(tasks, root, jobs=2, board=ProgressBoard, spawn=spawn_worker):
    log = io.StringIO()
    settings = WorkerSettings(root, Execution(device="cpu"), threads=1)
    with board(Console(file=log, width=200), len(tasks)) as shown:
        pool = Pool(tasks, settings, jobs, shown, spawn)
        finished = pool.run()
    return pool.outcomes, finished, log.getvalue()


def run_alone(config, root):
    assert run_task(Task(config), WorkerSettings(root, Execution(device="cpu")), Callback()) == ("done", "")
    return Run.of(config, root)


# --- the logic of the pool, with threads instead of processes ---


class FakeProcess(threading.Thread):
    """A fake worker that answers tasks with a function: it returns outcome and problem, or None to exit silently."""

    pid = exitcode = None

    def __init__(self, answer, pipe):
        super().__init__(daemon=True)
        self.answer, self.pipe = answer, pipe

    def run(self):
        while (task := self.pipe.recv()) is not None:
            found = self.answer(task)
            if found is None:
                break
            self.pipe.send(("ended", *found))
        self.pipe.close()

    def kill(self):
        raise AssertionError("no worker hangs")


def fake_workers(answer):
    def spawn(settings):
        own, others = multiprocessing.Pipe()
        process = FakeProcess(answer, others)
        process.start()
        return process, own

    return spawn


def started(log):
    return [line.partition(": starts")[0] for line in log.splitlines() if ": starts" in line]


def evaluation(config, *before):
    return Task(config, ("unknown",), frozenset(task.name for task in before))


def test_evaluations_start_after_the_runs_that_they_need(tmp_path):
    first, other, last = Task(small()), Task(small(seed=1)), Task(small(seed=2))
    asked = evaluation(first.config, first, other)
    spawn = fake_workers(lambda task: ("failed", "a problem") if task.evaluations else ("done", ""))
    outcomes, finished, log = run_pool([first, other, asked, last], tmp_path, 1, spawn=spawn)
    assert finished
    assert outcomes == {task.name: "done" for task in (first, other, last)} | {asked.label: "failed"}
    assert started(log) == [first.name, other.name, asked.label, last.name]
    _, _, log = run_pool([asked, last, first, other], tmp_path, 1, spawn=spawn)
    assert started(log) == [last.name, first.name, other.name, asked.label]


def test_networks_that_diverged_are_not_evaluated(tmp_path):
    lost = Task(small(lr=1e30, steps=5))
    asked, other = evaluation(lost.config, lost), Task(small())
    spawn = fake_workers(lambda task: ("done", "") if task.config == other.config else ("diverged", "not finite"))
    outcomes, finished, log = run_pool([lost, asked, other], tmp_path, 1, spawn=spawn)
    assert finished
    assert outcomes[lost.name] == "diverged"
    assert asked.label not in outcomes
    assert "2 of 2" in log


def test_a_worker_starts_again_for_tasks_that_had_to_wait(tmp_path):
    """Of two workers, one has nothing to do until the other ends; then there is work for both."""
    first = Task(small())
    asked = [evaluation(first.config, first), evaluation(small(seed=1), first)]
    both = threading.Barrier(2, timeout=60)

    def answer(task):
        if task.evaluations:
            both.wait()
        return "done", ""

    outcomes, finished, log = run_pool([first, *asked], tmp_path, 2, spawn=fake_workers(answer))
    assert finished
    assert outcomes == {task.label: "done" for task in (first, *asked)}
    assert started(log)[0] == first.label


def test_if_a_worker_exits_only_its_task_fails(tmp_path):
    lost, other = Task(small()), Task(small(seed=1))
    spawn = fake_workers(lambda task: None if task.config == lost.config else ("done", ""))
    outcomes, finished, log = run_pool([lost, other], tmp_path, 1, spawn=spawn)
    assert finished
    assert outcomes == {lost.name: "failed", other.name: "done"}
    assert "its process died (exit code None); run the same command again to resume" in log


class InterruptsAtStart(ProgressBoard):
    def start(self, task):
        super().start(task)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("answer", "outcome"), [(("done", ""), "done"), (None, "failed")])
def test_after_an_interruption_no_task_starts(answer, outcome, tmp_path):
    tasks = [Task(small(seed=seed)) for seed in range(2)]
    spawn = fake_workers(lambda task: answer)
    outcomes, finished, log = run_pool(tasks, tmp_path, 1, InterruptsAtStart, spawn)
    assert not finished
    assert outcomes == {tasks[0].name: outcome}
    assert started(log) == [tasks[0].name]


# --- one task, in this process ---


def test_a_run_that_diverges_has_a_reason(tmp_path):
    settings = WorkerSettings(tmp_path, Execution(device="cpu"))
    outcome, problem = run_task(Task(small(lr=1e30, steps=5)), settings, Callback())
    assert outcome == "diverged"
    assert "is not finite" in problem


@pytest.fixture
def counted(monkeypatch):
    """An evaluation named "counted", and its calls."""
    calls = []

    def evaluate(model, record, runs, data_dir):
        assert not model.training
        calls.append(record.name)
        return {"value": 5.0}

    monkeypatch.setitem(evaluations, "counted", evaluate)
    return calls


def test_evaluations_are_stored_in_the_record_once(tmp_path, counted):
    task, settings = Task(small(), ("counted",)), WorkerSettings(tmp_path, Execution(device="cpu"))
    for _ in range(2):
        assert run_task(task, settings, Callback()) == ("done", "")
    assert counted == [task.config.name]
    assert Run.of(task.config, tmp_path).record().evaluations == {"counted": Evaluation(extra={"value": 5.0})}
    outcome, problem = run_task(Task(small(), ("unknown",)), settings, Callback())
    assert outcome == "failed"
    assert "unknown evaluation 'unknown'" in problem


def test_a_run_ends_with_its_evaluations(tmp_path, counted):
    task, settings = Task(small(), at_end=("counted",)), WorkerSettings(tmp_path, Execution(device="cpu"))
    assert task.label == task.name
    assert run_task(task, settings, Callback()) == ("done", "")
    assert counted == [task.config.name]
    assert Run.of(task.config, tmp_path).record().evaluations.keys() == {"counted"}


def test_a_broken_pipe_ends_the_worker(tmp_path):
    class Gone:
        def send(self, message):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_task(Task(small()), WorkerSettings(tmp_path, Execution(device="cpu")), PipeCallback(Gone()))


# --- with processes ---


def test_parallel_tasks_match_separate_runs_and_a_failure_is_one_sentence(tmp_path):
    good = [Task(small(seed=seed)) for seed in range(2)]
    bad = Task(small("conv", pretrained=str(tmp_path / "nowhere")))
    outcomes, finished, log = run_pool([bad, *good], tmp_path)
    assert finished
    assert outcomes == {bad.name: "failed"} | {task.name: "done" for task in good}
    assert log.count(": done, ") == 2
    assert ", 3 of 3" in log
    assert "nowhere" in log
    assert "Traceback" not in log
    for task in good:
        parallel = Run.of(task.config, tmp_path)
        assert parallel.model_file.read_bytes() == run_alone(task.config, tmp_path / "alone").model_file.read_bytes()


class PressesCtrlC(ProgressBoard):
    """Interrupts this process at the first steps."""

    def update(self, task, kind, *values):
        super().update(task, kind, *values)
        if kind == "steps" and not getattr(self, "pressed", False):
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_saves_the_run_and_starts_nothing_more(tmp_path):
    task, other = Task(small(steps=LONG)), Task(small())
    outcomes, finished, _ = run_pool([task, other], tmp_path, jobs=1, board=PressesCtrlC)
    assert not finished
    assert outcomes == {task.name: "interrupted"}
    run = Run.of(task.config, tmp_path)
    assert run.record().status == "interrupted"
    assert run.checkpoints.newest()[0].step == run.record().steps_done > 0
    assert not Run.of(other.config, tmp_path).exists


@pytest.mark.slow
def test_an_interrupted_run_resumes(tmp_path):
    config = small(steps=40)
    outcomes, _, _ = run_pool([Task(config)], tmp_path, jobs=1, board=PressesCtrlC)
    assert outcomes[Task(config).name] in ("interrupted", "done")
    assert run_pool([Task(config)], tmp_path)[0] == {Task(config).name: "done"}
    again = run_alone(config, tmp_path / "alone")
    assert Run.of(config, tmp_path).model_file.read_bytes() == again.model_file.read_bytes()


def workers():
    """The worker processes of this one."""
    pids = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return [pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class KillsAWorker(ProgressBoard):
    def update(self, task, kind, *values):
        super().update(task, kind, *values)
        if kind == "steps" and task.config.steps == LONG:
            os.kill(workers()[0], signal.SIGKILL)


@pytest.mark.slow
def test_if_a_worker_is_killed_only_its_task_fails(tmp_path):
    killed, other = Task(small(steps=LONG)), Task(small())
    outcomes, finished, log = run_pool([killed, other], tmp_path, jobs=1, board=KillsAWorker)
    assert finished
    assert outcomes == {killed.name: "failed", other.name: "done"}
    assert "its process died (exit code -9); run the same command again to resume" in log


class InterruptsAWorker(ProgressBoard):
    """Sends Ctrl-C to a worker that has just started, as a terminal does to all processes."""

    def start(self, task):
        super().start(task)
        os.kill(wait_until(workers)[0], signal.SIGINT)


@pytest.mark.slow
def test_workers_ignore_ctrl_c(tmp_path, capfd):
    """The pool stops them; while they import torch, Ctrl-C would end them with a traceback."""
    task = Task(small())
    outcomes, _, _ = run_pool([task], tmp_path, board=InterruptsAWorker)
    assert outcomes == {task.name: "done"}
    assert capfd.readouterr().err == ""
