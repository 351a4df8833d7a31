"""Tests of the named models that are registered with timm."""

import pytest
import timm
import torch

import interlayer
from interlayer.analysis import count_parameters
from interlayer.hosts import attached_blocks, attached_mechanisms
from interlayer.models import backbone_of
from interlayer.models.rows import ROWS

RLA_VARIANTS = ("v2", "v3", "v4", "v5", "v6", "postact", "convlstm", "convgru", "unshared", "no_exchange")
PEERS = ("se", "eca", "cbam", "gc", "nl", "a2", "aa", "dia", "bridge")
EXPECTED = (
    [f"resnet{d}_mrla_{k}" for d in (18, 34, 50, 101, 152) for k in ("light", "base")]
    + ["resnet50_mla", "resnet50_mrla_linear"]
    + [f"efficientnet_{s}_mrla_{k}" for s in ("b0", "b1") for k in ("light", "base")]
    + [f"deit_{s}_mrla_{k}" for s in ("tiny", "small", "base") for k in ("light", "base")]
    + [f"ceit_{s}{k}" for s in ("tiny", "small") for k in ("", "_mrla_light", "_mrla_base")]
    + [f"pvt_v2_{s}_mrla_{k}" for s in ("b0", "b1") for k in ("light", "base")]
    + [f"preresnet{d}_cifar{rla}" for d in (20, 56, 110, 164) for rla in ("", "_rla")]
    + [f"resnet{d}_{what}" for d in (50, 101, 152) for what in ("rla", "se_rla", "eca_rla", *PEERS)]
    + [f"{net}_rla_{variant}" for net in ("resnet50", "preresnet164_cifar") for variant in RLA_VARIANTS]
    + [f"preresnet164_cifar_{what}" for what in ("wide12", "dpn", "rla_k8", "rla_k16", "rla_k24")]
    + ["resnet101_rla_unshared", "resnet50_wide32", "resnet50d_rla", "resnet50d_eca_rla", "resnext50_32x4d_rla"]
    + [f"mobilenetv2_{what}" for what in ("rla", "eca_rla", "eca", "se")]
    + ["xception_cifar", "xception_cifar_rla"]
    + [f"densenet100_cifar{sharing}" for sharing in ("", "_shared_lag", "_shared_ordinal")]
    + [f"halo_h{number}" for number in range(8)]
    + [f"deit_{size}_cb{scaled}" for size in ("tiny", "small", "base") for scaled in ("", "_scaled")]
    + ["pit_b_cb", "mixer_s16_cb"]
    + [f"halo_{what}" for what in ("h7_c1", "h7_c12", "h7_c123", "resnet50_b8", "resnet50_b32", "resnet101_b8")]
    + ["halo_50", "halo_h4_base128", "halo_h4_base128_patch", "halo_h4_base128_conv12"]
    + ["rest_lite", "rest_small", "rest_base", "rest_large"]
    + ["vit_small_8", "vit_small_8_msa", "vit_small_8_mlp"]
)
# Models that differ from others only by an option are tested in the slow tests.
ALIKE = [
    name for name in EXPECTED if "101_" in name or "152_" in name or "_rla_" in name or name.startswith("deit_base")
]
ALIKE += [f"resnet50_{peer}" for peer in ("se", "eca", "cbam", "gc", "nl")] + [
    "resnet50_se_rla",
    "preresnet110_cifar_rla",
    "halo_h7_c1",
    "halo_h7_c12",
    "halo_resnet50_b32",
]


def on_meta(name, **options):
    with torch.device("meta"):
        return timm.create_model(name, **options)


