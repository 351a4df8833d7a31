"""Tests of attach with the vision models of Hugging Face's transformers, made from small configurations."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

import interlayer
from interlayer.hosts import attached_mechanisms, find_stages
from interlayer.hosts.finding.layout import Layout

transformers = pytest.importorskip("transformers")

VIT = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
WIDE = {**VIT, "intermediate_size": 64}
SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
PYRAMID = {"hidden_sizes": [16, 16, 32, 32], "depths": [2, 1, 2, 1]}
MODELS = {  # class, configuration, options, prefix tokens, lengths of the stages
    "vit": ("ViTForImageClassification", "ViTConfig", WIDE, 1, [2, 1, 1]),
    "deit": ("DeiTForImageClassification", "DeiTConfig", WIDE, 2, [2, 1, 1]),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", VIT, 1, [2, 1, 1]),
    "registers": ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", VIT, 5, [2, 1, 1]),
    "msn": ("ViTMSNForImageClassification", "ViTMSNConfig", WIDE, 1, [2, 1, 1]),
    "beit": ("BeitForImageClassification", "BeitConfig", WIDE, 1, [2, 1, 1]),
    "data2vec": ("Data2VecVisionForImageClassification", "Data2VecVisionConfig", WIDE, 1, [2, 1, 1]),
    "clip": ("CLIPForImageClassification", "CLIPConfig", {"vision_config": WIDE}, 1, [2, 1, 1]),
    "swin": ("SwinForImageClassification", "SwinConfig", SWIN, 0, [2, 2]),
    "swinv2": ("Swinv2ForImageClassification", "Swinv2Config", SWIN, 0, [2, 2]),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", {**PYRAMID, "image_size": 64}, 0, [2, 1, 2, 1]),
    "resnet": (
        "ResNetForImageClassification", "ResNetConfig", {**PYRAMID, "embedding_size": 16, "layer_type": "basic"}, 0,
        [2, 1, 2, 1],
    ),
}  # fmt: skip
FIVE = ["vit", "deit", "dinov2", "swin", "convnext"]


def make(name, **options):
    model_class, config_class, config, *_ = MODELS[name]
    config = getattr(transformers, config_class)(num_labels=5, **config, **options)
    torch.manual_seed(0)
    return getattr(transformers, model_class)(config).eval()


def images(name, batch=2, height=None, width=None):
    size = 64 if name in ("swin", "swinv2", "convnext", "resnet") else 32
    return torch.randn(batch, 3, height or size, width or size)


def still(model):
    """Turns dropout and stochastic depth off, and everything else to training."""
    model.train()
    for module in model.modules():
        if "Drop" in type(module).__name__ or isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


@pytest.mark.parametrize("mechanism", ["mrla_light", "mrla_base"])
@pytest.mark.parametrize("name", MODELS)
def test_the_identity_start_gives_the_same_logits_and_every_parameter_learns(name, mechanism):
    model, x = make(name), images(name)
    *_, prefix, lengths = MODELS[name]
    stages = find_stages(model)
    assert [len(stage.blocks) for stage in stages] == lengths
    assert {stage.layout.prefix for stage in stages} == {prefix}
    expected, classes = model(x).logits, [type(module) for module in model.modules()]
    names = list(model.state_dict())
    interlayer.attach(model, mechanism, init="identity")
    output = model(pixel_values=x, output_hidden_states=True)
    assert torch.equal(output.logits, expected)
    assert all(type(state) is torch.Tensor for state in output.hidden_states)
    assert torch.equal(model(x, return_dict=False)[0], expected)
    interlayer.detach(model)
    assert [type(module) for module in model.modules()] == classes
    assert list(model.state_dict()) == names

    interlayer.attach(model, mechanism)
    assert not torch.equal(model(x).logits, expected)
    loss = model.train()(pixel_values=x, labels=torch.tensor([0, 1])).loss
    loss.backward()
    for place, module in attached_mechanisms(model).items():
        missing = [parameter for parameter, value in module.named_parameters() if value.grad is None]
        assert not missing, f"{place} got no gradient for {missing}"


def as_timm(model):
    """Returns timm's ViT with the weights of a ViTForImageClassification."""
    config = model.config
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=config.image_size, patch_size=config.patch_size, num_classes=5, mlp_ratio=2,
        embed_dim=config.hidden_size, depth=config.num_hidden_layers, num_heads=config.num_attention_heads,
    ).eval()  # fmt: skip
    embeddings = model.vit.embeddings
    with torch.no_grad():
        vit.cls_token.copy_(embeddings.cls_token)
        vit.pos_embed.copy_(embeddings.position_embeddings)
        vit.patch_embed.proj.load_state_dict(embeddings.patch_embeddings.projection.state_dict())
        for block, layer in zip(vit.blocks, model.vit.layers, strict=True):
            projections = [getattr(layer.attention, f"{each}_proj") for each in "qkv"]
            block.attn.qkv.weight.copy_(torch.cat([projection.weight for projection in projections]))
            block.attn.qkv.bias.copy_(torch.cat([projection.bias for projection in projections]))
            block.attn.proj.load_state_dict(layer.attention.o_proj.state_dict())
            block.norm1.load_state_dict(layer.layernorm_before.state_dict())
            block.norm2.load_state_dict(layer.layernorm_after.state_dict())
            block.mlp.fc1.load_state_dict(layer.mlp.fc1.state_dict())
            block.mlp.fc2.load_state_dict(layer.mlp.fc2.state_dict())
    vit.norm.load_state_dict(model.vit.layernorm.state_dict())
    vit.head.load_state_dict(model.classifier.state_dict())
    for norm in (vit.norm, *(n for block in vit.blocks for n in (block.norm1, block.norm2))):
        norm.eps = config.layer_norm_eps
    return vit


