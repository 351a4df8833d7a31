"""Transforms of images with boxes and masks, and batches of similar aspect ratio."""

import dataclasses
from itertools import islice

import numpy as np
import pytest
import torch
from annotated_files import WIDE, box_mask, coco_content, write_coco, write_image, write_png
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import masks_to_boxes
from torchvision.transforms import v2

from interlayer.tasks import make_task
from interlayer.tasks.overlaid_masks import masks_of
from interlayer.training import load_recipe
from interlayer.training.data.annotated import annotation_problems
from interlayer.training.data.aspect_ratio import AspectRatioSampler, grouped_order
from interlayer.training.data.coco import read_coco
from interlayer.training.data.images import Subset, Unusable
from interlayer.training.data.joint_transforms import HALONET_JITTER, JointTransform, LoadedSamples, OverlayMasks
from interlayer.training.data.mask_folders import IGNORED, LabelMaps, read_instances
from interlayer.training.keys import RecipeError


@pytest.fixture
def images(tmp_path):
    """One image with two objects whose masks are their boxes."""
    write_image(tmp_path / "images" / "a.png", WIDE)
    for name, box in {"0": [5, 6, 10, 8], "1": [20, 10, 20, 20]}.items():
        write_png(tmp_path / "masks" / "a" / f"{name}.png", box_mask(WIDE, box) * 255)
    return read_instances(tmp_path / "images", tmp_path / "masks", annotation_problems("fail"))


def load(images, seed=0, **options):
    pixels, target, index = LoadedSamples(images, JointTransform(**options).training())[seed, 0]
    assert index == 0
    assert type(pixels) is torch.Tensor
    if isinstance(target, dict) and "maps" in target:
        target["masks"] = masks_of(target["maps"], target["numbers"])
    return pixels, target


def assert_boxes_are_those_of_the_masks(target, pixels):
    boxes = masks_to_boxes(target["masks"]) + torch.tensor([0, 0, 1, 1])
    assert torch.allclose(boxes, target["boxes"].float(), atol=1.01)  # masks are resized to whole pixels
    assert target["masks"].shape[1:] == pixels.shape[1:]


def test_the_defaults_are_short_side_800_and_long_side_1333(images):
    pixels, target = load(images, flip=0)
    assert pixels.shape == (3, 800, 1066)
    scale = torch.tensor([1066 / 40, 800 / 30] * 2)
    assert torch.allclose(target["boxes"], torch.tensor([[5, 6, 15, 14], [20, 10, 40, 30.0]]) * scale)
    assert load(images, long_side=1000)[0].shape == (3, 750, 1000)


def test_multi_scale_jitter_draws_one_of_the_sizes(images):
    sides = {min(load(images, seed, short_sides=(48, 60), long_side=200)[0].shape[1:]) for seed in range(12)}
    assert sides == {48, 60}


