"""Tests of multiply-adds by the size of the image."""

import pytest
import timm

from interlayer.analysis import count_flops, flops_by_size, plot_flops_by_size


def test_added_multiply_adds_of_light_by_hand():
    """Of each block: the 3x3 depthwise convolution on every pixel of the map, and two Conv1d over the channels."""
    (curve,) = flops_by_size(["resnet18_mrla_light"], [64, 32, 96, 64])
    assert curve.sizes == (32, 64, 96)
    assert curve.backbone == "resnet18"
    widths, kernels = (64, 128, 256, 512), (3, 5, 5, 5)
    for size, added in zip(curve.sizes, curve.added, strict=True):
        maps = [(size // reduction) ** 2 for reduction in (4, 8, 16, 32)]
        convolutions = sum(2 * 9 * pixels * width for pixels, width in zip(maps, widths, strict=True))
        projections = sum(2 * 2 * kernel * width for kernel, width in zip(kernels, widths, strict=True))
        assert added == convolutions + projections
    assert curve.line.r_squared == pytest.approx(1, abs=1e-9), "linear in the number of pixels"
    assert curve.line.intercept == pytest.approx(projections)


def test_counts_are_those_of_count_flops_in_both_conventions():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64)
    for convention in ("torch", "paper"):
        (curve,) = flops_by_size(["vit_tiny_patch16_224"], [64], convention=convention)
        assert curve.flops == (count_flops(model, 64, convention=convention),)
        assert (curve.plain, curve.added, curve.line) == (None, None, None)


def test_sizes_that_a_network_does_not_accept_are_left_out_with_the_reason():
    told = []
    (curve,) = flops_by_size(["mixer_s32_224+cb"], [64, 16, 96], progress=told.append)
    assert curve.sizes == (64, 96)
    assert "Kernel size can't be greater than actual input size" in curve.refused[16]
    assert len(told) == 6, "three sizes of the network and of its backbone"
    with pytest.raises(ValueError, match=r"mixer_s32_224 takes images of none of the sizes 8, 16: .*Kernel size"):
        flops_by_size(["mixer_s32_224"], [8, 16])


def test_wrong_arguments_are_an_error():
    with pytest.raises(ValueError, match="unknown model 'resnet19'"):
        flops_by_size(["resnet19"], [64])
    with pytest.raises(ValueError, match="expected sizes of images"):
        flops_by_size(["resnet18"], [])
    with pytest.raises(ValueError, match="expected sizes of images such as 128,224,384, got 0, 64"):
        flops_by_size(["resnet18"], [64, 0])


def test_the_figure_shows_totals_backbones_once_and_what_is_added():
    curves = flops_by_size(["resnet18+mrla_light", "resnet18+mrla_base"], [32, 64, 96])
    figure = plot_flops_by_size(curves)
    total, added = figure.axes
    assert [line.get_label() for line in total.lines] == ["resnet18+mrla_light", "resnet18", "resnet18+mrla_base"]
    assert list(added.lines[0].get_ydata()) == pytest.approx([value / 1e6 for value in curves[0].added])
    assert len(plot_flops_by_size(flops_by_size(["resnet18"], [32])).axes) == 1
    with pytest.raises(ValueError, match="no networks"):
        plot_flops_by_size([])
