"""Tests that class activation maps lie where the class is, and that a network is left as it was."""

import sys

import numpy as np
import pytest
import timm
import torch
from cam_networks import PATCH, ColorNet, cell_of, color_vit, hooks_of, square_image
from torch import nn

import interlayer
from interlayer.analysis.class_activation import METHODS, class_activation
from interlayer.analysis.group_cam import blur, group_cam, group_masks
from interlayer.analysis.score_cam import score_cam

OF_PACKAGE = [name for name, method in METHODS.items() if method.package_class]
OF_CLASS = [name for name in METHODS if name != "eigen_cam"]  # the maps that depend on the class
PLACES = [(1, 10), (6, 2), (3, 5)]  # cells of the 8 x 12 grid: a transposed or flipped map lies elsewhere


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [ColorNet, color_vit], ids=["cnn", "vit"])
def test_every_method_finds_the_square_of_its_class(make, method):
    """If the map is transposed, flipped, shifted by the class token or inverted, it lies in another cell."""
    model = make()
    for color, place in enumerate(PLACES):
        found = class_activation(model, square_image(color, *place), method=method)
        assert found.targets == [color]
        assert found.probabilities[0] > 0.5
        assert found.maps.shape == (1, 64, 96)
        assert (float(found.maps.min()), float(found.maps.max())) == (0.0, 1.0)
        cell, part = cell_of(found.maps[0])
        assert cell == place
        assert part > 0.25, "most of the map lies in that cell and, by interpolation, beside it"


@pytest.mark.parametrize("method", OF_CLASS)
@pytest.mark.parametrize("make", [ColorNet, color_vit], ids=["cnn", "vit"])
def test_the_target_decides_which_of_two_squares_is_found(make, method):
    image = square_image(0, 1, 10) + square_image(2, 6, 2)
    both = class_activation(make(), image.repeat(2, 1, 1, 1), method=method, targets=[0, 2])
    assert [cell_of(heatmap)[0] for heatmap in both.maps] == [(1, 10), (6, 2)]
    one = class_activation(make(), image, method=method, targets=2)
    torch.testing.assert_close(one.maps[0], both.maps[1], atol=1e-4, rtol=0)  # images of a batch are independent


