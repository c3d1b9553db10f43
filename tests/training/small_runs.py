"""Runs of a few steps, of the smallest network on few digits."""

import os
import signal

from dcnet.training import Execution, Run, Trainer, Watcher, recipe

ON_CPU = Execution(device="cpu")


def tiny(**changes):
    """Three steps an epoch, some ten milliseconds each."""
    small = {"train_images": 60, "batch_size": 20, "width": 0.1, "epochs": 2, "operator": "tanh-cos"}
    if "steps" in changes:
        del small["epochs"]
    return recipe("digits", **{**small, **changes})


def train(config, root, execution=ON_CPU, watcher=None, **given):
    run = Run.of(config, root)
    return run, Trainer(config, run, execution, watcher, **given).run()


class InterruptsAt(Watcher):
    """Presses Ctrl-C during a step."""

    def __init__(self, step):
        self.step = step

    def steps(self, done, loss, accuracy, images_per_second):
        if done == self.step:
            os.kill(os.getpid(), signal.SIGINT)


class Remembers(Watcher):
    def __init__(self):
        self.notes, self.points, self.looks = [], [], []

    def note(self, text):
        self.notes.append(text)

    def evaluated(self, point):
        self.points.append(point)

    def steps(self, done, loss, accuracy, images_per_second):
        self.looks.append((done, loss))
