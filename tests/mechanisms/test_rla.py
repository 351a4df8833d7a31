"""Tests of the variants of recurrent layer aggregation against the equations of the paper."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.resnet import Bottleneck, ResNet
from torch import nn

import interlayer
from interlayer.mechanisms import RLA
from interlayer.mechanisms.rla import VARIANTS, StagePlan, pooled_to

K = 5


def small_resnet(**options):
    return ResNet(Bottleneck, (1, 2, 1, 1), channels=(8, 16, 16, 16), num_classes=7, **options)


def randomise(model):
    """Randomize the norms, because their initial values could hide errors."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias, 0, 0.2)
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model


def keras_gate(x):
    """The hard sigmoid of Keras, which is not that of PyTorch."""
    return torch.clip(0.2 * x + 0.5, 0, 1)


def by_definition(model, image, variant, activation=torch.tanh):
    """The figures of the paper computed explicitly, with concatenations and the weights of the library."""
    rla = model.rla
    x = model.maxpool(model.act1(model.bn1(model.conv1(image))))
    h = c = x.new_zeros(len(x), K, *x.shape[2:])
    for s, layer in enumerate((model.layer1, model.layer2, model.layer3, model.layer4)):
        stage = rla.stages[s]
        for t, block in enumerate(layer):
            shared = t if variant == "unshared" else 0
            g1, g2, norm = stage.compress[shared], stage.recurrent[shared], stage.norms[t]
            if variant == "no_exchange":
                first = F.conv2d(x, block.conv1.weight)
            else:
                weight = torch.cat((block.conv1.weight, stage.exchanges[t].weight), 1)
                first = F.conv2d(torch.cat((x, h), 1), weight)
            y = F.relu(block.bn2(block.conv2(F.relu(block.bn1(first)))))
            y = block.bn3(block.conv3(y))
            shortcut = x if block.downsample is None else block.downsample(x)
            output = F.relu(y + shortcut)
            if y.shape[2:] != h.shape[2:]:
                h, c = F.avg_pool2d(h, 2), F.avg_pool2d(c, 2)
            new = g1({"v3": output, "v4": output, "v5": shortcut, "v6": shortcut}.get(variant, y))
            if variant in ("v2", "v4", "v6"):
                h = g2(torch.tanh(norm(h))) + new
            elif variant == "postact":
                h = torch.tanh(norm(g2(h + new)))
            elif variant == "convlstm":
                i, f, o, g = g2.gates(torch.cat((torch.tanh(norm(new)), h), 1)).split(K, 1)
                c = keras_gate(f) * c + keras_gate(i) * torch.tanh(g)
                h = keras_gate(o) * torch.tanh(c)
            elif variant == "convgru":
                entered = torch.tanh(norm(new))
                r, z = torch.sigmoid(g2.gates(torch.cat((entered, h), 1))).split(K, 1)
                h = (1 - z) * h + z * torch.tanh(g2.candidate(torch.cat((entered, r * h), 1)))
            else:
                h = g2(torch.tanh(norm(h + new)))
            x = output
    last = activation(rla.norm(h))
    return model.fc(torch.cat((x, last), 1).mean((2, 3)))


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_its_figure(variant, training):
    """Also in training, where an addition in place that overwrites the branch would turn v1 into v3."""
    model = randomise(interlayer.attach(small_resnet(), "rla", variant=variant, state_channels=K)).double()
    model.train(training)
    image = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        expected = by_definition(model, image, variant)
        torch.testing.assert_close(model(image), expected, rtol=1e-9, atol=1e-9)
    gradients = []
    for run in (lambda: model(image), lambda: by_definition(model, image, variant)):
        model.zero_grad()
        run().square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(
            gradients[0][name], gradient, rtol=1e-7, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_branch_is_not_the_output():
    """v1 reads the branch and v3 the output. With equal weights they would agree if the branch were overwritten."""
    v1 = randomise(interlayer.attach(small_resnet(), "rla", state_channels=K)).eval()
    v3 = interlayer.attach(small_resnet(), "rla", variant="v3", state_channels=K).eval()
    nn.Module.load_state_dict(v3, dict(v1.state_dict()))  # a plain dict: without what tells the two apart
    image = torch.randn(1, 3, 64, 64)
    assert not torch.allclose(v1(image), v3(image), atol=1e-4)
    published = interlayer.attach(small_resnet(), "rla", reading="published", state_channels=K).eval()
    nn.Module.load_state_dict(published, dict(v1.state_dict()))
    torch.testing.assert_close(published(image), by_definition(v3, image, "v3", torch.relu))


@pytest.mark.parametrize(("variant", "computed"), [("v2", "v4"), ("v4", "v4"), ("v5", "v5"), ("v6", "v6")])
def test_the_published_reading_of_other_variants(variant, computed):
    """Where the authors' program has overwritten the branch with the output, v2 computes v4."""
    options = {"variant": variant, "reading": "published", "state_channels": K}
    model = randomise(interlayer.attach(small_resnet(), "rla", **options)).eval()
    image = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(model(image), by_definition(model, image, computed, torch.relu))


def test_the_additive_form():
    """Appendix A.3, Eq. 12: without nonlinearities h^t is the sum over k of g2^k g1 of the branch k - 1 blocks back."""
    blocks, channels = 4, 6
    rla = RLA([StagePlan([channels] * blocks, [nn.Identity()] * blocks)], state_channels=K, exchange=False).double()
    stage = rla.stages[0]
    stage.norms = nn.ModuleList(nn.Identity() for _ in range(blocks))
    branches = [1e-7 * torch.randn(2, channels, 5, 5, dtype=torch.float64) for _ in range(blocks)]  # tanh(u) = u here
    g1, g2 = stage.compress[0], stage.recurrent[0]
    with torch.no_grad():
        state = None
        for t, branch in enumerate(branches):
            state = rla.update(0, t, state, g1(branch))
        expected = torch.zeros_like(state)
        for lag, branch in enumerate(reversed(branches), start=1):
            term = g1(branch)
            for _ in range(lag):
                term = g2(term)
            expected += term
    torch.testing.assert_close(state, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("size", [(64, 64), (75, 51), (33, 97)])
def test_states_of_odd_maps_are_pooled_to_the_blocks_size(size):
    model = interlayer.attach(small_resnet(), "rla", state_channels=K)
    assert model(torch.randn(2, 3, *size)).shape == (2, 7)
    state = torch.arange(15.0).reshape(1, 1, 3, 5)
    pooled = pooled_to(torch.zeros(1, 1, 2, 3), state)
    assert pooled.tolist() == [[[[3.0, 5.0, 6.5], [10.5, 12.5, 14.0]]]]


def test_one_state_width_and_its_own_norms():
    model = interlayer.attach(small_resnet(), "rla", state_channels=K)
    assert model.num_features == 64 + K
    assert model.fc.in_features == 64 + K
    assert [len(stage.norms) for stage in model.rla.stages] == [1, 2, 1, 1]
    assert [len(stage.recurrent) for stage in model.rla.stages] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"variant": "v7"}, "unknown variant 'v7' of rla, expected one of v1, v2"),
        ({"joins": "after", "cell": "postact"}, "joins='after' is defined for cell='preact' alone"),
        ({"cell": "convlstm", "depthwise": True}, "depthwise=True is defined for"),
        ({"state_channels": 0}, "state_channels must be a whole number of at least 1, got 0"),
        ({"state_channels": 2.5}, "state_channels must be a whole number of at least 1, got 2.5"),
        ({"insert": "input"}, "insert must be 'branch' or 'output' or 'shortcut', got 'input'"),
        ({"head_activation": "gelu"}, "head_activation must be"),
    ],
)
def test_options_are_checked(options, reason):
    model = small_resnet()
    with pytest.raises(ValueError, match=reason):
        interlayer.attach(model, "rla", **options)
    assert type(model) is ResNet
    with pytest.raises(TypeError, match="rla has no option 'channels_per_head', expected one of"):
        interlayer.attach(model, "rla", channels_per_head=8)


