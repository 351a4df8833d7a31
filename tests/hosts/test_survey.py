"""A survey: which kind of mechanism each family of timm takes, and the reason for every refusal.

Each row: a model, and for each kind of mechanism None if it is taken, or the reason. The identity starts of layer
attention and of a recurrent state compute the function of the network exactly, and so does every detached network.
"""

import pytest
import timm
import torch

import interlayer
from interlayer.hosts import attached_mechanisms
from interlayer.hosts.finding.components import is_convolution

NO_MLP = "has no mlp: context broadcasting is for transformers and mixers"
OTHER = "they are neither timm's ResNet blocks nor its"
SE = "its SqueezeExcite would have to read the state too, because it lies between"
NOT_V2 = "nor of its MobileNetV2s"
CONV = "has no 3x3 convolutions that local attention could replace"
WIDTHS = "stages of several widths: dia shares one LSTM of one width"
FAMILIES = {  # mrla_light, rla, eca, dia, halo, cb
    "resnet10t": (None, None, None, None, None, NO_MLP),
    "resnext50_32x4d": (None, None, None, None, CONV, NO_MLP),
    "seresnet18": (None, None, None, None, None, NO_MLP),
    "efficientnet_b0": (None, SE, None, WIDTHS, CONV, NO_MLP),
    "tf_efficientnet_b0": (None, SE, None, WIDTHS, CONV, NO_MLP),
    "efficientnet_lite0": (None, None, None, WIDTHS, CONV, NO_MLP),
    "tf_efficientnet_lite0": (None, None, None, WIDTHS, CONV, NO_MLP),
    "efficientnet_es": (None, NOT_V2, None, WIDTHS, "32 input channels, which 6 heads do not divide", NO_MLP),
    "tf_efficientnetv2_b0": (None, NOT_V2, None, WIDTHS, None, NO_MLP),
    "mobilenetv2_035": (None, None, None, WIDTHS, CONV, NO_MLP),
    "mobilenetv3_small_050": (None, SE, None, None, CONV, NO_MLP),
    "tf_mobilenetv3_small_minimal_100": (
        None,
        "ConvBnAct is a convolution without a shortcut",
        None,
        WIDTHS,
        CONV,
        NO_MLP,
    ),
    "mobilenetv4_conv_small_035": (None, NOT_V2, None, None, None, NO_MLP),
    "mnasnet_small": (None, SE, None, WIDTHS, CONV, NO_MLP),
    "mixnet_s": (None, "it is not the plain inverted residual of MobileNetV2", None, WIDTHS, CONV, NO_MLP),
    "regnety_002": (None, OTHER, OTHER, OTHER, CONV, NO_MLP),
    "densenet121": ("runs every module that it holds, the mechanism among them", OTHER, OTHER, OTHER, CONV, NO_MLP),
    "convnext_atto": (None, OTHER, OTHER, OTHER, CONV, "convolves: context broadcasting takes token MLPs"),
    "resnest14d": (None, OTHER, OTHER, OTHER, CONV, NO_MLP),
    "res2net50_14w_8s": (None, OTHER, OTHER, OTHER, "divides the 14 and 14 channels", NO_MLP),
    "skresnet18": (None, OTHER, OTHER, OTHER, "is dilated, which local attention is not", NO_MLP),
    "ghostnet_050": (None, OTHER, OTHER, OTHER, CONV, NO_MLP),
    "edgenext_xx_small": (None, OTHER, OTHER, OTHER, CONV, None),
    "resnetv2_18": (None, OTHER, OTHER, OTHER, CONV, NO_MLP),
    "vit_tiny_patch16_224": (None, OTHER, OTHER, OTHER, CONV, None),
}
MECHANISMS = ("mrla_light", "rla", "eca", "dia", "halo", "cb")
IMAGES = torch.randn(2, 3, 64, 64)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_family_takes(name):
    options = {"img_size": 64} if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=5, **options).eval()
    expected, names = model(IMAGES), list(model.state_dict())
    for mechanism, reason in zip(MECHANISMS, FAMILIES[name], strict=True):
        start = {"init": "identity"} if mechanism in ("mrla_light", "rla") else {}
        if reason is None:
            interlayer.attach(model, mechanism, image_size=64, **start)
            assert attached_mechanisms(model)
            output = model(IMAGES)
            if start:
                assert torch.equal(output, expected), f"{mechanism}: the identity start must change nothing"
            interlayer.detach(model)
        else:
            with pytest.raises(interlayer.AttachError, match=reason):
                interlayer.attach(model, mechanism, image_size=64, **start)
        assert list(model.state_dict()) == names
        assert torch.equal(model(IMAGES), expected), mechanism


@pytest.mark.parametrize("gate", ["se", "eca", "cbam", "gc", "nl"])
@pytest.mark.parametrize("name", ["efficientnet_b0", "tf_efficientnetv2_b0", "mobilenetv4_conv_small_035", "mixnet_s"])
def test_a_gate_beside_squeeze_and_excitation_learns_in_every_block(name, gate):
    """The gate is on the branch, after the block's own squeeze-and-excitation and before the shortcut."""
    model = interlayer.attach(timm.create_model(name, num_classes=5), gate, image_size=64, blocks="all").train()
    model(IMAGES).sum().backward()
    gates = {n: p for n, p in model.named_parameters() if f".{gate}_gate." in n}
    blocks = [module for module in model.modules() if hasattr(module, "has_skip") and not is_convolution(module)]
    assert len({n.split(f".{gate}_gate.")[0] for n in gates}) == len(blocks)
    assert [n for n, p in gates.items() if p.grad is None] == []


@pytest.mark.parametrize("size", [(64, 64), (65, 91), (96, 33)])
def test_a_state_in_a_network_with_padding_as_in_tensorflow(size):
    """The convolutions of the state are padded like those of the blocks, so that odd sizes fit too."""
    model = timm.create_model("tf_efficientnet_lite0", num_classes=5).eval()
    images = torch.randn(2, 3, *size)
    expected = model(images)
    interlayer.attach(model, "rla", init="identity", image_size=64)
    assert torch.equal(model(images), expected)
    interlayer.detach(model)
    interlayer.attach(model, "rla", image_size=64)
    model.train()(images).sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