@pytest.mark.parametrize("mechanism", ["mrla_light", "mrla_base", "mla", "mrla_linear"])
def test_it_computes_what_the_same_network_of_timm_computes(mechanism):
    ours = make("vit")
    timms, x = as_timm(ours), images("vit")
    torch.testing.assert_close(timms(x), ours(x).logits, rtol=1e-4, atol=1e-5)
    for model in (ours, timms):
        torch.manual_seed(1)
        interlayer.attach(model, mechanism)
    torch.testing.assert_close(timms(x), ours(x).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2", "registers", "beit", "clip", "swin"])
def test_the_grid_is_that_of_the_image(name, monkeypatch):
    """Two images with equally many patches have different grids."""
    model = interlayer.attach(make(name), "mrla_base")
    grids = []
    to_tokens = Layout.to_tokens
    monkeypatch.setattr(Layout, "to_tokens", lambda *args: grids.append(args[2]) or to_tokens(*args))
    options = {} if name in ("dinov2", "registers") else {"interpolate_pos_encoding": True}
    for height, width in ((64, 128), (128, 64)):
        grids.clear()
        model(images(name, height=height, width=width), **options)
        patch = 4 if name == "swin" else 8
        assert grids[0] == (height // patch, width // patch)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_either_implementation_of_the_attention(attention):
    model = make("vit", attn_implementation=attention)
    x = images("vit")
    expected = model(x).logits
    interlayer.attach(model, "mrla_base", init="identity")
    assert torch.equal(model(x).logits, expected)
    if attention == "eager":
        assert len(model(x, output_attentions=True).attentions) == 4


@pytest.mark.parametrize("name", ["vit", "dinov2", "swin"])
def test_gradient_checkpointing_gives_the_same_gradients(name):
    model, x = still(interlayer.attach(make(name), "mrla_base")), images(name)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        model(x).logits.square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for parameter, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][parameter], gradient, msg=parameter)


def test_reentrant_checkpoints_are_refused():
    model = interlayer.attach(make("vit"), "mrla_base").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(RuntimeError, match="reentrant checkpoints do not carry the memory of a stage"):
        model(images("vit"))


