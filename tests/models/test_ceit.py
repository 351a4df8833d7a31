"""Tests of CeiT, which timm does not have."""

import timm
import torch

import interlayer  # noqa: F401
from interlayer.models.networks.ceit import ClassTokenAttention, LocallyEnhancedFeedForward


def tiny(**options):
    return timm.create_model("ceit_tiny", **{"num_classes": 3, "img_size": 64, **options})


def test_feed_forward_sees_neighbours_and_lets_the_class_token_pass():
    layer = LocallyEnhancedFeedForward(8, 16).eval()
    x = torch.randn(1, 1 + 12, 8)
    y = layer(x, (3, 4))
    assert torch.equal(y[:, 0], x[:, 0])
    changed = x.clone()
    changed[:, 1 + 5] += 1  # row 1, column 1 of the 3 x 4 grid
    moved = (layer(changed, (3, 4)) - y)[0, 1:].abs().sum(-1).reshape(3, 4) > 1e-7
    assert moved[:3, :3].all()
    assert not moved[:, 3].any(), "column 3 is two columns away: a 3 x 3 convolution must not reach it"


def test_the_last_class_token_reads_those_of_all_layers():
    layer = ClassTokenAttention(8, 2, 4.0, 0.0).eval()
    tokens = torch.randn(1, 5, 8, requires_grad=True)
    layer(tokens).sum().backward()
    assert layer(tokens).shape == (1, 1, 8)
    assert (tokens.grad.abs().sum(-1) > 0).all()


def test_every_parameter_gets_a_gradient():
    model = tiny()
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_interface():
    model = tiny().eval()
    x = torch.randn(1, 3, 64, 64)
    tokens = model.forward_features(x)
    assert tokens.shape == (1, 17, 192)
    assert torch.equal(model.forward_head(tokens), model(x))
    assert model.forward_head(tokens, pre_logits=True).shape == (1, 192)
    final, features = model.forward_intermediates(x, indices=[3, 11])
    torch.testing.assert_close(final, tokens)
    assert [f.shape for f in features] == [(1, 192, 4, 4)] * 2
    features = timm.create_model("ceit_tiny", img_size=64, features_only=True, out_indices=(3, 7))
    assert [f.shape for f in features(x)] == [(1, 192, 4, 4)] * 2
    assert tiny(num_classes=0)(x).shape == (1, 192)


def test_checkpointing_gives_the_same_gradients():
    model = tiny().train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    x, gradients = torch.randn(2, 3, 64, 64), []
    for enabled in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(enabled)
        model(x).square().sum().backward()
        gradients.append(model.cls_token.grad.clone())
    torch.testing.assert_close(*gradients)
