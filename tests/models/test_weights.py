"""Tests of loading weights and of the messages about tensors that do not match."""

import pytest
import timm
import torch
from torch import nn

import interlayer
from interlayer.models.build import build_network
from interlayer.models.weights import match_tensors

VIT = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
SWIN = {"embed_dim": 16, "depths": (1, 2), "num_heads": (1, 2), "window_size": 8}
CEIT = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
NETWORKS = [
    ("vit_tiny_patch16_224", VIT, "+mrla_light:channels_per_head=8", {"pos_embed"}),
    ("swin_tiny_patch4_window7_224", SWIN, "+mrla_base:channels_per_head=8", {"relative_position_bias_table"}),
    ("deit_tiny_distilled_patch16_224", VIT, "+cb:scaled=true", {"pos_embed"}),
    ("ceit_tiny", CEIT, "+mrla_light:channels_per_head=8", {"pos_embed"}),
]


@pytest.fixture(params=NETWORKS, ids=[name for name, *_ in NETWORKS])
def trained(request, tmp_path):
    """Saves a small network with random weights: name, options, mechanism, positions, network, path."""
    name, options, mechanism, positions = request.param
    network = timm.create_model(name, img_size=64, num_classes=3, **options)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    interlayer.save_weights(network, tmp_path / "trained.safetensors")
    return name, options, mechanism, positions, network, tmp_path / "trained.safetensors"


def test_weights_of_another_image_size_start_a_network(trained):
    """Positions are interpolated by timm's function, as for pretrained weights, and all other tensors are loaded."""
    name, options, mechanism, positions, source, path = trained
    network = build_network(name + mechanism, image_size=32, num_classes=3, model_options=options, weights=str(path))
    own = network.state_dict()
    resized = [key for key, value in source.state_dict().items() if own[key].shape != value.shape]
    assert {key.rpartition(".")[2] for key in resized} == positions
    assert all(torch.equal(own[key], value) for key, value in source.state_dict().items() if key not in resized)
    by_timm = timm.create_model(name, img_size=32, num_classes=3, **options)
    module = __import__(type(by_timm).__module__, fromlist=["checkpoint_filter_fn"])
    by_timm.load_state_dict(module.checkpoint_filter_fn(dict(source.state_dict()), by_timm))
    assert all(torch.equal(own[key], value) for key, value in by_timm.state_dict().items())
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(network.eval()(image), by_timm.eval()(image), atol=1e-5, rtol=1e-4)


def test_the_same_size_changes_nothing(trained):
    name, options, mechanism, _, source, path = trained
    network = build_network(name + mechanism, image_size=64, num_classes=3, model_options=options, weights=str(path))
    own = network.state_dict()
    assert all(torch.equal(own[key], value) for key, value in source.state_dict().items())


def test_a_backbone_of_another_image_size_is_loaded(trained):
    name, options, mechanism, _, source, _ = trained
    network = build_network(name + mechanism, image_size=32, num_classes=3, model_options=options)
    report = interlayer.load_backbone(network, source.state_dict())
    assert report.complete
    assert set(report.placed) == set(source.state_dict())


def test_a_network_of_another_width_is_not_made_to_fit(trained):
    name, options, mechanism, _, _, path = trained
    options = {**options, "embed_dim": 2 * options["embed_dim"]}
    with pytest.raises(interlayer.CheckpointError, match=r"does not fit the network: .* of another shape: .* expected"):
        build_network(name + mechanism, image_size=32, num_classes=3, model_options=options, weights=str(path))


def test_a_head_of_another_number_of_classes_keeps_its_own_weights(trained):
    name, options, mechanism, _, source, path = trained
    network = build_network(name + mechanism, image_size=64, num_classes=5, model_options=options, weights=str(path))
    own = network.state_dict()
    left = {key for key, value in source.state_dict().items() if own[key].shape != value.shape}
    assert left
    assert all("head" in key for key in left)


@pytest.mark.parametrize(
    ("state_dict", "sentence"),
    [
        ({1: torch.zeros(1)}, r"whose keys are names of type str, got the key 1 of type int"),
        ({"state_dict": {("a", 0): torch.zeros(1)}}, r"got the key \('a', 0\) of type tuple"),
        ([torch.zeros(1)], "expected a state dict, a mapping of names to tensors, got list"),
    ],
)
def test_state_dicts_with_odd_keys_get_a_sentence(state_dict, sentence, tmp_path):
    model = interlayer.attach(timm.create_model("resnet10t", num_classes=2), "eca")
    with pytest.raises(interlayer.CheckpointError, match=sentence):
        interlayer.convert_checkpoint(state_dict, model)
    with pytest.raises(interlayer.CheckpointError, match=sentence):
        interlayer.load_backbone(model, state_dict)
    torch.save(state_dict, tmp_path / "odd.pth")
    if isinstance(state_dict, dict):
        with pytest.raises(interlayer.CheckpointError, match=sentence):
            interlayer.load_weights(model, tmp_path / "odd.pth")


def test_a_file_without_tensors_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    with pytest.raises(interlayer.CheckpointError, match="holds no tensors"):
        interlayer.load_weights(nn.Linear(1, 1), tmp_path / "empty.pth")


def test_every_message_reads_the_same(tmp_path):
    """Four loading functions report a missing, an unexpected and a mismatched tensor in the same words."""
    model = timm.create_model("preresnet20_cifar", num_classes=2)
    wrong = dict(model.state_dict())
    wrong["extra.weight"] = wrong.pop("stem.0.weight")
    wrong["norm.bias"] = torch.zeros(7)
    text = (
        r"1 missing: stem\.0\.weight; 1 unexpected: extra\.weight; "
        r"1 of another shape: norm\.bias \(7,\), expected \(64,\)"
    )
    report = match_tensors(wrong, model.state_dict())
    assert not report.complete
    interlayer.save_weights(model, tmp_path / "wrong.safetensors", wrong)
    ways = (
        lambda: report.check("checked"),
        lambda: interlayer.load_weights(model, tmp_path / "wrong.safetensors"),
        lambda: interlayer.load_backbone(model, wrong),
        lambda: interlayer.convert_checkpoint(wrong, model),
        lambda: build_network("preresnet20_cifar", num_classes=2, weights=str(tmp_path / "wrong.safetensors")),
    )
    for load in ways:
        with pytest.raises(interlayer.CheckpointError, match=text):
            load()


def test_weights_of_another_network_name_ten_tensors_and_count_the_rest():
    """A message with hundreds of names hides its first sentence."""
    with torch.device("meta"):
        model = timm.create_model("resnet18_mrla_light", reading="published")
    other = {f"blocks.{index}.weight": torch.zeros(1) for index in range(50)}
    with pytest.raises(interlayer.CheckpointError, match=r"blocks\.9\.weight and 40 more, which") as caught:
        interlayer.convert_checkpoint(other, model)
    assert "50 unexpected: blocks.0.weight" in str(caught.value)
    assert "blocks.10.weight" not in str(caught.value)
