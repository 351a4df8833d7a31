"""Tests of attach with the architectures of timm.

Each row: a model, options of `timm.create_model`, the image size used here, and the lengths of the stages it must find.
"""

import pytest
import timm
import torch

import interlayer
from interlayer.hosts import attached_mechanisms, find_stages

TINY_VIT = {"img_size": 64}
ARCHITECTURES = [
    # convolutional, stages of residual blocks
    ("resnet10t", {}, 64, [1, 1, 1, 1]),
    ("resnet18", {}, 64, [2, 2, 2, 2]),
    ("resnet26d", {}, 64, [2, 2, 2, 2]),
    ("seresnet18", {}, 64, [2, 2, 2, 2]),
    ("skresnet18", {}, 64, [2, 2, 2, 2]),
    ("resnetv2_18", {}, 64, [2, 2, 2, 2]),
    ("res2net50_14w_8s", {}, 64, [3, 4, 6, 3]),
    ("tresnet_m", {}, 64, [3, 4, 11, 3]),
    ("regnetx_002", {}, 64, [1, 1, 4, 7]),
    ("regnety_002", {}, 64, [1, 1, 4, 7]),
    ("nf_regnet_b0", {}, 64, [1, 3, 6, 6]),
    ("dla34", {}, 64, [2, 2, 2, 2]),
    ("cs3darknet_focus_s", {}, 64, [1, 3, 4, 1]),
    ("ese_vovnet19b_dw", {}, 64, None),
    ("gernet_s", {}, 64, [1, 3, 7, 2, 1]),
    ("hgnetv2_b0", {}, 64, [1, 1, 2, 3]),
    ("hrnet_w18_small", {}, 64, None),
    ("repvgg_a0", {}, 64, [1, 2, 4, 14, 1]),
    # MBConv and its relatives: blocks that say they have no skip are left out
    ("efficientnet_b0", {}, 64, [2, 2, 3, 3, 4, 1]),
    ("mobilenetv2_035", {}, 64, None),
    ("mobilenetv3_small_050", {}, 64, None),
    ("mobilenetv4_conv_small_035", {}, 64, None),
    ("mnasnet_small", {}, 64, None),
    ("fbnetv3_b", {}, 64, None),
    ("ghostnet_050", {}, 64, [2, 2, 2, 4, 2, 5]),
    ("repghostnet_050", {}, 64, None),
    ("rexnet_100", {}, 64, None),
    # modern convolutional
    ("convnext_atto", {}, 64, [2, 2, 6, 2]),
    ("convnextv2_atto", {}, 64, [2, 2, 6, 2]),
    ("inception_next_atto", {}, 64, [2, 2, 6, 2]),
    ("fasternet_t0", {}, 64, [1, 2, 8, 2]),
    ("starnet_s050", {}, 64, None),
    ("convmixer_768_32", {}, 64, [11, 11, 10]),
    # convolution and attention mixed, [B, C, H, W] maps
    ("poolformerv2_s12", {}, 64, [2, 2, 6, 2]),
    ("edgenext_xx_small", {}, 64, [2, 2, 6, 2]),
    ("efficientvit_b0", {}, 64, None),
    ("repvit_m0_9", {}, 64, [2, 3, 15, 3]),
    ("fastvit_t8", {}, 64, None),
    ("mobilevit_xxs", {}, 64, [1, 3, 2, 2, 2]),
    ("mobilevitv2_050", {}, 64, [1, 2, 2, 2, 2]),
    ("maxvit_rmlp_pico_rw_256", TINY_VIT, 64, [2, 2, 5, 2]),
    ("davit_tiny", {}, 64, [2, 2, 6, 2]),
    ("focalnet_tiny_srf", {}, 64, [2, 2, 6, 2]),
    # hierarchical transformers: [B, H, W, C] maps and tokens with their grid among the block's arguments
    ("swin_tiny_patch4_window7_224", TINY_VIT, 64, [2, 2, 6, 2]),
    ("swinv2_tiny_window8_256", TINY_VIT, 64, [2, 2, 6, 2]),
    ("pvt_v2_b0", {}, 64, [2, 2, 2, 2]),
    ("twins_svt_small", TINY_VIT, 64, None),
    ("coat_tiny", TINY_VIT, 64, [2, 2, 2, 2]),
    # plain transformers and mixers: three stages as equal as the depth allows
    ("vit_tiny_patch16_224", TINY_VIT, 64, [4, 4, 4]),
    ("deit_tiny_distilled_patch16_224", TINY_VIT, 64, [4, 4, 4]),
    ("deit3_small_patch16_224", TINY_VIT, 64, [4, 4, 4]),
    ("vit_small_patch14_reg4_dinov2", {"img_size": 56}, 56, [4, 4, 4]),
    ("vit_relpos_small_patch16_224", TINY_VIT, 64, [4, 4, 4]),
    ("flexivit_small", TINY_VIT, 64, [4, 4, 4]),
    ("beit_base_patch16_224", TINY_VIT, 64, [4, 4, 4]),
    ("eva02_tiny_patch14_224", {"img_size": 56}, 56, [4, 4, 4]),
    ("cait_xxs24_224", TINY_VIT, 64, [8, 8, 8]),
    ("convit_tiny", TINY_VIT, 64, [10, 2]),
    ("xcit_nano_12_p16_224", TINY_VIT, 64, [4, 4, 4]),
    ("mixer_s32_224", TINY_VIT, 64, [3, 3, 2]),
    ("resmlp_12_224", TINY_VIT, 64, [4, 4, 4]),
    ("gmlp_ti16_224", TINY_VIT, 64, [10, 10, 10]),
]


