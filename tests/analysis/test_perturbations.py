"""Corruptions: known answers, the distribution of noise, and independence of the batch."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from interlayer.analysis.perturbations import gaussian_blur, gaussian_noise, occlude_center, shot_noise


def test_the_center_of_half_the_side_is_occluded():
    images = torch.ones(2, 3, 224, 224)
    occluded = occlude_center(images)
    assert torch.equal(occluded[:, :, 56:168, 56:168], torch.zeros(2, 3, 112, 112))  # CB: the center 112 x 112
    assert occluded.sum() == 2 * 3 * (224**2 - 112**2)
    assert torch.equal(images, torch.ones(2, 3, 224, 224)), "the images that were given are intact"


def test_odd_and_oblong_images_are_occluded_by_side():
    occluded = occlude_center(torch.ones(1, 1, 5, 8), 0.25)
    expected = torch.ones(5, 8)
    expected[2, 3:5] = 0  # a quarter of 5 and of 8, rounded
    assert torch.equal(occluded[0, 0], expected)
    assert occlude_center(torch.ones(1, 1, 5, 8), 1.0).sum() == 0


def test_an_occlusion_has_the_color_that_is_given():
    occluded = occlude_center(torch.zeros(1, 3, 4, 4), fill=torch.tensor([0.1, 0.2, 0.3]))
    torch.testing.assert_close(occluded[0, :, 1, 2], torch.tensor([0.1, 0.2, 0.3]))
    torch.testing.assert_close(occluded.sum(), torch.tensor(4 * 0.6))


def test_gaussian_noise_has_its_mean_and_standard_deviation():
    images = torch.full((1, 3, 200, 200), 0.5)
    noise = (gaussian_noise(images, 0.1, [0]) - images) / 0.1
    assert noise.mean().abs() < 0.01
    assert noise.std() == pytest.approx(1, abs=0.01)
    assert (noise.abs() < 1).float().mean() == pytest.approx(0.6827, abs=0.01)
    torch.testing.assert_close(  # a known seed: torch's normal numbers
        noise[0], torch.empty(3, 200, 200).normal_(generator=torch.Generator().manual_seed(0)), atol=1e-5, rtol=0
    )


def test_shot_noise_counts_photons():
    images = torch.full((1, 3, 200, 200), 0.4)
    counts = shot_noise(images, 12, [0]) * 12
    torch.testing.assert_close(counts, counts.round(), atol=1e-4, rtol=0)
    assert counts.mean() == pytest.approx(4.8, abs=0.05)
    assert counts.var() == pytest.approx(4.8, abs=0.1)  # clipping at 12 photons is rare
    assert (counts.round() == 0).float().mean() == pytest.approx(np.exp(-4.8), abs=0.002)


@pytest.mark.parametrize("noise", [lambda x, seeds: gaussian_noise(x, 1.0, seeds), lambda x, s: shot_noise(x, 2, s)])
def test_noise_is_clipped_and_depends_on_the_seed_of_an_image_alone(noise):
    images = torch.rand(3, 3, 6, 7)
    batch = noise(images, [4, 5, 4])
    assert batch.min() >= 0
    assert batch.max() <= 1
    torch.testing.assert_close(batch[1:2], noise(images[1:2], [5]))
    same = noise(images[:1].expand(2, -1, -1, -1), [4, 5])
    assert not torch.equal(same[0], same[1])
    torch.testing.assert_close(batch, noise(images, [4, 5, 4]), rtol=0, atol=0)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0, 6.0])
def test_blur_is_scipys(sigma):
    """scikit-image, which made ImageNet-C, calls the same function with these options."""
    images = torch.rand(2, 3, 11, 14)  # smaller than the kernel
    expected = gaussian_filter(images.numpy(), sigma, axes=(2, 3), mode="nearest", truncate=4.0)
    torch.testing.assert_close(gaussian_blur(images, sigma), torch.from_numpy(expected), atol=2e-6, rtol=0)


def test_blur_keeps_a_plane_of_one_color_and_spreads_a_point():
    torch.testing.assert_close(gaussian_blur(torch.full((1, 1, 8, 9), 0.3), 3.0), torch.full((1, 1, 8, 9), 0.3))
    point = torch.zeros(1, 1, 21, 21)
    point[..., 10, 10] = 1
    blurred = gaussian_blur(point, 1.0)
    assert blurred.sum() == pytest.approx(1, abs=1e-6)
    assert blurred[0, 0, 10, 12] / blurred[0, 0, 10, 10] == pytest.approx(np.exp(-2), rel=1e-5)


def test_wrong_strengths_are_refused():
    image = torch.rand(1, 3, 4, 4)
    with pytest.raises(ValueError, match="side between 0 and 1, got 2"):
        occlude_center(image, 2.0)
    with pytest.raises(ValueError, match="photons above 0"):
        shot_noise(image, 0, [0])
    with pytest.raises(ValueError, match="sigma above 0"):
        gaussian_blur(image, 0.0)
    with pytest.raises(ValueError, match="a seed for each of 1 images, got 2"):
        gaussian_noise(image, 0.1, [0, 1])
