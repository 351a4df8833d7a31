"""Tests of switching mechanisms off, and of the measured contribution, against values known beforehand."""

import copy

import pytest
import timm
import torch

import interlayer
from interlayer.analysis import BlockContribution, Contribution, combined
from interlayer.hosts import Mechanism, attached_mechanisms, find_stages, kind_in_blocks, place_in_stage
from interlayer.hosts.attach import MECHANISMS
from interlayer.hosts.finding import components
from interlayer.mechanisms import BlockMechanism
from interlayer.mechanisms.options import NoOptions
from interlayer.tasks import Classification

IMAGES = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
SMALL = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "deit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 2, "depths": (1, 1, 2, 1)},
}


def make(name, mechanism, **options):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **SMALL.get(name, {}))
    for each in mechanism.split("+"):
        interlayer.attach(model, each, image_size=64, **options)
    return model


def perturbed(model):
    """The model in eval mode, with parameters at which a mechanism that starts as the identity has an effect."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for mechanism in attached_mechanisms(model).values():
            for parameter in mechanism.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        for module in model.modules():  # a branch that starts at zero would hide a gate
            for name in ("bn2", "bn3"):
                norm = getattr(module, name, None)
                if isinstance(norm, torch.nn.BatchNorm2d) and not norm.weight.any():
                    norm.weight.fill_(0.5)
    return model.eval()


@torch.no_grad()
def logits_without(model, *names):
    with interlayer.switched_off(model, names or None):
        return model(IMAGES)


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        *(("resnet18", m) for m in ("mrla_light", "mrla_base", "mrla_linear", "rla", "se", "dia", "bridge", "gc")),
        ("resnet18", "mrla_light+se+rla"),
        ("mobilenetv2_050", "rla"),
        ("preresnet20_cifar", "rla"),
        *(("efficientnet_lite0", m) for m in ("mrla_light", "mrla_base")),
        *(("deit_tiny_patch16_224", m) for m in ("mrla_light", "mrla_base", "cb", "cb+mrla_light")),
        *(("swin_tiny_patch4_window7_224", m) for m in ("mrla_light", "cb")),
    ],
)
def test_switched_off_is_what_detach_leaves(name, mechanism):
    model = perturbed(make(name, mechanism))
    with torch.no_grad():
        logits = model(IMAGES)
        plain = interlayer.detach(copy.deepcopy(model))(IMAGES)
        torch.testing.assert_close(logits_without(model), plain, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(logits, plain, atol=1e-5), "the mechanism has an effect to switch off"
        assert torch.equal(model(IMAGES), logits), "the mechanism is back"


def test_one_of_two_mechanisms_is_switched_off():
    model = perturbed(make("resnet18", "mrla_light+se"))
    gates_alone = perturbed(make("resnet18", "mrla_light+se"))
    for block in (*gates_alone.layer1, *gates_alone.layer2, *gates_alone.layer3, *gates_alone.layer4):
        torch.nn.init.zeros_(block.mrla.norm.weight)
        torch.nn.init.zeros_(block.mrla.norm.bias)
    torch.testing.assert_close(logits_without(model, "mrla_light"), gates_alone(IMAGES).detach())
    with pytest.raises(ValueError, match="ResNet has no mechanism 'rla' to switch off: it has mrla_light, se"):
        logits_without(model, "rla")


def test_a_classifier_that_reads_the_state_reads_zeros():
    model = make("resnet18", "rla").eval()
    with torch.no_grad(), interlayer.switched_off(model):
        features = model.forward_features(IMAGES)
        assert features.shape[1] == 512 + 32
        assert not features[:, 512:].any()
        last, middle = model.forward_intermediates(IMAGES, indices=[1], stop_early=True)
    assert middle[0].shape[1] == last.shape[1] == 64


class Doubling(BlockMechanism):
    """Adds the block's output to itself, f' = 2 f: half of the output is the mechanism's."""

    def leave(self, output, values, memory, place):
        return output + values.output, memory


class Halving(BlockMechanism):
    """A gate of 0.5 on the branch of a residual block."""

    def gate(self, y, inner, memory, place):
        return 0.5 * y, memory


def attach_by_hand(monkeypatch, name, make_one):
    def place(model, options, *, image_size=None):
        for number, stage in enumerate(find_stages(model, image_size=image_size)):
            place_in_stage(model, name, number, stage, [make_one() for _ in stage.blocks])

    monkeypatch.setitem(MECHANISMS, name, Mechanism(kind_in_blocks(name, name), NoOptions, place))