def test_the_names_are_registered_and_shadow_none_of_timms():
    assert sorted(EXPECTED) == interlayer.list_models()
    assert set(EXPECTED) <= set(timm.list_models())
    assert set(timm.list_models("*mrla*")) == {name for name in EXPECTED if "mrla" in name}
    assert interlayer.list_models("resnet50_m*") == [
        "resnet50_mla",
        "resnet50_mrla_base",
        "resnet50_mrla_light",
        "resnet50_mrla_linear",
    ]
    for name in EXPECTED:
        assert timm.models._registry._model_entrypoints[name].__module__.startswith("interlayer.")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet50_mrla_light", 25_738_452),
        ("resnet101_mrla_light", 44_939_646),
        ("resnet152_mrla_light", 60_767_784),
        ("resnet50_mrla_base", 25_723_348),
        ("resnet50_mla", 25_723_348),
        ("resnet101_mrla_base", 44_907_134),
        ("deit_tiny_mrla_light", 5_749_792),
        ("deit_small_mrla_light", 22_115_296),
        ("deit_base_mrla_light", 86_696_800),
        ("ceit_tiny", 6_356_904),
        ("ceit_small", 24_204_840),
        ("resnet50_rla", 25_870_696),
        ("preresnet110_cifar_rla", 1_804_922),
        ("preresnet164_cifar_rla_k8", 1_726_554),
        ("preresnet164_cifar_rla", 1_739_482),
        ("preresnet164_cifar_rla_k16", 1_753_274),
        ("preresnet164_cifar_rla_k24", 1_783_450),
        ("preresnet164_cifar_rla_unshared", 1_896_970),
        ("preresnet164_cifar_rla_convlstm", 1_765_546),
        ("preresnet164_cifar_rla_no_exchange", 1_713_994),
        ("preresnet164_cifar_wide12", 1_925_692),
        ("preresnet164_cifar_dpn", 2_127_826),
        ("deit_small_cb", 22_050_664),
        ("deit_small_cb_scaled", 22_050_664 + 6 * 384),
        ("halo_h0", 5_488_424),
        ("halo_h1", 8_084_936),
        ("halo_h2", 9_388_328),
        ("halo_h3", 12_275_080),
        ("halo_h4", 19_082_632),
        ("halo_h5", 30_683_112),
        ("halo_h6", 43_425_544),
        ("halo_h7", 67_400_008),
        ("halo_h7_c1", 67_308_496),
        ("halo_h7_c12", 66_948_784),
        ("halo_h7_c123", 67_353_776),
        ("halo_50", 18_019_112),
        ("halo_resnet50_b8", 20_960_016),
        ("halo_resnet50_b32", 20_962_320),
        ("halo_resnet101_b8", 40_235_568),
        ("halo_h4_base128", 85_194_760),
        ("halo_h4_base128_conv12", 87_057_384),
        ("rest_lite", 10_508_300),
        ("rest_base", 30_327_052),
        ("xception_cifar", 2_701_882),
        ("xception_cifar_rla", 2_767_534),
    ],
)
def test_parameters_are_the_papers(name, parameters):
    assert count_parameters(on_meta(name)) == parameters


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("efficientnet_b0_mrla_light", 12_354),
        ("efficientnet_b1_mrla_light", 21_812),
        ("ceit_tiny_mrla_light", 32_376),
        ("ceit_small_mrla_light", 64_632),
        ("pvt_v2_b0_mrla_light", 14_400),
        ("pvt_v2_b1_mrla_light", 28_744),
    ],
)
def test_added_parameters_are_the_papers(name, added):
    assert count_parameters(on_meta(name)) - count_parameters(on_meta(backbone_of(name))) == added


@pytest.mark.parametrize(
    ("options", "parameters", "as_the_paper_counts"),
    [
        ({"value_conv": False}, 25_602_516, 25_587_412),
        ({"attention": False}, 25_723_176, 25_723_176),
        ({"projection": "linear"}, 28_253_224, 28_238_120),
    ],
)
def test_ablations_have_the_papers_parameters(options, parameters, as_the_paper_counts):
    model = on_meta("resnet50_mrla_light", attach_options=options)
    assert count_parameters(model) == parameters
    assert count_parameters(model, layers_only=True) == as_the_paper_counts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in sorted(ROWS)]
)
def test_every_model_has_timms_interface(name):
    model = on_meta(name, num_classes=7).eval()
    config = timm.get_pretrained_cfg(name)
    assert config is not None
    assert config.input_size == model.default_cfg["input_size"]
    assert model.default_cfg["architecture"] == name
    assert not config.has_weights
    image = torch.randn(1, *config.input_size, device="meta")
    assert model(image).shape == (1, 7)
    assert model.forward_head(model.forward_features(image)).shape == (1, 7)
    model.reset_classifier(3)
    assert model(image).shape == (1, 3)
    one_channel = on_meta(name, num_classes=7, in_chans=1).eval()
    assert one_channel(torch.randn(1, 1, *config.input_size[1:], device="meta")).shape == (1, 7)


