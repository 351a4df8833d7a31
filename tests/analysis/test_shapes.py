"""Tests of running operators on the meta device once for each layout of their arguments."""

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import interlayer  # noqa: F401
from interlayer.analysis.cost import count_flops_both_ways
from interlayer.analysis.shapes import RememberedShapes


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def layout(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_meta


def test_repeated_results_have_the_layout_of_the_operator_and_are_new_tensors():
    """A wrong stride or dtype would raise in a later view, or change what is counted."""
    operators = [
        lambda: meta(2, 3, 4).transpose(0, 1) + meta(3, 1, 4),
        lambda: meta(2, 3, dtype=torch.int32) * 2,
        lambda: meta(2, 3, dtype=torch.int32) * 2.0,  # equal to 2, with another dtype
        lambda: meta(2, 3, dtype=torch.int32) * True,
        lambda: meta(2, 3, dtype=torch.int64) * 2,
        lambda: torch.native_layer_norm(meta(2, 3), (3,), meta(3), meta(3), 1e-5)[1],
        lambda: torch.cat([meta(2, 3), meta(2, 4)], dim=1),
        lambda: torch.cat([meta(2, 3), meta(4, 3)], dim=0),
        lambda: nn.functional.batch_norm(meta(2, 4, 4, 3).permute(0, 3, 1, 2), meta(3), meta(3)),  # channels_last
        lambda: meta(6, 4)[2:].relu(),
        lambda: meta(4, 6).sum(dim=1, keepdim=True),
    ]  # fmt: skip
    expected = [layout(operator()) for operator in operators]
    with RememberedShapes() as shapes:
        assert [layout(operator()) for operator in operators] == expected
        known = len(shapes.memory)
        again = [operator() for operator in operators]
        assert len(shapes.memory) == known, "the second time, nothing runs"
    assert [layout(result) for result in again] == expected
    assert known >= len(operators)


def test_operators_in_place_return_their_argument_and_views_share_storage():
    with RememberedShapes():
        for _ in range(2):
            x = meta(2, 3)
            assert x.add_(1) is x
            assert nn.init.trunc_normal_(x) is x
            view = x.view(3, 2)
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert layout(x.t_())[:2] == ((3, 2), (1, 3)), "an operator that changes the layout in place always runs"


def test_operators_on_other_devices_compute_values():
    with RememberedShapes() as shapes:
        for number in range(3):
            assert (torch.full((2,), float(number)) + 1).tolist() == [number + 1.0] * 2
            assert torch.arange(2, device="cpu").tolist() == [0, 1]
    assert not shapes.memory


def test_an_error_is_raised_every_time():
    with RememberedShapes():
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"must match the size|broadcast|mismatch"):
                meta(2, 3) + meta(2, 4)


@pytest.mark.parametrize("name", ["resnet50_mrla_base", "vit_tiny_patch16_224", "halo_h0", "lstm"])
def test_flops_are_those_of_torchs_counter(name):
    """Operators that did not run again are counted as often as they were called."""
    if name == "lstm":  # decomposed into matrix products by torch's counter
        with torch.device("meta"):
            model, images = nn.LSTM(8, 16, num_layers=3), meta(5, 2, 8)
    else:
        with torch.device("meta"):
            model = timm.create_model(name).eval()
        images = meta(1, 3, *model.pretrained_cfg["input_size"][1:])
    with torch.no_grad(), FlopCounterMode(display=False) as alone:
        model(images)
    memory = {}
    for _ in range(2):
        with (
            torch.no_grad(),
            FlopCounterMode(display=False) as counter,
            RememberedShapes(memory, counter.get_total_flops) as shapes,
        ):
            model(images)
        assert counter.get_total_flops() + shapes.repeated == alone.get_total_flops() > 0
    assert counter.get_total_flops() == 0, "the second time, every product is remembered"


def test_a_network_built_from_memory_has_the_same_weights_and_flops():
    memory, found = {}, []
    for _ in range(2):
        with torch.device("meta"), RememberedShapes(memory):
            model = timm.create_model("resnet18_mrla_light")
        layouts = {name: layout(tensor) for name, tensor in model.state_dict().items()}
        found.append((layouts, count_flops_both_ways(model, 64)))
    with torch.device("meta"):
        plain = timm.create_model("resnet18_mrla_light")
    assert found[0] == found[1]
    assert found[0][0] == {name: layout(tensor) for name, tensor in plain.state_dict().items()}
    assert found[0][1] == count_flops_both_ways(plain.to_empty(device="cpu"), 64)