@pytest.mark.parametrize("network", ["resnet18", "vit_tiny_patch16_224"])
def test_an_output_that_is_doubled_is_half_the_mechanisms(monkeypatch, network):
    attach_by_hand(monkeypatch, "doubling", Doubling)
    found = interlayer.contribution(make(network, "doubling"), IMAGES)
    assert [row.ratio for row in found.blocks] == pytest.approx([0.5] * len(found.blocks))
    assert {row.mechanism for row in found.blocks} == {"doubling"}
    assert [row.stage for row in found.blocks][-1] == (4 if network == "resnet18" else 3)


def test_a_gate_of_one_half(monkeypatch):
    attach_by_hand(monkeypatch, "halving", Halving)
    model = perturbed(make("resnet18", "halving"))
    with torch.no_grad():
        x = model.maxpool(model.act1(model.bn1(model.conv1(IMAGES))))
        block = model.layer1[0]
        half = components.run_block(block, x, gate=lambda y, inner: 0.5 * y).output
        whole = components.run_block(block, x).output
    expected = ((half - whole).flatten(1).norm(dim=1) / half.flatten(1).norm(dim=1)).mean()
    assert expected > 0.01
    found = interlayer.contribution(model, IMAGES)
    assert found.blocks[0].block == "layer1.0"
    assert found.blocks[0].ratio == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "mechanism"), [("resnet18", "mrla_light"), ("resnet18", "rla"), ("deit_tiny_patch16_224", "mrla_base")]
)
def test_an_identity_start_contributes_nothing(name, mechanism):
    found = interlayer.contribution(make(name, mechanism, init="identity"), IMAGES)
    assert [row.ratio for row in found.blocks] == [0] * len(found.blocks)
    assert found.changed == 0
    assert found.share_changed == 0
    assert found.sentence == "switched off, 0 of 3 predictions change: the network does not use it"


def test_recurrent_state_has_a_row_for_the_head():
    found = interlayer.contribution(make("resnet18", "rla"), IMAGES)
    assert [row.block for row in found.blocks][-2:] == ["layer4.1", "fc"]
    assert found.blocks[0].ratio == 0, "the state is zero before the first block"
    assert found.blocks[-1].stage is None
    assert found.blocks[-1].ratio > 0
    inverted = interlayer.contribution(make("mobilenetv2_050", "rla"), IMAGES)
    assert inverted.blocks[-1].block == "conv_head"
    assert inverted.blocks[-1].ratio > 0


def test_broadcasting_inside_a_block_is_measured_at_the_block():
    found = interlayer.contribution(make("deit_tiny_patch16_224", "cb", where="both"), IMAGES)
    assert [row.block for row in found.blocks] == ["blocks.2", "blocks.3"]
    two = interlayer.contribution(perturbed(make("deit_tiny_patch16_224", "cb+mrla_light")), IMAGES)
    assert [(row.block, row.mechanism) for row in two.blocks if row.block == "blocks.3"] == [
        ("blocks.3", "mrla_light"), ("blocks.3", "cb"),
    ]  # fmt: skip
    assert all(row.ratio > 0 for row in two.blocks)


def test_images_in_any_form_give_the_same_record():
    model = perturbed(make("resnet18", "mrla_light"))
    labels = torch.tensor([0, 1, 4])
    found = interlayer.contribution(model, IMAGES, labels)
    pairs = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES, labels), batch_size=2)
    for other in (
        interlayer.contribution(model, pairs),
        interlayer.contribution(model, iter([IMAGES[:1], IMAGES[1:]]), labels.tolist()),
    ):
        assert other.changed == found.changed
        assert (other.value, other.value_without) == (found.value, found.value_without)
        assert [row.ratio for row in other.blocks] == pytest.approx([row.ratio for row in found.blocks], rel=1e-4)
    with torch.no_grad():
        logits, plain = model(IMAGES), logits_without(model)
    assert found.images == 3
    assert found.changed == int((logits.argmax(1) != plain.argmax(1)).sum())
    assert found.value == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert found.value_without == pytest.approx(float((plain.argmax(1) == labels).float().mean()))


