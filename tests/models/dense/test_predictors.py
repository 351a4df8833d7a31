"""The mask head: batches that are filled up must give the masks and gradients of those that are not."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from interlayer.models.dense import predictors
from interlayer.models.dense.predictors import MaskHead, MaskPredictor


@pytest.mark.parametrize("count", [0, 1, predictors.GROUP, predictors.GROUP + 1])
def test_batches_filled_up_give_the_same_masks_and_gradients(count, monkeypatch):
    torch.manual_seed(0)
    head = nn.Sequential(MaskHead(16), MaskPredictor(2)).double()
    x = torch.randn(count, 16, 3, 3, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    sizes = []
    head[0][0].register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    found = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(predictors, "FILLED_DEVICES", devices)
        leaf = x.clone().requires_grad_()
        masks = head(leaf)
        assert masks.shape == (count, 3, 6, 6)
        grads = torch.autograd.grad(masks.square().sum(), [leaf, *head.parameters()])
        found.append([masks, *grads])
    assert sizes == [count, -(-count // predictors.GROUP) * predictors.GROUP]
    for filled, plain in zip(*found, strict=True):
        torch.testing.assert_close(filled, plain)


def test_a_few_sizes_of_batches_reach_the_convolutions(monkeypatch):
    """cuDNN prepares a convolution anew for every size, and the number of masks is another one in every step."""
    monkeypatch.setattr(predictors, "FILLED_DEVICES", ("cpu",))
    head, sizes = MaskHead(4), set()
    head[0].register_forward_pre_hook(lambda module, args: sizes.add(len(args[0])))
    with torch.no_grad():
        for count in range(1, 3 * predictors.GROUP, 13):
            assert len(head(torch.zeros(count, 4, 2, 2))) == count
    assert sizes == {predictors.GROUP, 2 * predictors.GROUP, 3 * predictors.GROUP}


def test_a_counter_of_operations_sees_the_masks_alone(monkeypatch):
    """The FLOPs of a network must not depend on the device."""
    head, counts = MaskHead(4), []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(predictors, "FILLED_DEVICES", devices)
        with FlopCounterMode(display=False) as counter:
            head(torch.zeros(3, 4, 2, 2))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
