"""Tests of attach and detach: the backbone and its weights must be preserved and restored."""

import pytest
import timm
import torch
from torch import nn

import interlayer
from interlayer.hosts import attached_blocks, attached_mechanisms, find_stages
from interlayer.hosts.carried import Carried


def resnet(**options):
    return timm.create_model("resnet18", num_classes=5, **options)


def vit(**options):
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **{"img_size": 64, **options})


IMAGES = torch.randn(2, 3, 64, 64)
ALL = ["mrla_light", "mrla_base", "mla", "mrla_linear", "crla"]


@pytest.mark.parametrize("make", [resnet, vit])
@pytest.mark.parametrize("mechanism", ALL)
def test_attach_changes_the_function_and_detach_restores_the_network(make, mechanism):
    model = make().eval()
    names, kinds = list(model.state_dict()), [type(m) for m in model.modules()]
    before = model(IMAGES)
    assert interlayer.attach(model, mechanism) is model
    assert not torch.allclose(model(IMAGES), before)
    assert interlayer.detach(model) is model
    assert torch.equal(model(IMAGES), before)
    assert list(model.state_dict()) == names
    assert [type(m) for m in model.modules()] == kinds
    assert not any("interlayer" in name for m in model.modules() for name in vars(m)), "something was left behind"


@pytest.mark.parametrize("mechanism", ALL)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {}),
        ("efficientnet_b0", {}),
        ("convnext_atto", {}),
        ("regnety_002", {}),
        ("vit_tiny_patch16_224", {"img_size": 64}),
        ("swin_tiny_patch4_window7_224", {"img_size": 64}),
        ("pvt_v2_b0", {}),
        ("mixer_s32_224", {"img_size": 64}),
    ],
)
def test_identity_keeps_the_logits(name, options, mechanism):
    model = timm.create_model(name, num_classes=5, **options).eval()
    before = model(IMAGES)
    interlayer.attach(model, mechanism, init="identity", image_size=64)
    assert (model(IMAGES) - before).abs().max() <= 1e-6


def test_identity_can_be_fine_tuned():
    """A few steps must reduce the loss and change the parameters of the attention."""
    model = interlayer.attach(resnet(), "mrla_base", init="identity").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    labels = torch.tensor([0, 1])
    losses = []
    for _ in range(6):
        loss = nn.functional.cross_entropy(model(IMAGES), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(m.norm.weight.abs().sum() > 0 for m in attached_mechanisms(model).values())


def test_stages_of_a_plain_vit_are_three_and_as_equal_as_can_be():
    assert [len(s.blocks) for s in find_stages(vit())] == [4, 4, 4]
    assert [len(s.blocks) for s in find_stages(vit(depth=8))] == [3, 3, 2]
    assert [len(s.blocks) for s in find_stages(vit(depth=2))] == [1, 1]


@pytest.mark.parametrize("wrap", ["named model", "attach to features_only"])
def test_pruning_does_not_move_the_stages(wrap):
    """timm prunes a ViT after the last requested feature. The features must equal those of the complete network."""
    options = {"img_size": 64}
    whole = timm.create_model("deit_tiny_mrla_base", **options).eval()
    if wrap == "named model":
        cut = timm.create_model("deit_tiny_mrla_base", features_only=True, out_indices=(3, 5), **options)
    else:
        cut = timm.create_model("deit_tiny_patch16_224", features_only=True, out_indices=(3, 5), **options)
        cut = interlayer.attach(cut, "mrla_base")
    state = {f"model.{k}": v for k, v in whole.state_dict().items() if f"model.{k}" in cut.state_dict()}
    assert state.keys() == cut.state_dict().keys()
    cut.load_state_dict(state)
    x = torch.randn(1, 3, 64, 64)
    expected = whole.forward_intermediates(x, indices=[3, 5], intermediates_only=True)
    for feature, right in zip(cut.eval()(x), expected, strict=True):
        torch.testing.assert_close(feature, right)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {"in_chans": 12}),
        ("resnet18", {"in_chans": 4}),
        ("convnext_atto", {"in_chans": 1, "features_only": True}),
        ("vit_tiny_patch16_224", {"in_chans": 1, "features_only": True, "img_size": 64}),
        ("tresnet_m", {}),
    ],
)
def test_any_number_of_input_channels(name, options):
    model = interlayer.attach(timm.create_model(name, **options), "mrla_light", image_size=64).eval()
    model(torch.randn(1, options.get("in_chans", 3), 64, 64))


