"""Tests that common uses of timm models work with a recurrent state or a gate inside the blocks."""

import copy
import pickle

import pytest
import timm
import torch
from timm.models.resnet import Bottleneck, ResNet
from torch import nn

import interlayer
from interlayer.hosts import attached_mechanisms, entry_of
from interlayer.mechanisms import RLA, Place

SMALL = {"num_classes": 5}
HOSTS = ["resnet18", "mobilenetv2_050", "preresnet20_cifar", pytest.param("xception_cifar", marks=pytest.mark.slow)]
GATES = ["se", "eca", "cbam", "gc", "nl", "dia", "bridge"]


def small_resnet():
    return ResNet(Bottleneck, (1, 2, 1, 1), channels=(8, 16, 16, 16), num_classes=7)


def make(name="resnet18", mechanism="rla", **options):
    return interlayer.attach(timm.create_model(name, **SMALL), mechanism, image_size=32, **options)


def images(batch=2, size=32):
    return torch.randn(batch, 3, size, size)


@pytest.mark.parametrize("name", HOSTS)
def test_attached_detached_and_loaded(name):
    """The identity preserves the logits, detaching restores the network, and its weights load into an attached one."""
    plain = timm.create_model(name, **SMALL).eval()
    image = images()
    logits = plain(image)
    weights = copy.deepcopy(plain.state_dict())
    model = interlayer.attach(plain, "rla", init="identity", state_channels=4, image_size=32)
    torch.testing.assert_close(model(image), logits)
    assert type(interlayer.detach(model)) is type(timm.create_model(name, **SMALL))
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in weights.items()}
    torch.testing.assert_close(model(image), logits)
    other = make(name, init="identity", state_channels=4).eval()
    report = interlayer.load_backbone(other, weights)
    assert report.complete, report
    torch.testing.assert_close(other(image), logits)


@pytest.mark.parametrize("name", HOSTS)
def test_every_parameter_gets_a_gradient(name):
    model = make(name).train()
    model(images(size=64 if name == "resnet18" else 32)).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()] == []


@pytest.mark.parametrize("name", HOSTS)
def test_timms_interface(name):
    model = make(name, state_channels=4).eval()
    image = images()
    features = model.forward_features(image)
    assert features.shape[1] == model.num_features
    torch.testing.assert_close(model.forward_head(features), model(image))
    last, intermediates = model.forward_intermediates(image)
    torch.testing.assert_close(last, features)
    assert all(type(feature) is torch.Tensor for feature in intermediates)
    only = timm.create_model(name, features_only=True)
    expected = [tuple(feature.shape) for feature in only(image)]
    attached = interlayer.attach(only, "rla", image_size=32).eval()
    assert [tuple(feature.shape) for feature in attached(image)] == expected
    assert next(module for module in attached.modules() if isinstance(module, RLA)).norm is None
    model.reset_classifier(3)
    assert model(image).shape == (2, 3)
    model.reset_classifier(0)
    assert model(image).shape == (2, model.num_features)


def test_copies_pickles_and_checkpoints():
    model = make().eval()
    image = images()
    expected = model(image)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(image), expected)
        assert entry_of(other.layer1[0], "rla").shared is other.rla, "a copy must refer to its own aggregation"
    model.train()
    gradients = []
    for checkpointing in (False, True):
        run = copy.deepcopy(model)
        run.set_grad_checkpointing(checkpointing)
        run(image).square().sum().backward()
        gradients.append([p.grad for p in run.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("mechanism", ["rla", "dia"])
def test_compiles_in_one_graph(mechanism):
    model = interlayer.attach(small_resnet(), mechanism, image_size=64).double()
    image = images(size=64).double()
    expected = copy.deepcopy(model)(image)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(image), expected)


def test_a_saved_model_records_what_its_tensors_do_not_tell(tmp_path):
    """The published rlav1 checkpoints are resnet50_rla with tanh on the last state, which a file must record."""
    model = make(reading="published", head_activation="tanh")
    interlayer.save_weights(model, tmp_path / "a.safetensors")
    with pytest.raises(interlayer.CheckpointError, match="rla was saved with head_activation=tanh, this model has"):
        interlayer.load_weights(make(reading="published"), tmp_path / "a.safetensors")
    interlayer.load_weights(make(reading="published", head_activation="tanh"), tmp_path / "a.safetensors")
    with pytest.raises(RuntimeError, match="was saved with insert=output, this model has insert=branch"):
        make().load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_tiny_patch16_224", "they are neither timm's ResNet blocks nor its MobileNetV2 blocks"),
        ("efficientnet_b0", "its SqueezeExcite would have to read the state too"),
        ("convnext_atto", "they are neither timm's ResNet blocks nor its MobileNetV2 blocks"),
        ("densenet100_cifar", "they are neither timm's ResNet blocks nor its MobileNetV2 blocks"),
        # blocks that could be entered beside others that cannot: never a part of the network alone
        ("mobilenetv3_small_050", r"cannot enter, blocks\.0\.0: its SqueezeExcite would have to read the state too"),
        ("efficientnet_es", r"EdgeResidual is neither"),
        ("mixnet_s", "it is not the plain inverted residual of MobileNetV2"),
        ("preresnet164_cifar_dpn", "no sum of a branch and a shortcut"),
    ],
)
def test_other_networks_are_refused_with_the_reason(name, reason):
    model = timm.create_model(name, **SMALL)
    before = type(model)
    with pytest.raises(interlayer.AttachError, match=reason):
        interlayer.attach(model, "rla")
    assert type(model) is before


