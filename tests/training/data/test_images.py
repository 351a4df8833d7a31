"""Images of every mode are read as an image viewer shows them, and equally by every source."""

import io
import tarfile

import numpy as np
import pytest
import torch
from digit_images import save_digits
from PIL import Image
from timm.data import create_transform

from interlayer.training.data import ImageTransform, open_data
from interlayer.training.data.images import as_rgb, open_rgb
from interlayer.training.data.seeds import temporary_seed
from interlayer.training.recipe import RecipeError, load_recipe

ORIENTATION = 0x0112  # the tag of the rotation in EXIF data
RAMP = np.array([[0, 64, 128], [192, 254, 255]], dtype=np.uint8)
COLORS = np.arange(18, dtype=np.uint8).reshape(2, 3, 3) * 14


def saved(image, name, **options):
    """Writes an image to a file in memory and reads it."""
    file = io.BytesIO()
    image.save(file, name, **options)
    file.seek(0)
    return np.asarray(open_rgb(file))


def gray(pixels):
    return np.repeat(pixels[..., None], 3, axis=-1)


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
@pytest.mark.parametrize("factor", [256, 257])
def test_sixteen_bits_are_not_clipped_to_white(file_format, factor):
    """Pillow's own conversion could clip everything above 255."""
    image = Image.fromarray(RAMP.astype(np.uint16) * factor)
    assert image.mode == "I;16"
    assert np.array_equal(saved(image, file_format), gray(RAMP))


def test_integers_and_floats_are_scaled_or_refused():
    assert np.array_equal(as_rgb(Image.fromarray(RAMP.astype(np.int32) * 257)), gray(RAMP))
    assert np.array_equal(saved(Image.fromarray(RAMP.astype(np.float32) / 255), "TIFF"), gray(RAMP))
    assert np.array_equal(saved(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), gray(RAMP))
    with pytest.raises(ValueError, match="32-bit integers from 0 to 16711680, expected at most 16 bits"):
        as_rgb(Image.fromarray(RAMP.astype(np.int32) * 2**16))
    with pytest.raises(ValueError, match="floating-point pixels are from 0 to 2550"):
        as_rgb(Image.fromarray(RAMP.astype(np.float32) * 10))


TURNED = {
    1: lambda x: x,
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: lambda x: x.transpose(1, 0, 2),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).transpose(1, 0, 2),
    8: np.rot90,
}


@pytest.mark.parametrize("orientation", TURNED)
def test_the_rotation_of_a_camera_is_applied(orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    assert np.array_equal(saved(Image.fromarray(COLORS), "PNG", exif=exif), TURNED[orientation](COLORS))
    blocks = np.kron(COLORS, np.ones((16, 16, 1), np.uint8))  # JPEG stores flat blocks almost exactly
    read = saved(Image.fromarray(blocks), "JPEG", exif=exif, quality=100, subsampling=0)
    assert np.abs(read.astype(int) - TURNED[orientation](blocks)).max() <= 4


def test_transparent_pixels_are_white():
    pixels = np.dstack([COLORS, np.array([[0, 255, 0], [255, 0, 255]], np.uint8)])
    expected = np.where(pixels[..., 3:] == 0, 255, COLORS)
    assert np.array_equal(saved(Image.fromarray(pixels), "PNG"), expected)
    half = np.dstack([RAMP, np.full_like(RAMP, 128)])
    read = saved(Image.fromarray(half, "LA"), "PNG")
    assert np.abs(read - gray(RAMP * (128 / 255) + 255 * (127 / 255))).max() <= 1


def test_a_palette_keeps_its_colors_and_its_transparent_entry_is_white():
    image = Image.fromarray(np.array([[0, 1, 2], [2, 1, 0]], np.uint8), "P")
    image.putpalette([10, 20, 30, 200, 0, 0, 0, 0, 200])
    colors = np.array([[10, 20, 30], [200, 0, 0], [0, 0, 200]])
    assert np.array_equal(saved(image, "PNG"), colors[np.asarray(image)])
    colors[1] = 255
    assert np.array_equal(saved(image, "PNG", transparency=1), colors[np.asarray(image)])
    assert np.array_equal(saved(image, "GIF", transparency=1), colors[np.asarray(image)])
    assert np.array_equal(saved(Image.fromarray(RAMP), "PNG", transparency=0), np.where(gray(RAMP), gray(RAMP), 255))


def test_cmyk_and_black_and_white():
    ink = np.zeros((2, 3, 4), np.uint8)
    ink[0, 0], ink[1, 2] = (255, 0, 0, 0), (0, 0, 0, 255)
    read = saved(Image.fromarray(ink, "CMYK"), "TIFF")
    assert (read[0, 0].tolist(), read[1, 2].tolist(), read[0, 1].tolist()) == ([0, 255, 255], [0, 0, 0], [255] * 3)
    assert np.array_equal(saved(Image.fromarray(RAMP > 100), "PNG"), gray(np.where(RAMP > 100, 255, 0)))


@pytest.fixture
def hard_image():
    """A 16-bit PNG that is stored upside down."""
    exif = Image.Exif()
    exif[ORIENTATION] = 3
    file = io.BytesIO()
    Image.fromarray(np.kron(RAMP.astype(np.uint16) * 257, np.ones((4, 4), np.uint16))).save(file, "PNG", exif=exif)
    return file.getvalue(), gray(np.rot90(np.kron(RAMP, np.ones((4, 4), np.uint8)), 2))


def test_every_source_reads_an_image_equally(small, tmp_path, hard_image):
    content, expected = hard_image
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "0.png").write_bytes(content)
    assert np.array_equal(open_data(small(data=str(tmp_path))).train.open(0), expected)
    pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    assert np.array_equal(open_data(small(data=f"hfds/{tmp_path}")).train.open(0), expected)


