"""Batched augmentation on the device has the same results and distributions as augmenting single images."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing

from interlayer.tasks import make_task
from interlayer.training.data.augmentation import BatchTransform, crop_and_flip, erase, mix
from interlayer.training.recipe import Recipe


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def classification(classes, smoothing=0.0):
    return make_task({"label_smoothing": smoothing}, [str(i) for i in range(classes)])


def numbered(count=64, size=6):
    """Images in which all pixels differ, so that a shift can be detected."""
    return torch.arange(1, count * 3 * size * size + 1, dtype=torch.float32).view(count, 3, size, size)


def test_crops_are_windows_of_the_padded_image_and_flips_mirror_them():
    images = numbered()
    out = crop_and_flip(images, 2, 0.5, generator())
    padded = F.pad(images, (2, 2, 2, 2))
    seen = set()
    for image, result in zip(padded, out, strict=True):
        found = [
            (y, x, mirrored)
            for y in range(5)
            for x in range(5)
            for mirrored in (False, True)
            if torch.equal(
                image[:, y : y + 6, x : x + 6].flip(-1) if mirrored else image[:, y : y + 6, x : x + 6], result
            )
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len({y for y, _, _ in seen}) == len({x for _, x, _ in seen}) == 5
    assert {mirrored for _, _, mirrored in seen} == {False, True}


def test_nothing_asked_is_nothing_done():
    images = numbered()
    assert crop_and_flip(images, 0, 0.0, generator()) is images
    assert erase(images, 0.0, "pixel", generator()) is images
    assert torch.equal(crop_and_flip(images, 0, 1.0, generator()), images.flip(-1))


def test_the_draws_are_the_generators():
    images = numbered().byte()
    once, again = (crop_and_flip(images, 2, 0.5, generator(3)) for _ in range(2))
    assert torch.equal(once, again)
    assert not torch.equal(once, crop_and_flip(images, 2, 0.5, generator(4)))


def erased_boxes(images):
    """Returns the area and the aspect ratio of the erased (zero) box of each image that has one."""
    boxes = []
    for image in images:
        rows, columns = (image[0] == 0).nonzero(as_tuple=True)
        if len(rows):
            height, width = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
            assert height * width == len(rows), "an erased region must be one whole box"
            boxes.append((height * width, height / width))
    return np.array(boxes)


def test_erasing_has_timms_distribution():
    images = torch.ones(12000, 1, 32, 32)
    ours = erased_boxes(erase(images, 0.6, "const", generator()))
    np.random.seed(0)
    import random

    random.seed(0)
    theirs = erased_boxes(RandomErasing(0.6, mode="const", device="cpu")(images.clone()))
    assert len(ours) == pytest.approx(len(theirs), rel=0.06)
    for quantile in (0.1, 0.5, 0.9):
        assert np.quantile(ours[:, 0], quantile) == pytest.approx(np.quantile(theirs[:, 0], quantile), rel=0.08)
        assert np.quantile(ours[:, 1], quantile) == pytest.approx(np.quantile(theirs[:, 1], quantile), rel=0.12)


def test_pixel_erasing_fills_with_noise_and_leaves_the_rest():
    images = torch.full((200, 3, 16, 16), 7.0)
    out = erase(images, 1.0, "pixel", generator())
    changed = out != images
    assert changed.any(dim=(1, 2, 3)).float().mean() > 0.95
    noise = out[changed]
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.05


def test_targets_are_smoothed_as_torch_smooths():
    logits, labels = torch.randn(9, 5), torch.randint(0, 5, (9,))
    soft = torch.sum(-classification(5, 0.1).mixable(labels) * logits.log_softmax(1), dim=1).mean()
    torch.testing.assert_close(soft, F.cross_entropy(logits, labels, label_smoothing=0.1))


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.2, 0.0), (0.8, 1.0), (0.0, 3.0)])
def test_mixing_has_timms_distribution(mixup, cutmix):
    """Each image is constant, so that the mean of a mixed image gives the weight of its partner, as does its target."""
    recipe = Recipe(mixup=mixup, cutmix=cutmix, mix_probability=0.7)
    count, size = 4, 24
    images = torch.zeros(count, 1, size, size)
    images[:2] = 1.0  # partners are count - 1 - i: ones with zeros
    labels = torch.tensor([0, 0, 1, 1])
    ours, theirs = [], []
    source = generator()
    for _ in range(1500):
        mixed, targets = mix(images, classification(2).mixable(labels), recipe, source)
        assert targets[0, 0] == pytest.approx(float(mixed[0].mean()), abs=1e-5), "the target is the share of pixels"
        ours.append(float(targets[0, 0]))
    np.random.seed(0)
    reference = Mixup(mixup, cutmix, prob=0.7, switch_prob=0.5, label_smoothing=0.0, num_classes=2)
    for _ in range(1500):
        _, targets = reference(images.clone(), labels)
        theirs.append(float(targets[0, 0]))
    for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert np.quantile(ours, quantile) == pytest.approx(np.quantile(theirs, quantile), abs=0.06)
    assert np.mean(np.array(ours) == 1) == pytest.approx(np.mean(np.array(theirs) == 1), abs=0.05)


def test_bytes_become_what_timm_feeds_a_network():
    from PIL import Image
    from timm.data import create_transform

    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    expected = create_transform(16, mean=mean, std=std, crop_pct=1.0)(Image.fromarray(pixels))
    transform = BatchTransform.of(Recipe(), classification(2), mean, std, torch.device("cpu"))
    torch.testing.assert_close(transform.normalize(torch.as_tensor(pixels).permute(2, 0, 1)[None])[0], expected)


def test_channels_last_is_kept_through_the_augmentation():
    recipe = Recipe(channels_last=True, erasing=0.5, mixup=0.8, cutmix=1.0)
    transform = BatchTransform.of(recipe, classification(2), [0.5] * 3, [0.5] * 3, torch.device("cpu"))
    images, targets = transform(
        torch.zeros(8, 3, 8, 8, dtype=torch.uint8), torch.zeros(8, dtype=torch.long), generator()
    )
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert targets.shape == (8, 2)