def test_mobilenet_joins_behind_the_expansion():
    """The state and the expanded map pass the depthwise convolution; one convolution of both must give the same."""
    model = randomise(interlayer.attach(timm.create_model("mobilenetv2_050"), "rla", state_channels=K)).eval()
    block, path = model.blocks[1][0], model.rla.stages[1].exchanges[0]
    x, h = torch.randn(2, 8, 12, 12), torch.randn(2, K, 12, 12)
    expanded = block.bn1(block.conv_pw(x))
    joined = torch.cat((expanded, h), 1)
    inside = F.conv2d(joined, torch.cat((block.conv_dw.weight, path[0].weight)), stride=2, padding=1, groups=48 + K)
    inside = torch.cat((block.bn2(inside[:, :48]), F.relu6(path[1](inside[:, 48:]))), 1)
    expected = block.bn3(F.conv2d(inside, torch.cat((block.conv_pwl.weight, path[3].weight), 1)))
    state = h
    output = interlayer.hosts.finding.components.run_block(block, x, addition=model.rla.read(1, 0, state, x)).output
    torch.testing.assert_close(output, expected)
    assert model.rla.stages[0].recurrent[0].groups == K
    assert len(model.rla.stages) == 5
    published = interlayer.attach(timm.create_model("mobilenetv2_050"), "rla", reading="published")
    assert published.rla.recurrent is not None, "the published program shares one convolution over all stages"