@pytest.mark.parametrize("name", FIVE)
def test_copies_pickles_and_state_dicts(name):
    model, x = interlayer.attach(make(name), "mrla_light").eval(), images(name)
    expected = model(x).logits
    other = interlayer.attach(make(name), "mrla_light").eval()
    other.load_state_dict(model.state_dict())
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other):
        assert torch.equal(same(x).logits, expected)


def test_a_saved_folder_holds_the_plain_network_and_the_attention(tmp_path):
    model, x = interlayer.attach(make("vit"), "mrla_base", init="identity").eval(), images("vit")
    model.save_pretrained(tmp_path)
    interlayer.save_weights(model, tmp_path / "attached.safetensors")
    plain = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert plain.config.architectures == ["ViTForImageClassification"]
    assert torch.equal(plain(x).logits, model(x).logits)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    interlayer.save_weights(model, tmp_path / "attached.safetensors")
    attached = interlayer.attach(plain, "mrla_base")
    interlayer.load_weights(attached, tmp_path / "attached.safetensors")
    assert torch.equal(attached(x).logits, model(x).logits)


@pytest.mark.parametrize("name", ["vit", pytest.param("swin", marks=pytest.mark.slow)])
def test_compile_without_a_graph_break(name):
    model, x = interlayer.attach(make(name), "mrla_base").eval(), images(name)
    expected = model(x).logits
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x).logits, expected)


def test_the_network_inside_a_classifier_or_a_module_of_ones_own():
    """Hidden states of the middle of a stage are plain tensors wherever they are read."""
    model = make("vit")
    interlayer.attach(model, "mrla_base")
    inner = model.vit(images("vit"), output_hidden_states=True)
    assert len(inner.hidden_states) == 5
    assert all(type(state) is torch.Tensor for state in inner.hidden_states)
    wrapper = nn.Sequential(make("vit").vit)
    interlayer.attach(wrapper, "mrla_base")
    assert type(wrapper(images("vit")).last_hidden_state) is torch.Tensor


@pytest.mark.parametrize("where", ["end", "front", "attention", "both"])
@pytest.mark.parametrize("name", ["vit", "deit", "dinov2"])
def test_context_broadcasting(name, where):
    model, x = make(name), images(name)
    expected = model(x).logits
    interlayer.attach(model, "cb", where=where)
    assert not torch.allclose(model(x).logits, expected)
    interlayer.detach(model)
    interlayer.attach(model, "cb", where=where, scaled=True)
    assert torch.equal(model(x).logits, expected), "the scales start at zero"


@pytest.mark.parametrize("mask_ratio", [0.75, 0.0])
def test_shuffled_patches_are_refused(mask_ratio):
    """A masked autoencoder shuffles its patches, also if it keeps all of them."""
    model = transformers.ViTMAEModel(transformers.ViTMAEConfig(**WIDE, mask_ratio=mask_ratio))
    with pytest.raises(interlayer.AttachError, match="tokens and nothing tells their grid"):
        interlayer.attach(model, "mrla_light")


class Embedding(nn.Module):
    """Patches with one further token, before or after them."""

    def __init__(self, first):
        super().__init__()
        self.projection = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.first = first

    def forward(self, image):
        tokens = [self.projection(image).flatten(2).mT, self.token.expand(len(image), -1, -1)]
        return torch.cat(tokens[::-1] if self.first else tokens, 1)


@pytest.mark.parametrize("first", [True, False])
def test_a_token_behind_the_patches_is_no_prefix(first):
    blocks = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)]
    model = nn.Sequential(Embedding(first), *blocks)
    if first:
        interlayer.attach(model, "mrla_light", image_size=32)
        assert model(torch.randn(1, 3, 32, 64)).shape == (1, 33, 16)
    else:
        with pytest.raises(interlayer.AttachError, match="17 tokens and nothing tells their grid"):
            interlayer.attach(model, "mrla_light", image_size=32)
