"""Compiles every kernel that a fused convolution launches, for a GPU that is not installed.

Run it as a script without TRITON_INTERPRET: `python compile_offline.py OPERATOR ...` prints one line per kernel.
"""

import argparse
import importlib
import pkgutil

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import dcnet
from dcnet import device_functions as device
from dcnet import kernels
from dcnet.kernels import dispatch
from dcnet.kernels.convolution import Call
from dcnet.kernels.epilogues import factor_launch
from dcnet.kernels.passes import BATCH_MEAN
from dcnet.kernels.unit_rows import unit_rows
from dcnet.losses import fused_head

compile_and_launch = JITFunction.run


class AbsentGpu:
    """The part of a driver that Triton needs before a launch."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class NeverLaunched:
    """Replaces a compiled kernel, which would have to be loaded before a launch."""

    function = packed_metadata = None

    def run(self, *args):
        pass


def compile_only(self, *args, grid, warmup, **kwargs):
    """Compiles a kernel as Triton does, with the variant for these arguments, without a launch."""
    compiled = compile_and_launch(self, *args, grid=grid, warmup=True, **kwargs)
    assert len(compiled.asm["cubin"]) > 0
    print(f"{self.fn.__name__} {compiled.metadata.shared} bytes shared", flush=True)
    return NeverLaunched()


def pretend_multiprocessors(count):
    """Makes all modules of the kernels use the number of multiprocessors of a GPU."""
    for info in pkgutil.iter_modules(kernels.__path__, "dcnet.kernels."):
        module = importlib.import_module(info.name)
        if hasattr(module, "multiprocessors"):
            module.multiprocessors = lambda device: count


def compile_layer(operator, dtype, bias):
    # 3 * 16 filters, so that a tile has three chunks.
    layer = dcnet.DecoupledConv2d(8, 48, 3, padding=1, operator=operator, bias=bias).to(dtype)
    x = torch.randn(2, 8, 56, 56, dtype=dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    out = dispatch.conv2d(x, layer.weight, layer.bias, 1, 1, 1, 1, layer.options())
    torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))


def compile_linear(operator, bias):
    """The passes of a linear layer."""
    layer = dcnet.DecoupledLinear(128, 256, operator=operator, bias=bias).to(torch.bfloat16)
    x = torch.randn(1, 1, 2048, 128, dtype=torch.bfloat16).permute(0, 3, 1, 2).requires_grad_()
    out = dispatch.conv2d(x, layer.weight[:, :, None, None], layer.bias, 1, 0, 1, 1, layer.options())
    torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))


def compile_depthwise(operator, dtype, kernel, layout):
    """A depthwise layer; a wide window has its gradients in two launches."""
    layer = dcnet.DecoupledConv2d(48, 48, kernel, padding=1, groups=48, operator=operator).to(dtype)
    x = torch.randn(2, 48, 14, 14, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
    out = dispatch.conv2d(x, layer.weight, layer.bias, 1, 1, 1, 48, layer.options())
    torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))


def compile_block(operator, residual, activation):
    """A block, with and without a residual, whose squares are given and handed on."""
    layer = dcnet.DecoupledConv2d(48, 48, 3, padding=1, operator=operator, bias=residual).to(torch.bfloat16)
    x = torch.randn(2, 48, 56, 56, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last).requires_grad_()
    cancels = dcnet.Operator.parse(operator).norm_cancels
    squares = None if cancels else x.detach().float().square().sum(1).requires_grad_()
    added = torch.randn_like(x).requires_grad_() if residual else None
    modules = (layer, torch.nn.BatchNorm2d(48), activation)
    output, onward, again = kernels.block(x, squares, *modules, added, True)
    wanted = [x, *(() if squares is None else (squares,)), *torch.nn.ModuleList(modules).parameters()]
    torch.autograd.grad([output, onward, again], wanted, [torch.ones_like(y) for y in (output, onward, again)])


def compile_factors(operator, tanh):
    """The kernel before a convolution whose epilogue computes the output."""
    x, w = torch.randn(2, 8, 56, 56, dtype=torch.bfloat16), torch.randn(48, 8, 3, 3)
    learned = [slot.initial(48) for slot in dcnet.Operator.parse(operator).learned.values()]
    window = ((1, 1), (1, 1), (1, 1), 1, BATCH_MEAN)
    fused = Call(x, w, None, learned, torch.ones(()), torch.zeros((), dtype=torch.int64), operator, 1e-4, *window)
    given = [torch.empty(8) for _ in range(8)]
    given[3:5] = fused.running, fused.tracked
    factor_launch(fused.convolution(in_place=True).passes, tanh)(*given, stream=None, aligned=True)


def compile_head(margin, dtype, **options):
    """The passes of a margin head, forward and backward."""
    head = dcnet.losses.MarginSoftmax(512, 10_000, margin, **options).to(dtype)
    x, labels = torch.randn(128, 512, dtype=dtype).requires_grad_(), torch.zeros(128, dtype=torch.int64)
    loss = fused_head.fused_loss(head, x, labels)
    torch.autograd.grad(loss, [x, *head.parameters()], torch.ones_like(loss))


def compile_unit_rows(dtype, size, result):
    """Queries and keys of norm 1, and their gradients, or rows of any other tensor."""
    x = torch.randn(8, 197, 3, 6, size, dtype=dtype).requires_grad_()
    units = unit_rows([x[:, :, i].transpose(1, 2) for i in range(2)], 1e-4, result)
    torch.autograd.grad(units, x, [torch.ones_like(unit) for unit in units])


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="+")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU: 80 for an A100, 90 for an H100")
    parser.add_argument("--half-only", action="store_true", help="in bfloat16 without a bias, not in float32 with one")
    return parser.parse_args()


if __name__ == "__main__":
    assert not device.INTERPRETED
    given = arguments()
    driver.set_active(AbsentGpu(given.capability))
    JITFunction.run = compile_only
    pretend_multiprocessors(132)
    compile_factors("tanh-cos", True)
    compile_factors("seg(radius=Radius(per_channel=False))-cos", False)
    compile_block("linear-cos", True, torch.nn.ReLU())
    for activation in (torch.nn.ReLU6(), torch.nn.SiLU(), torch.nn.Hardswish()):
        compile_block("tanh-cos", False, activation)
    compile_depthwise("tanh-cos", torch.bfloat16, 5, torch.channels_last)
    compile_head("a-softmax", torch.float32)
    compile_head("a-softmax(m=2.5)", torch.bfloat16, annealing="auto", label_smoothing=0.1, reduction="none")
    for margin in ("m-softmax", "am-softmax", "arcface", "combined", "sphereface-r", "sphereface-r(detach=False)"):
        compile_head(margin, torch.float32, scale="learned", interclass_filtering_threshold=0.5)
    for size in (64, 100, 384, 8192):
        compile_unit_rows(torch.bfloat16, size, torch.bfloat16)
    compile_unit_rows(torch.float32, 1025, torch.float16)
    for operator in given.operators:
        print(operator, flush=True)
        compile_layer(operator, torch.bfloat16, bias=False)
        compile_linear(operator, bias=not given.half_only)
        if not dcnet.Operator.parse(operator).norm_cancels:
            compile_block(operator, True, torch.nn.ReLU())
            compile_depthwise(operator, torch.bfloat16, 3, torch.channels_last)
        if not given.half_only:
            compile_layer(operator, torch.float32, bias=True)
            if not dcnet.Operator.parse(operator).norm_cancels:
                compile_block(operator, False, torch.nn.PReLU(48))
                compile_depthwise(operator, torch.float32, 3, torch.contiguous_format)