def test_the_norm_follows_the_network():
    kinds = {"resnet18": nn.BatchNorm2d, "convnext_atto": nn.LayerNorm, "resnet50_gn": nn.LayerNorm}
    for name, kind in kinds.items():
        model = interlayer.attach(timm.create_model(name), "mrla_light", image_size=64)
        assert all(isinstance(m.norm, kind) for m in attached_mechanisms(model).values()), name


def test_reentrant_checkpoints_are_refused():
    model = interlayer.attach(resnet(), "mrla_base")
    timm.layers.set_reentrant_ckpt(True)
    try:
        with pytest.raises(RuntimeError, match=r"call timm.layers.set_reentrant_ckpt\(False\) first"):
            model.set_grad_checkpointing(True)
    finally:
        timm.layers.set_reentrant_ckpt(False)


def test_stages_can_be_given_as_lengths_or_names():
    model = interlayer.attach(vit(), "mrla_base", stages=(6, 6))
    lengths = [block.interlayer_entries[0].place.length for _, block in attached_blocks(model)]
    assert lengths == [6] * 12
    model = interlayer.attach(resnet(), "mrla_base", stages=[["layer3.0", "layer3.1"], ["layer4.1"]])
    assert [name for name, _ in attached_blocks(model)] == ["layer3.0", "layer3.1", "layer4.1"]
    assert model(IMAGES).shape == (2, 5)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            (2, 2, 2),
            r"stages=\(2, 2, 2\) must be positive lengths that sum to the 8 blocks found \(layer1.0 to layer4.1\)",
        ),
        ((3, 5), "a stage must be of one shape, but layer1.1 returns"),
        ([["layer1.9"]], "stages= names 'layer1.9', which is no module of ResNet"),
        ([["layer1.0", "layer2.0"]], "a stage must be of one shape"),
        ([["layer1.1", "layer1.0"]], "layer1.0 does not take what layer1.1 returns"),
        ([["layer1.0"], ["layer1.0"]], "stages= names 'layer1.0' twice"),
        ([["layer1"]], "stages= names 'layer1', a plain Sequential: name the blocks inside it"),
        ([[]], r"stages must be lengths such as .* got \[\[\]\]"),
        (3, "stages must be lengths such as .* got 3"),
        ([2, ["layer1.0"]], "stages must be lengths such as"),
        (["layer1.0", "layer1.1"], "stages must be lengths such as"),
    ],
)
def test_bad_stages_say_what_is_wrong(stages, message):
    model = resnet()
    with pytest.raises(interlayer.AttachError, match=message):
        interlayer.attach(model, "mrla_base", stages=stages)
    assert not list(attached_blocks(model))


def test_stages_are_printed_as_a_table():
    stages = find_stages(resnet(), image_size=64)
    assert isinstance(stages, list)
    lines = str(stages).splitlines()
    assert lines[0].split() == ["stage", "blocks", "names", "channels", "resolution", "stride"]
    assert len(lines) == 1 + len(stages)
    assert lines[2].split() == ["1", "2", "layer2.0", "to", "layer2.1", "128", "8", "x", "8", "8"]
    assert str(find_stages(vit(depth=2))).splitlines()[1].split()[-4:] == ["4", "x", "4", "16"]


def test_bad_arguments_say_what_is_valid():
    with pytest.raises(ValueError, match=r"unknown mechanism 'mrla', did you mean mrla_light\?"):
        interlayer.attach(resnet(), "mrla")
    with pytest.raises(TypeError, match="mrla_base has no option 'memory', expected one of projection, value_conv"):
        interlayer.attach(resnet(), "mrla_base", memory=False)
    with pytest.raises(TypeError, match=r"attach expects a torch.nn.Module, got str"):
        interlayer.attach("resnet18", "mrla_base")
    with pytest.raises(ValueError, match=r"drop_path must be a probability below 1, .*, got 1\.5"):
        interlayer.attach(resnet(), "mrla_base", drop_path=1.5)
    with pytest.raises(ValueError, match="channels_per_head=0"):
        interlayer.attach(resnet(), "mrla_base", channels_per_head=0)
    with pytest.raises(TypeError, match=r"channels_per_head must be a whole number, got 16\.0"):
        interlayer.attach(resnet(), "mrla_base", channels_per_head=16.0)
    with pytest.raises(ValueError, match="crla has channels_per_head=1, got 4"):
        interlayer.attach(resnet(), "crla", channels_per_head=4)
    with pytest.raises(ValueError, match="expected channels divisible by channels_per_head=48, got 64"):
        interlayer.attach(resnet(), "mrla_base", channels_per_head=48)
    model = interlayer.attach(resnet(), "mrla_base")
    with pytest.raises(interlayer.AttachError, match="already has layer attention: detach it first"):
        interlayer.attach(model, "mrla_light")
    with pytest.raises(ValueError, match="has nothing attached"):
        interlayer.detach(resnet())


