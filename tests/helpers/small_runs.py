"""Runs of a few steps of the smallest network on a few digits."""

import os
import signal

import torch
from torch import nn

from dcnet.training import Callback, Execution, Run, Trainer, recipe

ON_CPU = Execution(device="cpu")


def tiny(**changes):
    """A config with three steps per epoch, about ten milliseconds each."""
    small = {"train_images": 60, "batch_size": 20, "width": 0.1, "epochs": 2, "operator": "tanh-cos"}
    if "steps" in changes:
        del small["epochs"]
    return recipe("digits", **{**small, **changes})


def train(config, root, execution=ON_CPU, callback=None, **given):
    run = Run.of(config, root)
    return run, Trainer(config, run, execution, callback, **given).run()


def weights(run):
    return run.model_file.read_bytes()


class InterruptsAt(Callback):
    """Sends SIGINT during a step."""

    def __init__(self, step):
        self.step = step

    def on_step(self, done, loss, accuracy, images_per_second):
        if done == self.step:
            os.kill(os.getpid(), signal.SIGINT)


class Remembers(Callback):
    def __init__(self):
        self.notes, self.points, self.looks = [], [], []

    def on_message(self, text):
        self.notes.append(text)

    def on_evaluation(self, point):
        self.points.append(point)

    def on_step(self, done, loss, accuracy, images_per_second):
        self.looks.append((done, loss))


class Noisy(nn.Module):
    """A network with dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))

    def forward(self, input):
        return self.layers(input)