@pytest.mark.parametrize("name", ["resnet18_mrla_base", "efficientnet_b0_mrla_light", "pvt_v2_b0_mrla_light"])
def test_drop_path_rate_is_the_backbones(name):
    model = on_meta(name, drop_path_rate=0.2)
    own = {getattr(m.drop_path, "drop_prob", 0.0) for m in attached_mechanisms(model).values()}
    if name.startswith("resnet"):
        assert own == {0.2}, "ResNets drop the attention alone, with probability 0.2 in every block"
        assert {getattr(m.drop_path, "drop_prob", 0.0) for m in attached_mechanisms(on_meta(name)).values()} == {0.2}
    else:
        for _, block in attached_blocks(model):
            theirs = max((m.drop_prob for m in block.children() if hasattr(m, "drop_prob")), default=0.0)
            assert getattr(block.mrla.drop_path, "drop_prob", 0.0) == pytest.approx(theirs)
        assert len(own) > 1, "the rate must grow with depth, as the backbone's does"


def test_attention_options_replace_the_rows():
    model = on_meta("resnet18_mrla_light", attach_options={"drop_path": 0.0, "memory": False})
    assert all(isinstance(m.drop_path, torch.nn.Identity) for m in attached_mechanisms(model).values())
    assert all(m.decay is None for m in attached_mechanisms(model).values())


def test_configuration_can_be_overlaid():
    model = on_meta("resnet18_mrla_light", pretrained_cfg_overlay={"mean": (0.0, 0.0, 0.0)})
    assert model.default_cfg["mean"] == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="give reading= to create_model itself"):
        on_meta("resnet18_mrla_light", attach_options={"reading": "published"})


def test_readings():
    paper, published = on_meta("resnet50_mrla_base"), on_meta("resnet50_mrla_base", reading="published")
    assert paper.conv1.weight.shape == (64, 3, 7, 7)
    assert published.conv1[0].weight.shape == (32, 3, 3, 3), "the published model has a stem of three convolutions"
    per_head = {m.channels // m.heads for m in attached_mechanisms(published).values()}
    assert per_head == {16}
    assert {m.channels // m.heads for m in attached_mechanisms(paper).values()} == {32}
    with pytest.raises(ValueError, match="MLA has reading='paper', got 'published'"):
        on_meta("resnet50_mla", reading="published")


def test_deit_restarts_its_memory_every_four_blocks():
    model = on_meta("deit_tiny_mrla_base")
    assert [entry.place.index for _, block in attached_blocks(model) for entry in block.interlayer_entries] == [
        0,
        1,
        2,
        3,
    ] * 3


def test_pretrained_says_how_to_start_from_the_backbone():
    with pytest.raises(RuntimeError, match="no pretrained weights of resnet18_mrla_light exist; to start from"):
        timm.create_model("resnet18_mrla_light", pretrained=True)


def test_image_size_of_transformers():
    model = on_meta("deit_tiny_mrla_light", img_size=(96, 64), num_classes=3)
    assert model(torch.randn(1, 3, 96, 64, device="meta")).shape == (1, 3)


def test_features_only_of_named_transformers():
    model = timm.create_model("deit_tiny_mrla_light", img_size=64, features_only=True, out_indices=(1, 6))
    assert [tuple(f.shape) for f in model(torch.randn(1, 3, 64, 64))] == [(1, 192, 4, 4)] * 2