VARIANTS = {
    "registers": {"reg_tokens": 2},
    "average": {"global_pool": "avg", "reg_tokens": 4},
    "no class token": {"global_pool": "avg", "class_token": False},
    "distilled": {"name": "deit_tiny_distilled_patch16_224"},
    "any size": {"dynamic_img_size": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefix_tokens_are_dropped(variant):
    """With a wrong number of prefix tokens, every cell moves."""
    model = color_vit(**VARIANTS[variant])
    for color, place in enumerate(PLACES):
        assert cell_of(class_activation(model, square_image(color, *place)).maps[0])[0] == place


def test_a_vit_for_any_size_gets_the_grid_of_the_image():
    model = color_vit(dynamic_img_size=True)
    image = square_image(1, 9, 1, size=(96, 64))  # a grid of 12 x 8, where that of the patch embedding is 8 x 12
    found = class_activation(model, image)
    assert found.resolution == (12, 8)
    assert cell_of(found.maps[0])[0] == (9, 1)


@pytest.mark.parametrize("method", OF_PACKAGE)
def test_maps_equal_those_of_pytorch_grad_cam(method):
    """The layer's activations and gradients are what the package captures by itself, in spite of in-place layers."""
    import pytorch_grad_cam
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    model, images = timm.create_model("test_resnet", num_classes=7).eval(), torch.randn(2, 3, 64, 96)
    found = class_activation(model, images, method=method, targets=[1, 4])
    targets = [ClassifierOutputTarget(label) for label in (1, 4)]
    with getattr(pytorch_grad_cam, METHODS[method].package_class)(model, [model.layer4[-1]]) as package:
        expected = torch.as_tensor(package(images, targets))
    assert found.layer == "layer4.0"
    for ours, theirs in zip(found.maps, expected, strict=True):
        if METHODS[method].eigenvector:  # the sign of the package is arbitrary: where it is ours, the map is the same
            shared = np.corrcoef(ours.flatten(), theirs.flatten())[0, 1]
            assert shared > 0.999 or shared < 0
        else:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_score_cam_equals_that_of_pytorch_grad_cam():
    """At the size of the image, where nothing is interpolated, both compute the same; batches do not matter."""
    import pytorch_grad_cam
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    torch.manual_seed(1)
    layers = (nn.Conv2d(3, 7, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 4))
    model, image = nn.Sequential(*layers).eval(), torch.randn(1, 3, 12, 16)
    with torch.no_grad():
        layers[0].bias[3] = -100  # a channel that is zero everywhere
        layers[4].weight *= 20
    with pytorch_grad_cam.ScoreCAM(model, [model[1]]) as package:
        expected = package(image, [ClassifierOutputTarget(2)])
    for batch_size in (1, 3, 16):
        found = class_activation(model, image, method="score_cam", targets=2, layer="1", batch_size=batch_size)
        np.testing.assert_allclose(found.maps.numpy(), expected, atol=1e-4)


def test_score_cam_of_two_channels_by_hand():
    activations = torch.tensor([[[0.0, 2.0]], [[1.0, 1.0]], [[4.0, 0.0]]])  # the second has the mask zero
    image = torch.tensor([[[3.0, 5.0]]])
    weights = torch.tensor([5.0, 0.0, 3.0]).softmax(0)
    expected = weights[0] * activations[0] + weights[1] * activations[1] + weights[2] * activations[2]
    sizes = []

    def score(images):
        sizes.append(len(images))
        return images.sum((1, 2, 3))

    torch.testing.assert_close(score_cam(activations, image, score), expected)
    assert sorted(sizes) == [1, 2], "the black image is run once"
    of_two = torch.tensor([5.0, 3.0]).softmax(0)
    limited = of_two[0] * activations[0] + of_two[1] * activations[2]
    torch.testing.assert_close(score_cam(activations, image, score, channels=2), limited)


def test_group_cam_by_hand():
    """The equations of the module, computed in loops by NumPy for five channels in two groups."""
    generator = torch.Generator().manual_seed(3)
    activations = torch.rand(5, 4, 6, generator=generator)
    gradients = torch.randn(5, 4, 6, generator=generator)
    image = torch.rand(3, 4, 6, generator=generator)
    reading = torch.rand(3, 4, 6, generator=generator)

    def probability(images):
        return (images * reading).sum((1, 2, 3)).sigmoid()

    weighted = gradients.numpy().mean((1, 2))[:, None, None] * activations.numpy()
    smooth = blur(image[None])[0].numpy()
    base = float(probability(torch.as_tensor(smooth)[None]))
    expected = np.zeros((4, 6))
    for group in (weighted[:3].sum(0), weighted[3:].sum(0)):
        mask = np.maximum(group, 0)
        mask = np.where(mask > np.percentile(mask, 70), mask, 0)
        if mask.max() == mask.min():
            continue
        mask = (mask - mask.min()) / (mask.max() - mask.min())
        blended = image.numpy() * mask + smooth * (1 - mask)
        expected += (float(probability(torch.as_tensor(blended)[None].float())) - base) * mask
    assert expected.any()
    for batch_size in (1, 16):
        found = group_cam(activations, gradients, image, probability, groups=2, batch_size=batch_size)
        np.testing.assert_allclose(found.numpy(), np.maximum(expected, 0), atol=1e-5)


def test_masks_of_groups():
    activations, gradients = torch.rand(10, 3, 4), torch.ones(10, 3, 4)
    assert group_masks(activations, gradients, (12, 16), 4).shape == (4, 12, 16)
    assert group_masks(activations, gradients, (12, 16)).shape == (10, 12, 16), "not more groups than channels"
    assert len(group_masks(activations, -gradients, (12, 16), 4)) == 0, "nothing speaks for the class"
    masks = group_masks(activations, gradients, (3, 4), 4)
    assert (masks.amin((1, 2)) == 0).all()
    assert (masks.amax((1, 2)) == 1).all()
    assert ((masks > 0).float().mean((1, 2)) <= 0.34).all(), "70% of a mask are removed"


def test_blur_removes_details_and_keeps_the_mean():
    flat = torch.full((1, 3, 40, 60), 1.5)
    torch.testing.assert_close(blur(flat), flat)
    checked = (torch.arange(40)[:, None] + torch.arange(60)) % 2 * 4.0 - 2.0  # values beyond 0 to 1 stay
    assert blur(checked.expand(1, 3, 40, 60)).abs().max() < 0.7, "the border is repeated"


def test_options_change_the_map():
    model, images = ColorNet(), torch.randn(1, 3, 64, 96)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for method, option in (("score_cam", {"channels": 5}), ("group_cam", {"groups": 2})):
        plain = class_activation(model, images, method=method).maps
        assert not torch.equal(plain, class_activation(model, images, method=method, **option).maps)


@pytest.mark.parametrize(
    ("method", "option", "total"),
    [("grad_cam", {}, 3), ("score_cam", {"channels": 6}, 3 * 7), ("group_cam", {"groups": 4}, 3 * 6)],
)
def test_progress_counts_every_image_that_is_run(method, option, total):
    seen = []
    model, images = ColorNet(), torch.cat([square_image(color, 1, 2) for color in range(3)])
    class_activation(model, images, method=method, batch_size=2, progress=lambda *counts: seen.append(counts), **option)
    assert {counts[1] for counts in seen} == {total}
    assert [counts[0] for counts in seen] == sorted(counts[0] for counts in seen)
    if method != "group_cam":  # masks that are the same everywhere are left out
        assert seen[-1] == (total, total)


# What stays as it was


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_the_network_is_left_as_it_was(name, method):
    model = timm.create_model(name, num_classes=3, drop_rate=0.5)
    model.train()
    first = next(iter(model.children()))
    first.eval()  # modes differ, and stay different
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 > 0)
        parameter.grad = torch.ones_like(parameter) if index % 3 == 1 else None
    modes = [module.training for module in model.modules()]
    flags = [(p.requires_grad, p.grad, p._version) for p in model.parameters()]
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    images, state = torch.randn(1, 3, 160, 160), torch.get_rng_state()
    kept = images.clone()
    class_activation(model, images, method=method, **({"channels": 4} if method == "score_cam" else {}))
    assert torch.equal(torch.get_rng_state(), state)
    assert hooks_of(model) == 0
    assert [module.training for module in model.modules()] == modes
    for (flag, grad, version), parameter in zip(flags, model.parameters(), strict=True):
        assert (parameter.requires_grad, parameter._version) == (flag, version)
        assert parameter.grad is grad
        assert grad is None or torch.equal(grad, torch.ones_like(grad))
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())
    assert torch.equal(images, kept)
    assert not images.requires_grad


