"""Graphs of cuDNN computed by torch, so that their choice and their results can be tested without a GPU."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F

from dcnet.kernels import cudnn_graphs, epilogues
from dcnet.norms import HALF_PRECISIONS


class TorchGraphs:
    """Plans by name with their times in microseconds; separate passes take 100. The plan "wrong" computes nonsense."""

    def __init__(self, **times):
        self.times, self.built, self.called, self.measured = times, [], [], 0

    def plans_of(self, form):
        return list(self.times)

    def build(self, form, plan):
        if plan not in self.times or plan == "unsupported":
            raise RuntimeError(f"no plan {plan}")
        self.built.append((form.kind, plan))
        return lambda *tensors: self.run(form, plan, *tensors)

    def run(self, form, plan, *tensors):
        self.called.append((form.kind, plan))
        assert [tuple(tensor.shape) for tensor in tensors] == [tuple(size) for size in form.sizes]
        *given, result = tensors
        assert result.is_contiguous(memory_format=torch.channels_last)
        result.copy_(computed(form, *(tensor.float() for tensor in given)) * (-1 if plan == "wrong" else 1))

    def replay_us(self, run):
        self.measured += 1
        before = len(self.called)
        run()
        return self.times[self.called[before][1]] if len(self.called) > before else 100.0

    @contextlib.contextmanager
    def installed(self, benchmark=True, deterministic=False, in_eager_mode=True):
        """Installs these graphs in the place of cuDNN's; eager mode uses them, too, since a CPU captures nothing."""
        package = SimpleNamespace(__version__="1", backend_version=lambda: 1)
        replaced = {"plans_of": self.plans_of, "build": self.build, "frontend": lambda: package}
        replaced["available"] = lambda x: x.dtype in HALF_PRECISIONS
        with (
            mock.patch.multiple(cudnn_graphs, **replaced),
            mock.patch.object(epilogues, "replay_us", self.replay_us),
            mock.patch.object(epilogues.Epilogue, "in_eager_mode", in_eager_mode),
            mock.patch("torch.cuda.get_device_name", return_value="a GPU"),
            mock.patch("dcnet.kernels.convolution._compiled", {}),
            torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, deterministic=deterministic),
        ):
            yield self


def computed(form, *given):
    """What the graph computes, in float32."""
    window = form.window
    sizes = {"stride": window.stride, "padding": window.padding, "dilation": window.dilation}
    if form.kind == "added":
        dz, w, x, factor = given
        return torch.nn.grad.conv2d_input(x.shape, w, dz, **sizes) + x * factor
    x, w, factor, *rest = given
    product = F.conv2d(x, w, **sizes) * factor
    return product if form.kind == "multiplied" else product * torch.tanh(rest[0] * rest[1])
