"""Tests of the plot of class activation maps."""

from itertools import pairwise

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from interlayer.analysis import ActivationColumn, ClassActivation, plot_class_activation


def column(title="Grad-CAM", images=2, maps=None, classes=("cat", "a dog with a name that is too long for a caption")):
    maps = torch.rand(images, 16, 24) if maps is None else maps
    activation = ClassActivation(maps, "grad_cam", "layer4", (2, 3), [1, 0], [0.984, 0.0004])
    pictures = torch.randint(0, 256, (images, 3, 16, 24), dtype=torch.uint8)
    return ActivationColumn(title, pictures, activation, classes)


def test_rows_are_images_and_columns_are_maps():
    columns = [column(), column("Score-CAM", classes=None)]
    figure = plot_class_activation(columns, names=["first.jpg", "second.jpg"], title="all of it")
    *panels, bar = figure.axes
    assert len(panels) == 2 * 3
    assert [axes.get_title() for axes in panels[:3]] == ["image", "Grad-CAM", "Score-CAM"]
    assert [axes.get_xlabel() for axes in panels[0::3]] == ["first.jpg", "second.jpg"]
    assert panels[1].get_xlabel() == "a dog with a name tha… 98%"
    assert panels[4].get_xlabel() == "cat <0.1%"
    assert panels[2].get_xlabel() == "class 1 98%"
    photograph, heatmap = panels[5].images
    assert torch.equal(torch.as_tensor(photograph.get_array()), columns[1].pictures[1].permute(1, 2, 0))
    assert torch.equal(torch.as_tensor(heatmap.get_array()), columns[1].activation.maps[1])
    assert {(image.norm.vmin, image.norm.vmax, image.cmap.name) for axes in panels for image in axes.images[1:]} == {
        (0, 1, "turbo")
    }
    assert len(panels[0].images) == 1, "the photograph itself has no heatmap"
    assert bar.get_ylabel() == "activation for the class"


def test_a_map_of_zeros_is_named():
    figure = plot_class_activation([column(maps=torch.stack([torch.zeros(16, 24), torch.rand(16, 24)]))])
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes[:4]]
    assert texts == [[], ["zero everywhere"], [], []]


@pytest.mark.parametrize("count", [1, 12])
def test_no_labels_overlap(count):
    figure = plot_class_activation([column(f"vit_tiny_patch16_224\nblocks.{index}.norm1") for index in range(count)])
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    titles = [axes.title.get_window_extent(renderer) for axes in figure.axes[: count + 1]]
    assert not any(one.overlaps(other) for one, other in pairwise(titles))
    labels = [axes.xaxis.label.get_window_extent(renderer) for axes in figure.axes[: count + 1]]
    assert not any(one.overlaps(other) for one, other in pairwise(labels))
    below = [axes.get_window_extent(renderer) for axes in figure.axes[count + 1 : 2 * (count + 1)]]
    assert not any(one.overlaps(other) for one, other in zip(labels, below, strict=True))


def test_bad_arguments():
    with pytest.raises(ValueError, match="no class activation maps"):
        plot_class_activation([])
    with pytest.raises(ValueError, match="a name for each of 2 images, got 1"):
        plot_class_activation([column()], names=["one"])
    with pytest.raises(ValueError, match="maps of 2 images in each column, see 'other'"):
        plot_class_activation([column(), column("other", images=1)])