class Failing(nn.Module):
    """Raises an error after some calls."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, x):
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("out of memory")
        return x


@pytest.mark.parametrize("method", ["grad_cam", "score_cam", "group_cam"])
@pytest.mark.parametrize("calls", [0, 1, 2, 3, 4])
def test_nothing_stays_on_a_network_that_raises(method, calls):
    """Whichever of the runs fails: that of the logits, of the structure, of the layer's values, or a masked one."""
    model = ColorNet()
    model.pool = nn.Sequential(Failing(calls), model.pool)
    model.train()
    failed = False
    try:
        class_activation(model, square_image(0, 1, 1), method=method)
    except (RuntimeError, ValueError) as error:
        failed = "out of memory" in str(error)
    assert failed or (calls > 2 and method == "grad_cam")
    assert hooks_of(model) == 0
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("method", ["grad_cam", "eigen_cam", "score_cam", "group_cam"])
def test_every_state_of_the_caller_gives_the_same_map(method):
    """Without gradients, in inference mode, and with frozen parameters."""
    model, image = color_vit(), square_image(1, 0, 5)
    expected = class_activation(model, image, method=method).maps
    with torch.no_grad():
        assert torch.equal(class_activation(model, image, method=method).maps, expected)
    with torch.inference_mode():
        assert torch.equal(class_activation(model, image.clone(), method=method).maps, expected)
    model.requires_grad_(False)
    assert torch.equal(class_activation(model, image, method=method).maps, expected)


def test_a_compiled_network_runs_eagerly():
    model, image = color_vit(), square_image(1, 1, 10)
    expected = class_activation(model, image)
    for compiled in (torch.compile(model), model):
        model.compile()  # in place, for the second time
        compiled(image)
        found = class_activation(compiled, image)
        assert found.layer == expected.layer == "blocks.1.norm1"
        assert torch.equal(found.maps, expected.maps)


def test_weights_of_lower_precision():
    model, image = ColorNet().bfloat16(), square_image(2, 3, 1)
    for method in ("grad_cam", "score_cam", "group_cam"):
        found = class_activation(model, image, method=method)
        assert found.maps.dtype == torch.float32
        assert cell_of(found.maps[0])[0] == (3, 1)


def test_a_map_is_zero_where_nothing_speaks_for_the_class():
    found = class_activation(ColorNet(), square_image(0, 1, 1), targets=2)
    assert not found.maps.any()
    assert found.maps.isfinite().all()


