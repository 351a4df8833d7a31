"""Recipes that start from trained weights."""

import pytest
import timm
import torch

from interlayer.models import save_weights

VIT = {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": 32}


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Weights files of small networks with five classes, by name."""
    folder, files = tmp_path_factory.mktemp("trained"), {}
    torch.manual_seed(1)
    for name, options in {"resnet10t": {}, "vit_tiny_patch16_224": VIT, "test_efficientnet": {}}.items():
        files[name] = folder / f"{name}.safetensors"
        save_weights(timm.create_model(name, num_classes=5, **options), files[name])
    files["without head"] = folder / "without_head.safetensors"
    save_weights(timm.create_model("resnet10t", num_classes=0), files["without head"])
    return files


@pytest.fixture
def tuned(small, trained, digit_files):
    """A function that makes a small recipe that starts from trained weights: three steps of 40 images in an epoch."""

    def make(model="resnet10t+mrla_light", **changes):
        backbone = model.split("+")[0]
        options = VIT if backbone.startswith("vit") else {}
        values = {"model_options": options, "image_size": 32, "weights": str(trained[backbone]), "lr": 0.01}
        values |= {"data": str(digit_files), "batch_size": 40}
        return small(**{"model": model, **values, **changes})

    return make