def test_what_has_no_shortcut_or_no_published_program_is_refused():
    with pytest.raises(interlayer.AttachError, match="insert='shortcut' has nothing to read there"):
        make("mobilenetv2_050", variant="v5")
    with pytest.raises(interlayer.AttachError, match="rla has reading='paper' here"):
        make("preresnet20_cifar", reading="published")


@pytest.mark.parametrize(
    "order", [("eca", "rla", "mrla_light"), ("mrla_light", "rla", "eca"), ("rla", "eca", "mrla_base")]
)
def test_companions_compose_in_any_order(order):
    """The order of attaching does not matter: ECA on the branch, RLA reads its result, layer attention follows."""
    model = timm.create_model("resnet18", **SMALL)
    for mechanism in order:
        interlayer.attach(model, mechanism, image_size=32)
    names = attached_mechanisms(model)
    assert {"rla", "layer1.0.eca_gate", "layer1.0.mrla"} <= set(names)
    model.train()
    model(images(size=64)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    same = timm.create_model("resnet18", **SMALL)
    for mechanism in sorted(order):
        interlayer.attach(same, mechanism, image_size=32)
    same.load_state_dict(model.state_dict())
    image = images()
    torch.testing.assert_close(same.eval()(image), model.eval()(image))
    for mechanism in ("rla", "eca", "mrla_light"):
        with pytest.raises(interlayer.AttachError, match="already has"):
            interlayer.attach(model, mechanism, image_size=32)
    interlayer.detach(model)
    assert list(model.state_dict()) == list(timm.create_model("resnet18", **SMALL).state_dict())


def test_a_failed_attachment_leaves_the_others():
    model = make()
    image = images()
    expected = model.eval()(image)
    with pytest.raises(interlayer.AttachError):
        interlayer.attach(model, "mrla_light", stages=[["layer1.0", "layer2.0"]], image_size=32)
    torch.testing.assert_close(model(image), expected)


def test_rla_reads_what_eca_gives():
    """Section 4.2: the output of the ECA module is passed to RLA through the shared 1x1 convolution."""
    model = interlayer.attach(timm.create_model("resnet50_eca", num_classes=3), "rla", image_size=32).eval()
    block = model.layer1[0]
    seen = {}
    block.se.register_forward_hook(lambda module, args, output: seen.update(eca=output))
    states = []
    update = model.rla.update
    model.rla.update = lambda s, b, state, inserted: states.append(inserted) or update(s, b, state, inserted)
    model(images())
    expected = model.rla.stages[0].compress[0](seen["eca"])
    torch.testing.assert_close(states[0], expected)


@pytest.mark.parametrize("gate", GATES)
def test_gates_change_the_branch_and_train(gate):
    every = {"blocks": "all"} if gate == "nl" else {}
    model = interlayer.attach(small_resnet(), gate, image_size=64, **every)
    image = images(size=64)
    model(image).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    plain = small_resnet().eval()
    nn.Module.load_state_dict(plain, {k: v for k, v in model.state_dict().items() if f"{gate}_gate." not in k})
    for module in (*plain.modules(), *model.modules()):
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # timm starts branches at zero, where no gate could be seen
    if gate == "nl":
        nn.init.ones_(model.layer2[0].nl_gate.attention.norm.weight)
    assert not torch.allclose(model.eval()(image), plain(image), atol=1e-6)
    interlayer.detach(model)
    torch.testing.assert_close(model(image), plain(image))


def test_dia_carries_its_state_along_a_stage():
    """The LSTM of a stage reads the averages sequentially; computed explicitly for the two blocks of a stage."""
    model = interlayer.attach(small_resnet(), "dia", image_size=64)
    of_input, of_hidden = model.dia_gate.stages[1]
    first, second = torch.randn(2, 64, 3, 3), torch.randn(2, 64, 3, 3)
    h = c = torch.zeros(2, 64)
    memory = None
    for y in (first, second):
        i, g, f, o = (of_input(y.mean((2, 3))) + of_hidden(h)).split(64, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.sigmoid(c)
        gated, memory = model.dia_gate.gate(y, [], memory, Place(1, 0, 2))
        torch.testing.assert_close(gated, y * h[:, :, None, None])


def test_bridge_attention_reads_every_convolution():
    model = interlayer.attach(small_resnet(), "bridge", image_size=64).eval()
    bridge = model.layer2[0].bridge_gate
    taps, y = [torch.randn(2, 16, 4, 4), torch.randn(2, 16, 2, 2)], torch.randn(2, 64, 2, 2)
    summed = sum(path(tap.mean((2, 3))) for path, tap in zip(bridge.bridges, (*taps, y), strict=True))
    expected = y * torch.sigmoid(bridge.scale(summed.relu()))[:, :, None, None]
    torch.testing.assert_close(bridge.gate(y, taps, None, Place(1, 0, 2))[0], expected)
    with pytest.raises(interlayer.AttachError, match="bridge attention joins the convolutions of a ResNet's block"):
        make("mobilenetv2_050", "bridge")


def test_a_failed_attachment_leaves_the_weights():
    """timm initializes branches to zero; they are changed only if the network runs with the state."""
    model = timm.create_model("resnet18", global_pool="catavgmax", **SMALL)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(interlayer.AttachError, match="build the network with global_pool='avg'"):
        interlayer.attach(model, "rla")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.layer1[0].bn2.weight.any()
    assert make().layer1[0].bn2.weight.all(), "a branch that the state reads must not start at zero"


def test_a_block_of_ones_own_keeps_its_forward():
    """A subclass of timm's block with another forward method must not be run like timm's block."""

    class Own(Bottleneck):
        def forward(self, x):
            return super().forward(x) * 3

    model = ResNet(Own, (1, 1, 1, 1), channels=(8, 16, 16, 16), num_classes=7)
    with pytest.raises(interlayer.AttachError, match="Own runs in another way than timm's ResNet blocks"):
        interlayer.attach(model, "rla")


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_050"])
@pytest.mark.parametrize("mechanism", ["rla", "dia", "eca"])
def test_networks_of_features_train(name, mechanism):
    """A detector does not read the last state, so the modules that compute it must not exist: DDP would fail."""
    if (name, mechanism) == ("mobilenetv2_050", "dia"):
        pytest.skip("stages of several widths")
    model = interlayer.attach(timm.create_model(name, features_only=True), mechanism, image_size=32).train()
    sum(feature.square().sum() for feature in model(images(size=64))).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_features_as_a_dict_are_plain():
    model = timm.create_model("resnet18", features_only=True, feature_cls="dict")
    features = interlayer.attach(model, "rla", image_size=32)(images())
    assert {type(feature) for feature in features.values()} == {torch.Tensor}


def test_a_network_that_stops_early_gives_its_map_alone():
    """The state is joined to the last map, also if other stages have the same number of channels."""
    model = ResNet(Bottleneck, (1, 1, 1, 1), channels=(8, 8, 8, 8), num_classes=7)
    interlayer.attach(model, "rla", state_channels=4)
    early, _ = model.forward_intermediates(images(size=64), indices=[1], stop_early=True)
    last, _ = model.forward_intermediates(images(size=64))
    assert (early.shape[1], last.shape[1]) == (32, 36)


@pytest.mark.parametrize("backend", ["recompute", "scaled", "reference"])
def test_a_backend_asked_for_by_name_builds_and_evaluates(backend):
    with interlayer.backend(backend):
        model = make()
        model.train()(images(size=64)).sum().backward()
        model.eval()(images())


def test_scores_of_layer_attention_beside_others():
    """The heatmaps of a comparison's report are also drawn for networks with several mechanisms."""
    model = make("preresnet20_cifar")
    interlayer.attach(model, "eca", image_size=32)
    interlayer.attach(model, "mrla_light", channels_per_head=8, image_size=32)
    assert [stage.scores.shape[-1] for stage in interlayer.layer_scores(model, images())] == [3, 3, 3]
    with pytest.raises(ValueError, match="has no layer attention attached"):
        interlayer.layer_scores(make(), images())
