"""Tests that options are listed and checked: misspelled and meaningless options are errors."""

from pathlib import Path

import pytest
import timm
import torch

import interlayer
from interlayer.hosts import MECHANISMS, options_of

DOCS = Path(__file__).parents[2] / "docs"


def resnet():
    return timm.create_model("resnet18", num_classes=5)


def vit():
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=64, depth=4)


def test_every_option_is_listed_with_its_default_and_meaning():
    light = options_of("mrla_light")
    assert {"memory", "learn_decay", "attention", "value_conv", "reading", "init", "drop_path"} <= set(light)
    assert light["learn_decay"].default == "True"
    assert "memory" not in options_of("mrla_base")
    for name in MECHANISMS:
        assert MECHANISMS[name].about, name
        for option in options_of(name).values():
            assert option.meaning, f"{name}: {option.name}"


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        ("cb", {"reading": "paper"}),
        ("cb", {"init": "paper"}),
        ("eca", {"stages": None}),
        ("halo", {"init": "paper"}),
        ("mrla_base", {"memory": True}),
        ("rla", {"stages": None}),
    ],
)
def test_an_option_that_does_not_exist_is_refused_also_as_a_default(mechanism, options):
    model = vit() if mechanism == "cb" else resnet()
    (name,) = options
    with pytest.raises(TypeError, match=f"{mechanism} has no option '{name}'"):
        interlayer.attach(model, mechanism, **options)


def test_a_misspelled_name_gets_the_nearest_one_and_then_all_others():
    with pytest.raises(ValueError, match=r"unknown mechanism 'mrla_lite', did you mean mrla_light\?") as mechanism:
        interlayer.attach(resnet(), "mrla_lite")
    assert all(name in str(mechanism.value) for name in MECHANISMS)
    with pytest.raises(
        TypeError, match=r"did you mean channels_per_head\? Expected one of channels_per_head,"
    ) as option:
        interlayer.attach(resnet(), "mrla_light", chanels_per_head=8)
    assert all(name in str(option.value) for name in options_of("mrla_light"))
    with pytest.raises(ValueError, match="unknown mechanism 'xyz', expected one of mrla_light, mrla_base"):
        interlayer.attach(resnet(), "xyz")


@pytest.mark.parametrize("size", [[1], (64, 64, 3), "64", 0, -3, (64, 2.5), {"height": 64}, True])
@pytest.mark.parametrize("mechanism", ["cb", "mrla_light", "eca"])
def test_an_image_size_that_is_none_gets_a_sentence(mechanism, size):
    model = vit() if mechanism == "cb" else resnet()
    with pytest.raises(interlayer.AttachError, match="image_size must be a positive whole number, or height and width"):
        interlayer.attach(model, mechanism, image_size=size)


@pytest.mark.parametrize(
    ("mechanism", "options", "reason"),
    [
        ("halo", {"last": True}, "a whole number for last"),
        ("halo", {"stages": 3.5}, "expected stages such as"),
        ("halo", {"stages": [3.0]}, "expected stages such as"),
        ("halo", {"stages": [True]}, "expected stages such as"),
        ("halo", {"stages": "34"}, "expected stages such as"),
        ("mrla_light", {"drop_path": False}, "a probability below 1, 'backbone' or 'backbone_rate', got False"),
        ("mrla_light", {"stages": (True, 7)}, "stages must be lengths such as"),
        ("rla", {"variant": []}, "unknown variant"),
        (["cb"], {}, "unknown mechanism"),
    ],
)
def test_a_value_of_the_wrong_type_gets_a_sentence(mechanism, options, reason):
    with pytest.raises(ValueError, match=reason):
        interlayer.attach(resnet(), mechanism, **options)


@pytest.mark.parametrize(
    ("make", "mechanism", "options", "reason"),
    [
        (resnet, "mrla_light", {"add_prefix": True}, "prefix tokens, which ResNet does not have"),
        (vit, "mrla_base", {"relu": True}, "a CNN, which VisionTransformer is not"),
        (resnet, "mrla_light", {"memory": False, "previous": "shortcut"}, "leaves out"),
        (resnet, "mrla_light", {"attention": False, "previous": "attention"}, "leaves out"),
        (resnet, "rla", {"cell_norm": False}, "cell_norm=False is defined for cell='convlstm' and 'convgru'"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(make, mechanism, options, reason):
    with pytest.raises(ValueError, match=reason):
        interlayer.attach(make(), mechanism, **options)


def test_a_reading_is_a_row_of_options():
    """The published reading and the same options given individually compute the same function."""
    image = torch.randn(2, 3, 64, 64)
    for make, mechanism, row in (
        (resnet, "mrla_light", {"previous": "shortcut"}),
        (vit, "mrla_light", {"previous": "shortcut", "add_prefix": True}),
        (resnet, "mrla_base", {"relu": True}),
        (vit, "mrla_base", {"add_prefix": True}),
        (resnet, "rla", {"insert": "output", "cell_bias": False, "head_activation": "relu"}),
    ):
        outputs = []
        for options in ({"reading": "published"}, row, {}):
            torch.manual_seed(0)
            outputs.append(interlayer.attach(make(), mechanism, **options).eval()(image))
        torch.testing.assert_close(outputs[0], outputs[1])
        assert not torch.allclose(outputs[0], outputs[2]), f"{mechanism}: the readings must differ"


def test_documentation_lists_the_options_as_they_are():
    from interlayer_cli.mechanisms import _markdown

    own = {name: MECHANISMS.pop(name) for name in ("weighted_sum", "two_streams") if name in MECHANISMS}
    try:
        assert (DOCS / "options.md").read_text() == _markdown(), "interlayer mechanisms --markdown > docs/options.md"
    finally:
        MECHANISMS.update(own)


def test_the_example_of_the_documentation_runs():
    text = (DOCS / "attaching.md").read_text()
    code = text[text.index("## Custom mechanisms") :].split("```python\n")[1].split("```")[0]
    scope = {"torch": torch, "timm": timm, "interlayer": interlayer}
    try:
        exec(code.replace('"resnet50"', '"resnet18"'), scope)
        model = scope["model"]
        with torch.no_grad():
            model.layer1[0].scale.scale.fill_(2.0)
        assert "layer1.0.scale.scale" in model.state_dict()
        interlayer.detach(model)
    finally:
        MECHANISMS.pop("scale", None)