def test_the_list_is_long_enough():
    names = [name for name, *_ in ARCHITECTURES]
    assert len(set(names)) >= 40
    assert len({timm.models._registry._model_to_module[name] for name in names}) >= 20


@pytest.mark.parametrize("mechanism", ["mrla_light", "mrla_base"])
@pytest.mark.parametrize(("name", "options", "size", "stages"), ARCHITECTURES, ids=[row[0] for row in ARCHITECTURES])
def test_forward_backward_and_a_training_step(name, options, size, stages, mechanism):
    model = timm.create_model(name, num_classes=5, **options)
    if stages is not None and mechanism == "mrla_light":
        assert [len(stage.blocks) for stage in find_stages(model, image_size=size)] == stages
    backbone = {k: v.clone() for k, v in model.state_dict().items()}
    model = interlayer.attach(model, mechanism, image_size=size).train()
    assert backbone.keys() < model.state_dict().keys(), "the backbone's names must stay"

    heads = model.get_classifier()
    for head in heads if isinstance(heads, tuple) else (heads,):
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter)  # timm starts some heads at zero, through which no gradient comes
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    output = model(torch.randn(2, 3, size, size))
    output = output[0] if isinstance(output, tuple) else output  # distilled models in training
    assert output.shape == (2, 5)
    torch.nn.functional.cross_entropy(output, torch.tensor([0, 1])).backward()
    mechanisms = attached_mechanisms(model)
    for place, module in mechanisms.items():
        missing = [parameter for parameter, value in module.named_parameters() if value.grad is None]
        assert not missing, f"{place} got no gradient for {missing}"
        assert all(value.grad.isfinite().all() for value in module.parameters()), place
    assert any(p.grad.abs().sum() > 0 for module in mechanisms.values() for p in module.parameters())
    before = {(place, n): p.clone() for place, m in mechanisms.items() for n, p in m.named_parameters()}
    optimizer.step()
    assert any(not torch.equal(before[place, n], p) for place, m in mechanisms.items() for n, p in m.named_parameters())
    model.eval()
    assert model(torch.randn(1, 3, size, size)).isfinite().all()


@pytest.mark.parametrize("name", ["ghostnet_050", "repghostnet_050", "sequencer2d_s", "mobilenetv3_small_050", "dla34"])
def test_features_are_plain_tensors_wherever_timm_taps_them(name):
    """Some of timm's feature wrappers read the output of a block in the middle of a stage, which is a `Carried`."""
    model = timm.create_model(name, features_only=True)
    model = interlayer.attach(model, "mrla_base", image_size=64).eval()
    features = model(torch.randn(1, 3, 64, 64))
    assert all(type(feature) is torch.Tensor for feature in features)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("vgg11", {}, "VGG has no blocks to attach to"),
        ("mvitv2_tiny", {}, "MultiScaleVit has no blocks to attach to"),
        ("densenet121", {}, "DenseNet does not run with mrla_light in its blocks and was left as it was"),
        ("levit_128s", {}, "tokens and nothing tells their grid"),
        ("crossvit_tiny_240", {}, "tokens and nothing tells their grid"),
        ("lcnet_035", {}, "no block with an identity skip; blocks='all' takes every block"),
    ],
)
def test_what_cannot_be_attached_says_why_and_stays_as_it_was(name, options, reason):
    model = timm.create_model(name, num_classes=5, **options)
    names = list(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(interlayer.AttachError, match=reason):
        interlayer.attach(model, "mrla_light")
    assert list(model.state_dict()) == names
    assert [type(module) for module in model.modules()] == kinds