def test_nothing_is_left_behind():
    model = make("resnet18", "mrla_base+se").train()
    model.layer1.eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]

    def check():
        assert [module.training for module in model.modules()] == modes
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        assert not any(module._forward_hooks or "switched_off" in vars(module) for module in model.modules())

    interlayer.contribution(model, IMAGES)
    check()
    with pytest.raises(RuntimeError, match="channels"):
        interlayer.contribution(model, IMAGES[:, :1])
    check()
    with pytest.raises(KeyError), interlayer.switched_off(model):
        raise KeyError("an error inside the block")
    check()
    with interlayer.switched_off(model), interlayer.switched_off(model, "se"):
        pass
    check()


@pytest.mark.parametrize(
    ("name", "mechanism", "message"),
    [
        ("resnet18", None, "ResNet has no mechanism that can be switched off: nothing is attached to it"),
        ("rest_lite", None, "such as HaloNet or ResT, has no form without it"),
        ("resnet18", "halo", "the mechanism of ResNet replaces its convolutions and cannot be switched off"),
    ],
)
def test_networks_that_have_no_form_without_the_mechanism_say_so(name, mechanism, message):
    model = timm.create_model(name)
    if mechanism:
        interlayer.attach(model, mechanism, stages=(4,))
    with pytest.raises(ValueError, match=message):
        interlayer.contribution(model, IMAGES)


def test_images_and_labels_that_do_not_fit_are_refused():
    model = make("resnet18", "mrla_light")
    for images, labels, message in (
        (IMAGES[0], None, r"expected images \[B, C, H, W\], got \(3, 64, 64\)"),
        ([], None, "there are no images"),
        (["photo.jpg"], None, r"expected batches of images \[B, C, H, W\], got str"),
        (IMAGES, [0, 1], "expected one label for each of 3 images, got"),
        (IMAGES, [0, 1, 2, 3], "expected a label for each of the 3 images, got 4"),
        ([(IMAGES, torch.zeros(3))], [0, 1, 2], "the batches contain labels"),
    ):
        with pytest.raises(ValueError, match=message):
            interlayer.contribution(model, images, labels)
    with pytest.raises(ValueError, match="labels need a network whose outputs are logits"):
        interlayer.contribution(
            interlayer.attach(timm.create_model("resnet18", num_classes=1), "se"), IMAGES, [0, 0, 0]
        )


def test_registered_models_and_networks_without_logits_are_measured():
    found = interlayer.contribution(timm.create_model("resnet50_mrla_light", num_classes=3), IMAGES[:1])
    assert len(found.blocks) == 16
    features = timm.create_model("resnet18", features_only=True)
    found = interlayer.contribution(interlayer.attach(features, "mrla_light"), IMAGES[:1])
    assert found.changed is None
    assert found.sentence.startswith("mrla_light changes the outputs of its blocks by ")


def record(changed, images=180, value=0.86, without=0.86, ratio=0.1):
    blocks = (BlockContribution("layer1.0", 1, "mrla_light", ratio), BlockContribution("fc", None, "mrla_light", 0.0))
    return Contribution(blocks, images, changed, Classification.headline, value, without)


def test_the_sentence_says_what_the_numbers_say():
    assert record(0).sentence == "switched off, 0 of 180 predictions change: the network does not use it"
    assert record(0, images=3).sentence == "switched off, 0 of 3 predictions change", "three images prove little"
    assert record(1, without=0.85).sentence == (
        "switched off, 1 of 180 predictions (0.6%) changes and accuracy falls from 86.00% to 85.00%: the network "
        "hardly uses it"
    )
    assert record(36, without=0.9).sentence == (
        "switched off, 36 of 180 predictions (20.0%) change and accuracy rises from 86.00% to 90.00%"
    )
    table = str(record(0)).splitlines()
    assert table[1].split() == ["layer1.0", "1", "mrla_light", "10.0%"]
    assert table[2].split() == ["fc", "mrla_light", "0%"]
    assert table[3] == "Switched off, 0 of 180 predictions change: the network does not use it."


def test_a_record_survives_json_and_several_seeds_are_added_up():
    import json

    one = record(36, without=0.8)
    assert Contribution.from_dict(json.loads(json.dumps(one.as_dict()))) == one
    both = combined([one, record(0, value=0.88, without=0.88, ratio=0.3)])
    assert (both.changed, both.images, both.runs) == (36, 360, 2)
    assert (both.value, both.value_without) == pytest.approx((0.87, 0.84))
    assert both.blocks[0].ratio == pytest.approx(0.2)
    assert "36 of 360 predictions of 2 seeds (10.0%) change" in both.sentence