def test_channels_per_head_default_to_the_papers():
    def per_head(model):
        return {m.channels: m.channels // m.heads for m in attached_mechanisms(model).values()}

    assert per_head(interlayer.attach(resnet(), "mrla_light")) == {64: 32, 128: 32, 256: 32, 512: 32}
    assert set(per_head(interlayer.attach(vit(), "mrla_light")).values()) == {16}
    efficientnet = timm.create_model("efficientnet_b0", num_classes=5)
    assert set(per_head(interlayer.attach(efficientnet, "mrla_light")).values()) == {8}
    assert set(per_head(interlayer.attach(resnet(), "crla")).values()) == {1}
    regnet = timm.create_model("regnetx_002", num_classes=5)  # widths 24, 56, 152, 368: the largest divisor below 32
    assert per_head(interlayer.attach(regnet, "mrla_light")) == {24: 24, 56: 28, 152: 19, 368: 23}


def test_efficientnet_attaches_only_where_there_is_an_identity_skip():
    model = timm.create_model("efficientnet_b0", num_classes=5)
    interlayer.attach(model, "mrla_light")
    assert all(block.has_skip for _, block in attached_blocks(model))
    model = interlayer.attach(interlayer.detach(model), "mrla_light", blocks="all")
    assert not all(block.has_skip for _, block in attached_blocks(model))


def test_drop_path_is_the_mechanisms_own():
    model = interlayer.attach(resnet(drop_path_rate=0.1), "mrla_light", drop_path=0.3)
    assert {m.drop_path.drop_prob for m in attached_mechanisms(model).values()} == {0.3}
    assert model.layer4[1].drop_path.drop_prob == pytest.approx(0.1)
    model = interlayer.attach(vit(drop_path_rate=0.2), "mrla_light", drop_path="backbone")
    rates = [getattr(m.drop_path, "drop_prob", 0.0) for m in attached_mechanisms(model).values()]
    assert rates == pytest.approx([0.2 * i / 11 for i in range(12)])


def test_attention_follows_the_models_device_dtype_and_mode():
    model = interlayer.attach(resnet().double().eval(), "mrla_base")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert not any(m.training for m in model.modules())
    with torch.device("meta"):
        model = interlayer.attach(resnet(), "mrla_base")
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_the_probe_leaves_the_model_as_it_was():
    model = resnet()
    model.layer1.eval()
    modes = [m.training for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    interlayer.attach(model, "mrla_light")
    interlayer.detach(model)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def test_backbone_weights_load_before_or_after():
    trained = resnet().state_dict()
    first = resnet()
    first.load_state_dict(trained)
    torch.manual_seed(1)
    first = interlayer.attach(first, "mrla_light").eval()
    torch.manual_seed(1)
    second = interlayer.attach(resnet(), "mrla_light").eval()
    report = interlayer.load_backbone(second, trained)
    assert report.complete
    assert set(report.placed) == set(trained)
    second.load_state_dict(
        {k: v for k, v in first.state_dict().items() if ".mrla." in k}, strict=False
    )  # their attentions drew different random numbers
    assert torch.equal(first(IMAGES), second(IMAGES))


def test_load_backbone_lists_what_it_could_not_place_and_changes_nothing():
    model = interlayer.attach(resnet(), "mrla_light")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    wrong = dict(resnet().state_dict())
    wrong["extra.weight"] = wrong.pop("conv1.weight")
    wrong["fc.weight"] = torch.zeros(7, 512)
    with pytest.raises(ValueError, match="nothing was loaded") as raised:
        interlayer.load_backbone(model, wrong)
    for part in ("1 missing: conv1.weight", "1 unexpected: extra.weight", r"fc.weight (7, 512), expected (5, 512)"):
        assert part in str(raised.value)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    report = interlayer.load_backbone(model, wrong, strict=False)
    assert report.missing == ["conv1.weight"]
    assert torch.equal(model.state_dict()["bn1.weight"], wrong["bn1.weight"])


def test_residual_parts_are_timms_block():
    """`hosts/finding/components.py` must compute the same as timm's forward methods."""
    from interlayer.hosts.finding import components

    blocks = [timm.create_model(name, num_classes=5).layer2[0] for name in ("resnet18", "resnet26d", "seresnet50")]
    mobile = timm.create_model("mobilenetv2_100", num_classes=5)
    blocks += [mobile.blocks[0][0], mobile.blocks[1][0], mobile.blocks[1][1]]
    for block in blocks:
        channels = next(p for p in block.parameters() if p.dim() == 4).shape[1]
        x = torch.randn(1, 32 if channels == 1 else channels, 8, 8)
        block.eval()
        parts = components.run_block(block, x)
        torch.testing.assert_close(parts.output, block(x.clone()))
        skips = getattr(block, "has_skip", True)
        shortcut = (getattr(block, "downsample", None) or torch.nn.Identity())(x) if skips else None
        if shortcut is None:
            assert parts.shortcut is None
        else:
            torch.testing.assert_close(parts.shortcut, shortcut)
    selective = timm.create_model("skresnet18", num_classes=5).layer2[0]
    assert not components.projects(selective), "a block of another class must not be taken for timm's own"
    assert "SelectiveKernelBasic" in components.unsupported_reason(selective)


def test_published_light_reads_the_projected_shortcut():
    """In the first block of a ResNet stage, the shortcut and the input have different numbers of channels."""
    model = interlayer.attach(resnet(), "mrla_light", reading="published").eval()
    block = model.layer2[0]
    x = torch.randn(1, 64, 8, 8)
    seen = []
    hook = block.mrla.register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    block(x)
    hook.remove()
    torch.testing.assert_close(seen[0], block.downsample(x))


@pytest.mark.parametrize("options", [{"dynamic_img_size": True}, {"dynamic_img_size": True, "dynamic_img_pad": True}])
@pytest.mark.parametrize("prefix", [{}, {"reg_tokens": 4}, {"class_token": False, "global_pool": "avg"}])
def test_token_grids_come_from_the_patch_embedding(options, prefix):
    """6 x 2 and 3 x 4 patches have the same number of tokens, which does not determine the grid."""
    model = interlayer.attach(vit(**options, **prefix), "mrla_base").eval()
    seen = []
    hook = model.blocks[0].mrla.register_forward_pre_hook(lambda module, args: seen.append(args[6][:2]))
    for height, width in ((96, 32), (48, 64), (32, 96), (64, 64)):
        model(torch.randn(1, 3, height, width))
    hook.remove()
    assert seen == [(6, 2), (3, 4), (2, 6), (4, 4)]


def test_a_fixed_non_square_vit_keeps_its_grid():
    model = interlayer.attach(vit(img_size=(32, 96)), "mrla_light").eval()
    seen = []
    model.blocks[5].mrla.register_forward_pre_hook(lambda module, args: seen.append(args[6][:2]))
    model(torch.randn(1, 3, 32, 96))
    model.set_input_size(img_size=(64, 48))
    model(torch.randn(1, 3, 64, 48))
    assert seen == [(2, 6), (4, 3)]


def test_dropped_tokens_are_refused():
    model = interlayer.attach(vit(patch_drop_rate=0.5), "mrla_light").train()
    with pytest.raises(ValueError, match=r"8 patch tokens do not fill the grid \(4, 4\)"):
        model(IMAGES)


def test_a_block_in_mid_stage_cannot_be_run_without_its_memory():
    model = interlayer.attach(resnet(), "mrla_base").eval()
    with pytest.raises(RuntimeError, match="block 1 of stage 0 got no memory of 'mrla'"):
        model.layer1[1](torch.randn(1, 64, 8, 8))


def test_a_stage_can_be_run_twice_before_its_backward():
    """Nothing is stored on the modules, so two forward passes in flight are independent."""
    model = interlayer.attach(resnet(), "mrla_base").eval()
    model.set_grad_checkpointing(True)
    first, second = IMAGES.clone().requires_grad_(), (IMAGES + 1).requires_grad_()
    a, b = model(first), model(second)
    a.sum().backward()
    b.sum().backward()
    alone = (IMAGES + 1).requires_grad_()
    model(alone).sum().backward()
    torch.testing.assert_close(second.grad, alone.grad)


def test_carried_values_read_as_their_output():
    x = torch.randn(2, 4)
    carried = Carried(x, {"mrla": (x,)}, None)
    assert torch.equal(torch.relu(carried), torch.relu(x))
    assert torch.equal(carried[:, 1:], x[:, 1:])
    assert carried.shape == (2, 4)
    assert carried.reshape(-1).shape == (8,)
    leaves = torch.utils._pytree.tree_leaves(carried)
    assert len(leaves) == 2, "torch must find the tensors inside"