def test_without_contrast_no_network_is_run_on_no_images():
    """A classifier that starts at zero has no gradient, and Swin does not take an empty batch."""
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(1, 1, 1, 1))
    nn.init.zeros_(model.head.fc.weight)
    assert not class_activation(model.eval(), torch.rand(1, 3, 64, 64), method="group_cam").maps.any()


# Errors


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_grad_cam", None)
    with pytest.raises(ImportError, match=r'pip install "interlayer\[cam\]"'):
        class_activation(ColorNet(), square_image(0, 1, 1))
    for method in ("score_cam", "group_cam"):
        assert cell_of(class_activation(ColorNet(), square_image(0, 1, 1), method=method).maps[0])[0] == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gradcam"}, "unknown method 'gradcam': expected one of grad_cam"),
        ({"targets": 3}, "target 3 is no class of the network: expected 0 to 2"),
        ({"targets": [0, 1]}, "a target for each of 1 images, got 2"),
        ({"groups": 8}, "groups is for group_cam"),
        ({"channels": 8, "method": "group_cam"}, "channels is for score_cam"),
        ({"channels": 0, "method": "score_cam"}, "channels must be a positive number"),
        ({"batch_size": 0}, "batch_size must be a positive number"),
        ({"layer": "feature.0"}, "no module 'feature.0': the nearest names are features.0"),
        ({"layer": "pool"}, "the map of pool is 1 x 1 and cannot say where"),
        ({"layer": "head"}, "head has no spatial structure"),
        ({"layer": "stage2"}, "name a layer by the name of a module"),
    ],
)
def test_bad_options_get_a_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        class_activation(ColorNet(), square_image(0, 1, 1), **options)


def test_bad_images_get_a_sentence():
    for images in (torch.zeros(3, 8, 8), torch.zeros(1, 3, 8, 8, dtype=torch.uint8), [1], torch.zeros(0, 3, 8, 8)):
        with pytest.raises(ValueError, match=r"expected preprocessed images \[B, C, H, W\]"):
            class_activation(ColorNet(), images)
    with pytest.raises(ValueError, match="not finite"):
        class_activation(ColorNet(), torch.full((1, 3, PATCH, PATCH), float("nan")))


def test_detectors_are_not_supported():
    model = interlayer.detector("retinanet", backbone="test_resnet", num_classes=3)
    with pytest.raises(ValueError, match="detectors are not supported"):
        class_activation(model, torch.rand(1, 3, 64, 64))


class ColorSegmenter(nn.Module):
    """Labels every pixel with its color; the background is class 3."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, PATCH, PATCH), nn.ReLU())
        with torch.no_grad():
            self.features[0].weight.zero_()
            self.features[0].bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.5]))
            for color in range(3):
                self.features[0].weight[color, color] = 1 / PATCH**2

    def forward(self, images):
        return nn.functional.interpolate(self.features(images), size=images.shape[-2:])


@pytest.mark.parametrize("method", ["grad_cam", "score_cam", "group_cam"])
def test_a_segmenter_explains_the_pixels_of_a_class(method):
    model = ColorSegmenter()
    image = square_image(0, 1, 10) + square_image(2, 6, 2)
    found = class_activation(model, image.repeat(2, 1, 1, 1), method=method, targets=[0, 2])
    assert [cell_of(heatmap)[0] for heatmap in found.maps] == [(1, 10), (6, 2)]
    assert class_activation(model, image, method=method).targets == [3], "the class with the most pixels"
    with pytest.raises(ValueError, match="no pixel of image 0 is predicted as class 1: its classes are 0, 2, 3"):
        class_activation(model, image, method=method, targets=1)


def test_segmenters_of_the_library_and_of_torchvision():
    """Torchvision's return a dict."""

    class InDict(ColorSegmenter):
        def forward(self, images):
            return {"out": super().forward(images), "aux": None}

    image = square_image(0, 1, 10)
    assert torch.equal(class_activation(InDict(), image).maps, class_activation(ColorSegmenter(), image).maps)
    ours = interlayer.segmenter("fpn", backbone="test_resnet", num_classes=4).eval()
    found = class_activation(ours, torch.randn(1, 3, 64, 96))
    assert found.maps.shape == (1, 64, 96)
    assert found.maps.isfinite().all()
    assert found.layer == "body.network.layer4.0"