@pytest.mark.parametrize(("flip", "vertical_flip"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_flips_move_boxes_and_masks_with_the_pixels(images, flip, vertical_flip):
    original, before = LoadedSamples(images, None)[0, 0][:2]
    pixels, target = load(images, short_sides=(30,), long_side=99, flip=flip, vertical_flip=vertical_flip)
    dims = [dim for dim, flipped in ((2, flip), (1, vertical_flip)) if flipped]
    assert (pixels == original.flip(dims)).all()
    assert (target["masks"] == before["masks"].flip(dims)).all()
    left, top, right, bottom = before["boxes"][0].tolist()
    left, right = (40 - right, 40 - left) if flip else (left, right)
    top, bottom = (30 - bottom, 30 - top) if vertical_flip else (top, bottom)
    assert target["boxes"][0].tolist() == [left, top, right, bottom]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "options",
    [
        {"short_sides": (20, 47, 61), "long_side": 99, "vertical_flip": 0.5},
        {"crop": 37, "scale_jitter": (0.4, 2.5)},
        {"crop": 25, "short_sides": (20, 47), "long_side": 90, "windows": True},
    ],
)
def test_masks_are_those_of_torchvision_which_transforms_each_of_them(tmp_path, options, seed):
    """They travel as maps of numbers, also where objects overlap."""
    write_image(tmp_path / "images" / "a.png", WIDE)
    for name, box in enumerate([[5, 6, 10, 8], [12, 10, 20, 20], [0, 0, 7, 7], [13, 11, 6, 9], [33, 23, 7, 7]]):
        write_png(tmp_path / "masks" / "a" / f"{name}.png", box_mask(WIDE, box) * 255)
    images = read_instances(tmp_path / "images", tmp_path / "masks", annotation_problems("fail"))
    pixels, target = load(images, seed, **options)
    overlay, *others = JointTransform(**options).training().transforms
    assert isinstance(overlay, OverlayMasks)
    theirs, expected, _ = LoadedSamples(images, v2.Compose(others))[seed, 0]
    assert torch.equal(pixels, theirs)
    assert torch.equal(target["masks"], expected["masks"].as_subclass(torch.Tensor))
    for key in ("boxes", "labels", "area", "iscrowd"):
        assert torch.equal(target[key], expected[key])


@pytest.mark.parametrize("seed", range(10))
def test_scale_jitter_crops_and_drops_lost_objects(images, seed):
    pixels, target = load(images, seed, crop=64, scale_jitter=(0.5, 3.0))
    assert pixels.shape == (3, 64, 64)
    count = len(target["boxes"])
    assert all(len(target[key]) == count for key in ("labels", "area", "iscrowd", "masks"))
    if count and target["masks"].flatten(1).any(1).all():
        assert_boxes_are_those_of_the_masks(target, pixels)


def test_some_crops_lose_objects(images):
    assert {len(load(images, seed, crop=64, scale_jitter=(3.0, 3.0))[1]["boxes"]) for seed in range(20)} != {2}


def test_the_jitter_of_halonet(images):
    assert HALONET_JITTER == (4 / 5, 5 / 4) == JointTransform().scale_jitter
    sizes = []
    for seed in range(30):
        torch.manual_seed(seed)
        image = v2.ScaleJitter((100, 100), scale_range=JointTransform().scale_jitter)(torch.zeros(3, 100, 100))
        sizes.append(image.shape[1])
    assert 80 <= min(sizes) < 90
    assert 115 < max(sizes) <= 125


def test_padding_of_label_maps_is_ignored(tmp_path):
    write_image(tmp_path / "images" / "a.png", WIDE)
    write_png(tmp_path / "masks" / "a.png", np.ones((30, 40)))
    maps = LabelMaps(tmp_path / "images", tmp_path / "masks", ["a", "b"], annotation_problems("fail"))
    pixels, target = load(maps, crop=64, scale_jitter=(0.5, 0.5), mask_fill=IGNORED)
    assert pixels.shape == (3, 64, 64)
    assert target.unique().tolist() == [1, IGNORED]
    assert (target == 1).sum() == 32 * 24
    assert (pixels[:, target == IGNORED] == 0).all()


def test_a_detector_does_not_resize_a_training_image_again(images):
    pixels, target = load(images, short_sides=(60,), long_side=100)
    resizes = GeneralizedRCNNTransform(800, 1333, [0.0] * 3, [1.0] * 3, size_divisible=1, _skip_resize=True).train()
    batch, targets = resizes([pixels.float()], [target])
    assert batch.tensors.shape[-2:] == pixels.shape[-2:]
    assert (targets[0]["boxes"] == target["boxes"]).all()


def test_samples_depend_on_their_seed_alone(images):
    first, second, third = (load(images, seed, crop=64)[0] for seed in (1, 1, 2))
    assert (first == second).all()
    assert first.shape == third.shape
    assert (first != third).any()


def test_evaluation_leaves_images_as_they_are(images):
    pixels, target, _ = LoadedSamples(Subset(images, [0]), None)[0, 0]
    assert pixels.shape == (3, 30, 40)
    assert target["boxes"][0].tolist() == [5, 6, 15, 14]
    assert LoadedSamples(images, None)[0, -1] is None


def test_an_image_that_cannot_be_used_is_named(tmp_path):
    images = read_coco(write_coco(tmp_path, coco_content()), tmp_path / "images", annotation_problems("fail"))
    write_image(tmp_path / "images" / "wide.png", (41, 30))
    (tmp_path / "images" / "tall.png").write_text("no image")
    found = [LoadedSamples(images, None)[0, index] for index in range(2)]
    assert all(isinstance(entry, Unusable) for entry in found)
    assert "wide.png" in found[0].name
    assert "41 x 30 pixels, but its annotations are of 40 x 30" in found[0].reason
    assert "cannot be read as an image" in found[1].reason


@pytest.mark.parametrize("options", [{"short_sides": ()}, {"short_sides": (1334,)}, {"scale_jitter": (2, 1)}])
def test_transforms_that_make_no_sense_are_refused(options):
    with pytest.raises(RecipeError, match="expected"):
        JointTransform(**options)


# Batches of similar aspect ratio


def test_batches_have_images_of_one_group():
    generator = torch.Generator().manual_seed(0)
    groups = torch.randint(0, 2, (103,), generator=generator)
    order = torch.randperm(103, generator=generator)
    grouped = grouped_order(order, groups, 8)
    assert sorted(grouped.tolist()) == list(range(103))
    batches = [groups[batch].unique().numel() for batch in grouped.split(8)]
    full = sum(int((groups == group).sum()) // 8 for group in (0, 1))
    assert batches[:full] == [1] * full
    assert len({int(groups[batch[0]]) for batch in grouped.split(8)[:full]}) == 2


def test_groups_smaller_than_a_batch():
    order = grouped_order(torch.tensor([2, 0, 1]), torch.tensor([0, 1, 0]), 8)
    assert order.tolist() == [2, 0, 1]


class Batches:
    def __init__(self, recipe, ranks, count):
        self.recipe, self.ranks = recipe, ranks
        self.steps = self.pass_steps = count // recipe.batch_size
        self.images_per_rank = recipe.batch_size // ranks.world_size


def test_the_sampler_is_deterministic_resumable_and_cut_into_ranks():
    from interlayer.training.data import Ranks
    from interlayer.training.recipe import Recipe

    ratios = torch.rand(50, generator=torch.Generator().manual_seed(0)) + 0.5
    recipe = Recipe(batch_size=4, seed=3)

    def keys(epoch, start=0, ranks=None):
        sampler = AspectRatioSampler(ratios, Batches(recipe, ranks or Ranks(), 50))
        sampler.begin = epoch, start
        return list(islice(sampler, sampler.steps - start))

    assert keys(1) == keys(1)
    assert keys(1) != keys(2)
    assert keys(1)[5:] == keys(1, start=5)
    halves = [keys(1, ranks=Ranks(rank, 2)) for rank in (0, 1)]
    assert [[*a, *b] for a, b in zip(*halves, strict=True)] == keys(1)
    wide = [{bool(ratios[index] >= 1) for _, index in batch} for batch in keys(1)]
    assert sum(len(kinds) > 1 for kinds in wide) <= 1


@pytest.mark.parametrize(("crop", "count"), [("none", 6), ("scaled", 321)])
def test_whole_images_have_few_sizes(crop, count):
    """Every size of a batch costs cuDNN seconds; windows of one size may be cut from images of any size."""
    recipe = load_recipe("finetune_detection", [f"crop={crop}", "image_size=400"], model="resnet18", data="x")
    sides = JointTransform.of(recipe, make_task(dataclasses.asdict(recipe), ["cell"])).short_sides
    assert (len(sides), min(sides), max(sides)) == (count, 480, 800)
