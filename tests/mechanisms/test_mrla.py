"""Tests of the variants and ablations of layer attention, and of their saved descriptions."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from layer_stages import STYLES, VARIANTS, run_stage, stage
from torch.autograd import gradcheck

from interlayer.mechanisms import MLA, MRLABase, MRLALight, MRLALinear
from interlayer.mechanisms.layer_attention import adaptive_kernel_size


@pytest.mark.parametrize(("channels", "size"), [(24, 3), (64, 3), (192, 5), (256, 5), (1024, 5), (2048, 7)])
def test_kernel_size_follows_the_width(channels, size):
    assert adaptive_kernel_size(channels) == size


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_a_whole_stage_are_exact(variant, style):
    layers = stage(VARIANTS[variant], layers=3, channels=4, channels_per_head=2, style=style, dtype=torch.float64)
    layers.eval()  # BatchNorm's batch statistics of so few elements amplify rounding
    maps = [torch.randn(2, 4, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    parameters = list(layers.parameters())
    assert gradcheck(lambda *inputs: tuple(run_stage(layers, inputs[:3])), (*maps, *parameters), atol=1e-4)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant, style):
    """DDP expects a gradient for every parameter, also in the first layer of a stage."""
    layers = stage(VARIANTS[variant], style=style)
    sum(o.square().sum() for o in run_stage(layers, torch.randn(3, 2, 16, 5, 4))).backward()
    assert [name for name, p in layers.named_parameters() if p.grad is None] == []


def test_light_unrolls_to_the_sum_of_equation_8():
    """O_t = sum over l of beta_l ⊙ gate V: the second equality of Eq. 8, computed without the recurrence."""
    layers = stage(MRLALight, dtype=torch.float64)
    maps = list(torch.randn(3, 2, 16, 5, 4, dtype=torch.float64))
    gated = []
    for layer, x in zip(layers, maps, strict=True):
        query, key = layer.project(x.mean((2, 3)))
        gate = torch.sigmoid((query * key).view(2, 4, 4).sum(-1) / 2).repeat_interleave(4, dim=1)
        gated.append(gate[..., None, None] * F.conv2d(x, layer.value.weight, padding=1, groups=16))
    expected = gated[2] + layers[2].decay[:, None, None] * (gated[1] + layers[1].decay[:, None, None] * gated[0])
    expected = maps[2] + layers[2].norm(expected)
    layers[2].norm.reset_running_stats()
    torch.testing.assert_close(run_stage(layers, maps)[2], expected)


def test_base_attends_to_all_layers_of_the_stage_and_only_to_them():
    layers = stage(MRLABase).eval()
    maps = list(torch.randn(3, 2, 16, 5, 4))
    outputs = run_stage(layers, maps)
    changed = run_stage(layers, [maps[0] + 1, *maps[1:]])
    assert not torch.allclose(outputs[2], changed[2]), "the last layer must read the first"
    later = run_stage(layers, [*maps[:2], maps[2] + 1])
    torch.testing.assert_close(outputs[1], later[1])  # and none reads a later one


def test_mla_derives_keys_and_values_anew():
    """In Eq. 4 the keys and values of layer 1 depend on the weights of layer t, in Eq. 6 on those of layer 1."""
    maps = list(torch.randn(2, 2, 16, 5, 4))
    for make, reads_own_weights in ((MLA, True), (MRLABase, False)):
        layers = stage(make, layers=2).eval()
        before = run_stage(layers, maps)[1]
        with torch.no_grad():
            layers[0].value.weight.mul_(2)
        assert torch.allclose(before, run_stage(layers, maps)[1]) == reads_own_weights


def test_linear_with_constant_memory_is_the_same_function():
    growing = stage(MRLALinear).eval()
    constant = stage(MRLALinear, constant_memory=True).eval()
    constant.load_state_dict(growing.state_dict())
    maps = list(torch.randn(3, 2, 16, 5, 4))
    for a, b in zip(run_stage(growing, maps), run_stage(constant, maps), strict=True):
        torch.testing.assert_close(a, b)


ABLATIONS = {
    "no memory": {"memory": False},
    "no depthwise conv": {"value_conv": False},
    "linear projections": {"projection": "linear"},
    "lambda one": {"learn_decay": False},
    "channels per head": {"channels_per_head": 8},
    "one channel per head": {"channels_per_head": 1},
    "depthwise conv alone": {"attention": False},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ablation", ABLATIONS)
def test_each_option_of_table_4_changes_the_result(ablation, style):
    """Shared parameters are set to equal values, so that only the option can change the result."""
    options = ABLATIONS[ablation]
    per_head = 16 if "projection" in options else 4
    plain = stage(MRLALight, style=style, channels_per_head=per_head).eval()
    other = stage(MRLALight, style=style, **{"channels_per_head": per_head, **options}).eval()
    shared = {k: v for k, v in plain.state_dict().items() if v.shape == other.state_dict().get(k, torch.zeros(0)).shape}
    other.load_state_dict(_without_description(shared), strict=False)
    maps = list(torch.randn(3, 2, 16, 5, 4))
    assert not torch.allclose(run_stage(plain, maps)[2], run_stage(other, maps)[2], atol=1e-4)


@pytest.mark.parametrize("options", [{"value_conv": False}, {"projection": "linear"}])
@pytest.mark.parametrize("make", [MRLABase, MLA, MRLALinear])
def test_options_change_the_other_variants_too(make, options):
    plain, other = (stage(make, channels_per_head=16, **chosen).eval() for chosen in ({}, options))
    shared = {k: v for k, v in plain.state_dict().items() if v.shape == other.state_dict().get(k, torch.zeros(0)).shape}
    other.load_state_dict(_without_description(shared), strict=False)
    maps = list(torch.randn(3, 2, 16, 5, 4))
    assert not torch.allclose(run_stage(plain, maps)[2], run_stage(other, maps)[2], atol=1e-4)


def test_linear_projections_are_fully_connected():
    layer = MRLALight(32, channels_per_head=16, projection="linear").eval()
    pooled = torch.randn(2, 32)
    query, key = layer.project(pooled)
    torch.testing.assert_close(query, pooled @ layer.query.weight.T)
    torch.testing.assert_close(key, pooled @ layer.key.weight.T)
    assert layer.query.weight.shape == (2, 32), "C to C / 16"


def _without_description(state_dict):
    return dict(state_dict)  # a plain dict has no metadata, as a file of tensors alone


def test_published_light_reads_the_shortcut():
    layer = MRLALight(16, channels_per_head=4, reading="published").eval()
    x, shortcut = torch.randn(2, 16, 5, 4), torch.randn(2, 16, 5, 4)
    assert layer.reads_shortcut
    output, memory, _ = layer(x, None, shortcut)
    assert memory is None, "the published light carries nothing along the stage"
    query, key = layer.project(x.mean((2, 3)))
    gate = torch.sigmoid((query * key).view(2, 4, 4).sum(-1) / 2).repeat_interleave(4, dim=1)[..., None, None]
    attended = gate * layer.value(x) + layer.decay[:, None, None] * shortcut
    torch.testing.assert_close(output, x + layer.norm(attended))


def test_published_base_has_a_relu_before_the_sum():
    paper = MRLABase(16, channels_per_head=4).eval()
    published = MRLABase(16, channels_per_head=4, reading="published").eval()
    published.load_state_dict(_without_description(paper.state_dict()))
    x = torch.randn(2, 16, 5, 4)
    torch.testing.assert_close(published(x)[0], x + F.relu(paper(x)[0] - x))


def test_published_transformers_add_the_normalised_prefix():
    prefix, x = torch.randn(64, 1, 16), torch.randn(64, 16, 3, 2)
    for make in (MRLALight, MRLABase):
        paper = make(16, channels_per_head=4, style="transformer")
        assert torch.equal(paper(x, prefix=prefix)[2], prefix)
        published = make(16, channels_per_head=4, style="transformer", reading="published", drop_path=0.5)
        output, _, changed = published(x, None, x, prefix)
        skipped = [torch.equal(a, b) for a, b in zip(output, x, strict=True)]
        assert skipped == [torch.equal(a, b) for a, b in zip(changed, prefix, strict=True)], "one mask a sample"
        assert 16 < sum(skipped) < 48
        torch.testing.assert_close(published.eval()(x, None, x, prefix)[2], prefix + published.norm_in(prefix))


OPTIONS = [{}, {"value_conv": False}, {"learn_decay": False}, {"memory": False}]
IDENTITIES = [
    pytest.param(make, option, style, reading, id=f"{variant} {style} {reading} {option}")
    for variant, make in VARIANTS.items()
    for option in (OPTIONS if make is MRLALight else OPTIONS[:2])
    for style in STYLES
    for reading in make.READINGS
]


@pytest.mark.parametrize(("make", "option", "style", "reading"), IDENTITIES)
def test_identity_start_changes_nothing_and_can_learn(make, option, style, reading):
    options = {"style": style, "reading": reading, "init": "identity", **option}
    if make is MRLABase and reading == "published" and style == "cnn":
        with pytest.raises(ValueError, match="its ReLU has no gradient"):
            stage(make, **options)
        return
    layers = stage(make, **options)
    maps = list(torch.randn(3, 2, 16, 5, 4))
    outputs = run_stage(layers, maps, shortcuts=maps)
    for output, x in zip(outputs, maps, strict=True):
        assert torch.equal(output, x)
    sum((output * torch.randn_like(output)).sum() for output in outputs).backward()
    assert all(any(p.grad.abs().sum() > 0 for p in layer.parameters()) for layer in layers), "nothing would be learned"


def test_drop_path_skips_whole_samples_in_training_only():
    layer = MRLALight(16, channels_per_head=4, drop_path=0.5)
    x = torch.randn(64, 16, 5, 4)
    skipped = sum(torch.equal(a, b) for a, b in zip(layer(x)[0], x, strict=True))
    assert 16 < skipped < 48
    assert not any(torch.equal(a, b) for a, b in zip(layer.eval()(x)[0], x, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels_per_head": 32}, "expected channels divisible by channels_per_head=32, got 80"),
        ({"channels_per_head": 0}, "channels_per_head=0"),
        ({"channels_per_head": 8, "projection": "linear"}, "needs channels_per_head divisible by 16, got 8"),
        ({"channels_per_head": 8, "style": "rnn"}, "style must be 'cnn' or 'transformer', got 'rnn'"),
        ({"channels_per_head": 8, "projection": "fc"}, "projection must be 'conv1d' or 'linear', got 'fc'"),
        ({"channels_per_head": 8, "init": "zero"}, "init must be 'paper' or 'identity', got 'zero'"),
        ({"channels_per_head": 8, "reading": "other"}, "MRLALight has reading='paper' or 'published', got 'other'"),
        ({"channels_per_head": 8, "attention": False, "value_conv": False}, "value_conv must be True"),
        ({"channels_per_head": 8, "attention": False, "learn_decay": False}, "learn_decay means nothing"),
        ({"channels_per_head": 8, "memory": False, "learn_decay": False}, "which memory=False leaves out"),
    ],
)
def test_bad_options_say_what_was_expected(options, message):
    with pytest.raises(ValueError, match=message):
        MRLALight(80, **options)


def test_wrong_width_is_named():
    with pytest.raises(ValueError, match=r"expected a map of 16 channels, got \(2, 8, 5, 4\)"):
        MRLALight(16, channels_per_head=4)(torch.randn(2, 8, 5, 4))


@pytest.mark.parametrize("make", [MLA, MRLALinear])
def test_variants_without_a_published_reading_say_so(make):
    with pytest.raises(ValueError, match=f"{make.__name__} has reading='paper', got 'published'"):
        make(16, channels_per_head=4, reading="published")


@pytest.mark.parametrize(
    ("saved", "loading", "sentence"),
    [
        (MRLALight(16, channels_per_head=4), MRLALight(16, channels_per_head=4, reading="published"), "reading=paper"),
        (MRLALight(16, channels_per_head=4), MRLALight(16, channels_per_head=8), "channels_per_head=4"),
        (MRLABase(16, channels_per_head=4), MRLALinear(16, channels_per_head=4), "mechanism=MRLABase"),
        (
            MRLALight(16, channels_per_head=4, memory=False),
            MRLALight(16, channels_per_head=4, learn_decay=False),
            "memory=False",
        ),
    ],
    ids=["reading", "channels_per_head", "mechanism", "memory"],
)
def test_equal_tensors_of_another_function_are_refused(saved, loading, sentence):
    """torch.save keeps the descriptions of mechanisms."""
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    state_dict = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert set(state_dict) == set(loading.state_dict())
    with pytest.raises(RuntimeError, match=f"was saved with {sentence}, this model has"):
        loading.load_state_dict(state_dict)
    copy.deepcopy(saved).load_state_dict(state_dict)
