"""The images that figures are drawn for."""

import pytest
import torch
from PIL import Image

from interlayer.experiments import ClassImages, load_network, load_run, sample_photographs, shown_images
from interlayer.training import TrainingError


@pytest.fixture(scope="module")
def loaded():
    return load_network("resnet10t", ["image_size=64"], device=torch.device("cpu"), untrained=True)


def test_a_network_without_weights_says_so_and_is_refused_where_figures_would_mean_nothing(loaded):
    assert loaded.title == "resnet10t, untrained"
    with pytest.raises(TrainingError, match="has no trained weights"):
        load_network("resnet10t")


def test_pictures_are_what_the_network_sees(loaded, tmp_path):
    """The inputs are the pictures, normalized: a heatmap drawn over a picture lies where the network looked."""
    Image.new("RGB", (80, 100), (255, 0, 10)).save(tmp_path / "red.png")
    shown = shown_images(loaded, [tmp_path / "red.png"])
    assert shown.names == [str(tmp_path / "red.png")]
    assert shown.pictures.dtype == torch.uint8
    assert shown.pictures.shape == shown.inputs.shape == (1, 3, 64, 64)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (loaded.transform.mean, loaded.transform.std))
    torch.testing.assert_close(shown.inputs[0], (shown.pictures[0] / 255 - mean) / std, atol=1e-5, rtol=0)


def test_a_file_that_is_no_image_is_named(loaded, tmp_path):
    (tmp_path / "notes.png").write_text("no image")
    with pytest.raises(TrainingError, match=r"notes.png cannot be used: .*give the file of a photograph"):
        shown_images(loaded, [tmp_path / "notes.png"])


def test_sample_photographs_come_with_the_dependencies(loaded):
    for name, load in sample_photographs().items():
        photograph = load()
        assert photograph.mode == "RGB", name
        assert min(photograph.size) > 200, name
    assert shown_images(loaded).names == [next(iter(sample_photographs()))]


def test_as_many_test_images_of_each_class_as_wanted(finished_run):
    """A mean over classes that are not equally frequent would be one of the frequent ones."""
    batches = ClassImages(load_run(finished_run), 3, batch_size=8)
    shown = list(batches)
    assert len(batches) == 30
    assert [len(batch) for batch in shown] == [8, 8, 8, 6]
    labels = [label for batch in shown for label in batch.labels]
    assert labels == [label for label in range(10) for _ in range(3)]
    names = [name for batch in shown for name in batch.names]
    assert len(set(names)) == 30
    assert shown[0].inputs.shape == shown[0].pictures.shape == (8, 3, 8, 8)
