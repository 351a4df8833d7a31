"""Tests that a block with a recurrent state computes its last norm like the module of the norm."""

import copy

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from interlayer import backend
from interlayer.hosts.finding import components
from interlayer.hosts.finding.components import _end_of_block, norm_unsupported_reason

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(norm_layer=nn.BatchNorm2d):
    norm = norm_layer(37).to(DEVICE)
    with torch.no_grad():
        norm.weight.normal_(1, 0.3)
        norm.bias.normal_()
    x, shortcut = (torch.randn(2, 37, 5, 3, device=DEVICE) for _ in range(2))
    maps = (t.contiguous(memory_format=torch.channels_last) for t in (3 + 2 * x, shortcut))
    return *maps, norm, torch.randn(5, 37, 1, 1, device=DEVICE) / 6


def by_modules(x, norm, weight, shortcut, *, relu):
    y = norm(x)
    output = y if shortcut is None else y + shortcut
    return output.relu() if relu else output, nn.functional.conv2d(y, weight)


def run(function, x, shortcut, norm, weight, relu):
    """Outputs, gradients of every input and parameter, and buffers, among them the number of batches."""
    norm = copy.deepcopy(norm)
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, weight, shortcut)]
    outputs = function(leaves[0], norm, leaves[1], leaves[2], relu=relu)
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(outputs, [torch.randn(t.shape, generator=generator).to(t) for t in outputs])
    return [*outputs, *(t.grad for t in (*leaves, *norm.parameters())), *norm.buffers()]


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("name", ["auto", "reference", "recompute", "scaled", "triton"])
@pytest.mark.parametrize("norm_layer", [nn.BatchNorm2d, lambda c: BatchNormAct2d(c, apply_act=False)])
def test_it_is_what_the_modules_compute(norm_layer, name, relu):
    """The last norm of MobileNetV2 is timm's class without an activation."""
    arguments = make(norm_layer)
    assert norm_unsupported_reason(arguments[2]) is None
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # on a GPU, modules would convolve in TF32
        expected = run(by_modules, *arguments, relu)
        with backend(name):
            found = run(_end_of_block, *arguments, relu)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def hooked():
    norm = nn.BatchNorm2d(37)
    norm.register_forward_hook(lambda *_: None)
    return norm


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (BatchNormAct2d(37), "the norm has an activation"),
        (nn.GroupNorm(1, 37), "the norm must be a BatchNorm2d, got GroupNorm"),
        (nn.SyncBatchNorm(37), "the norm must be a BatchNorm2d, got SyncBatchNorm"),
        (nn.BatchNorm2d(37, affine=False), "the norm must have weights, running statistics and a fixed momentum"),
        (nn.BatchNorm2d(37, momentum=None), "the norm must have weights, running statistics and a fixed momentum"),
        (hooked(), "the norm has hooks"),
    ],
)
def test_norms_that_are_run_as_modules(norm, reason):
    assert reason in norm_unsupported_reason(norm)


def test_a_norm_in_eval_mode_is_run_as_a_module():
    """In eval mode the operation would save nothing, and its kernels need the statistics of the batch."""
    block = timm.create_model("resnet18").layer1[0].eval()
    x, weight = torch.randn(2, 64, 5, 5), torch.randn(4, 64, 1, 1)
    expected = block(x)
    called = []
    block.bn2.forward = lambda x, forward=block.bn2.forward: called.append(1) or forward(x)
    values = components.run_block(block, x, weight=weight)
    assert called == [1]
    torch.testing.assert_close(values.output, expected)
    components.run_block(block.train(), x, weight=weight)
    assert called == [1], "in training the operation computes the norm from its tensors"