def test_a_shard_reads_an_image_equally(small, tmp_path, hard_image):
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    content, expected = hard_image
    with tarfile.open(tmp_path / "test-0.tar", "w") as archive:
        for suffix, data in (("png", content), ("cls", b"0")):
            info = tarfile.TarInfo(f"0.{suffix}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    options = {"train_split": "test-{0..0}.tar|1", "test_split": "test-{0..0}.tar|1"}
    data = open_data(small(data=f"wds/{tmp_path}", data_options=options, num_classes=2))
    ((image, label),) = data.test.samples()
    assert (label, np.asarray(image).tolist()) == (0, expected.tolist())


def test_resident_images_and_workers_read_an_image_equally(small, tmp_path, hard_image):
    from test_data import evaluated

    content, expected = hard_image
    for split in ("train", "test"):
        save_digits(tmp_path / split, 1, size=12)
    (tmp_path / "test" / "0" / "0.png").write_bytes(content)
    for resident in ("auto", "no"):
        batches, data = evaluated(small(data=str(tmp_path), resident=resident), size=8)
        pixels = next(iter(batches))[0][0]
        assert data.test.name(0).endswith("0.png")
        assert torch.equal(pixels, torch.as_tensor(expected[:, 2:10]).permute(2, 0, 1))


@pytest.mark.parametrize("crop_mode", ["center", "border", "squash"])
def test_the_transform_of_one_image_is_timms(crop_mode):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.2)
    ours = ImageTransform(24, mean, std, "bicubic", 0.8, crop_mode)(Image.fromarray(pixels))
    theirs = create_transform(24, mean=mean, std=std, interpolation="bicubic", crop_pct=0.8, crop_mode=crop_mode)
    torch.testing.assert_close(ours, theirs(Image.fromarray(pixels)), rtol=1e-4, atol=1e-5)


def test_scale_augmentation_draws_the_shorter_side_and_then_the_crop():
    """Every side of the range occurs, crops have the size of the input, and no part of an image is distorted."""
    columns = np.tile(np.arange(120, dtype=np.uint8) * 2, (60, 1))  # brightness is the column, from 0 to 238
    image = Image.fromarray(np.repeat(columns[..., None], 3, axis=2))
    recipe = load_recipe("default", ["crop=scaled", "shorter_side=[32,48]", "flip=0", "interpolation=bilinear"])
    transform = ImageTransform(32, (0.5,) * 3, (0.5,) * 3, "bilinear", 0.875).training(recipe)
    sides, starts = set(), set()
    for seed in range(300):
        with temporary_seed(seed):
            pixels = np.asarray(transform(image)).astype(float)
        assert pixels.shape == (3, 32, 32)
        step = (pixels[0, 0, 25] - pixels[0, 0, 6]) / 19  # brightness per column: 2 x 60 / shorter side
        sides.add(round(120 / step))
        starts.add(pixels[0, 0, 0])
    assert min(sides) <= 33
    assert max(sides) >= 47
    assert len(sides) >= 14
    assert len(starts) > 50, "crops start at different columns"


def test_a_shorter_side_below_the_image_size_is_refused():
    recipe = load_recipe("mrla_resnet")
    with pytest.raises(RecipeError, match=r"too small for crops of 288: set shorter_side=\[329, 617\] or crop=resized"):
        ImageTransform(288, (0.5,) * 3, (0.5,) * 3, "bicubic", 0.875).training(recipe)
