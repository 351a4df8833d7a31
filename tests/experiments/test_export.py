"""Export: the file computes what the network computes, carries what a user needs, and is not written otherwise."""

import json
from importlib.util import find_spec

import pytest
import timm
import torch
from torch import nn

import interlayer
from interlayer.experiments import export_source, load_network
from interlayer.models.build import build_network

HAS_ONNX = all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
FORMATS = ["pt2", pytest.param("onnx", marks=pytest.mark.skipif(not HAS_ONNX, reason="needs onnx and onnxruntime"))]
TINY_VIT = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
NETWORKS = {
    "resnet10t+mrla_light": {},
    "resnet10t+mrla_base": {},
    "resnet10t+halo": {},
    "resnet10t+halo:position=none": {},
    "vit_tiny_patch16_224+mrla_light:channels_per_head=8": TINY_VIT,
    "vit_tiny_patch16_224+cb": TINY_VIT,
    "preresnet20_cifar+rla": {"blocks": 1, "widths": [8, 8, 16]},
    "rest_lite": {},
}


@pytest.fixture
def network():
    return build_network("vit_tiny_patch16_224+cb", num_classes=3, image_size=32, model_options=TINY_VIT).eval()


def load(path):
    """Returns a function that runs an exported file, and its metadata."""
    if path.suffix == ".pt2":
        files = {"metadata.json": ""}
        module = torch.export.load(path, extra_files=files).module()
        return module, json.loads(files["metadata.json"])
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    properties = session.get_modelmeta().custom_metadata_map
    metadata = {key: json.loads(value) for key, value in properties.items() if not key.startswith("pkg.")}
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0]), metadata


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_file_computes_what_the_network_computes(network, suffix, tmp_path):
    report = interlayer.export_model(network, tmp_path / f"model.{suffix}", image_size=32, metadata={"classes": ["a"]})
    exported, metadata = load(report.path)
    images = torch.randn(5, 3, 32, 32)  # a batch size that was neither traced nor checked
    with torch.no_grad():
        torch.testing.assert_close(exported(images), network(images), rtol=1e-4, atol=1e-5)
    assert report.batch_sizes == (1, 3)
    assert report.difference < 1e-5 < report.scale
    assert metadata["image_size"] == [32, 32]
    assert metadata["mean"] == list(network.pretrained_cfg["mean"])
    assert metadata["crop_pct"] == network.pretrained_cfg["crop_pct"]
    assert metadata["crop_mode"] == network.pretrained_cfg.get("crop_mode", "center")
    assert metadata["classes"] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == [f"model.{suffix}"], "temporary files are left"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_mechanism_can_be_exported(name, suffix, tmp_path):
    network = build_network(name, num_classes=5, image_size=64, model_options=NETWORKS[name])
    report = interlayer.export_model(network, tmp_path / f"model.{suffix}", image_size=64)
    assert report.difference < 1e-3 * max(1.0, report.scale)


def test_the_network_itself_is_not_changed(network, tmp_path):
    network.train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    interlayer.export_model(network, tmp_path / "model.pt2", image_size=32, batch_size=2)
    assert network.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


class CountsItsCalls(nn.Module):
    """Adds the number of its calls, which an exported program cannot know."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)
        self.calls = 0
        self.pretrained_cfg = {}

    def forward(self, images):
        self.calls += 1
        return self.layer(images).mean((2, 3)) + self.calls


def test_a_file_that_computes_something_else_is_not_written(tmp_path):
    """An earlier file of the same name stays as it was."""
    path = tmp_path / "model.pt2"
    path.write_text("earlier")
    with pytest.raises(interlayer.ExportError, match=r"was not written: its outputs differ .* by up to \d"):
        interlayer.export_model(CountsItsCalls(), path, image_size=8, overwrite=True)
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_given_images_are_compared(network, tmp_path):
    images = 1e3 * torch.randn(2, 3, 32, 32)
    report = interlayer.export_model(network, tmp_path / "model.pt2", image_size=32, images=images)
    with torch.no_grad():
        assert report.scale == float(network(images).abs().max())
    with pytest.raises(
        interlayer.ExportError, match=r"expected images of shape \[B, 3, 32, 32\], got \[2, 3, 16, 16\]"
    ):
        interlayer.export_model(network, tmp_path / "other.pt2", image_size=32, images=torch.randn(2, 3, 16, 16))


def test_a_network_that_cannot_be_traced_gives_a_sentence(tmp_path):
    class DataDependent(CountsItsCalls):
        def forward(self, images):
            return images if images.sum() > 0 else -images

    with pytest.raises(interlayer.ExportError, match="DataDependent cannot be exported to pt2: ") as caught:
        interlayer.export_model(DataDependent(), tmp_path / "model.pt2", image_size=8)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("model.txt", {}, "expected a format among onnx, pt2, got 'txt'"),
        ("model.onnx", {"format": "pt2"}, "ends in .pt2, got 'model.onnx'"),
        ("absent/model.pt2", {}, "absent: no such folder"),
    ],
)
def test_wrong_names_give_a_sentence(network, name, options, sentence, tmp_path):
    with pytest.raises(interlayer.ExportError, match=sentence):
        interlayer.export_model(network, tmp_path / name, **options)


def test_a_run_is_exported_with_its_classes_and_its_transform(finished_run, tmp_path):
    source = load_network(str(finished_run))
    report = export_source(source, tmp_path / "run.pt2")
    exported, metadata = load(report.path)
    assert metadata["model"] == "preresnet20_cifar+mrla_light:channels_per_head=8"
    assert metadata["classes"] == [str(digit) for digit in range(10)]
    assert metadata["image_size"] == [8, 8]
    summary = json.loads((finished_run / "summary.json").read_text())
    assert metadata["mean"] == summary["mean"]
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(exported(images), source.network(images))


def test_the_head_of_a_weights_file_is_exported_whatever_its_size(tmp_path, caplog):
    """A head of another size than the model's default is not replaced by a random one."""
    trained = timm.create_model("preresnet20_cifar", num_classes=7, blocks=1)
    interlayer.save_weights(trained, tmp_path / "seven.safetensors")
    weights = f"weights={tmp_path / 'seven.safetensors'}"
    source = load_network("preresnet20_cifar", [weights, "model_options={blocks: 1}"])
    assert caplog.text == ""
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, source.network.state_dict()[name]), name


@pytest.mark.parametrize(
    ("source", "overrides", "sentence"),
    [
        ("nowhere/run", [], "nowhere/run: no such folder"),
        ("preresnet20_cifar", [], "preresnet20_cifar has no trained weights: give weights=FILE"),
        ("preresnet20_cifar", ["epochs=3"], "epochs has no effect here; the options are: weights, pretrained"),
        ("resnet1a8", [], "unknown model 'resnet1a8'; did you mean resnet18"),
    ],
)
def test_unknown_sources_give_a_sentence(source, overrides, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_network(source, overrides)
