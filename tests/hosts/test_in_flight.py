"""Tests that the grid and the mask of tokens are passed with the tokens, so that two inputs can be in flight."""

import pytest
import timm
import torch

import interlayer
from interlayer.hosts.carried import GridPassing, Passing

SIZES = [(96, 32), (48, 64)]  # 6 x 2 and 3 x 4 patches: as many tokens


def flexible(name="vit_tiny_patch16_224", **options):
    options = {"num_classes": 5, "img_size": 64, "dynamic_img_size": True, "depth": 4, **options}
    return timm.create_model(name, **options)


@pytest.mark.parametrize("mechanism", ["mrla_light", "mrla_base"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {"reg_tokens": 4, "pre_norm": True}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("eva02_tiny_patch14_224", {"patch_size": 16}),
    ],
)
def test_two_grids_of_as_many_tokens_under_gradient_checkpointing(name, options, mechanism):
    """The blocks are recomputed for the first image after the second image has passed through them."""
    model = interlayer.attach(flexible(name, **options), mechanism)
    for module in model.modules():
        if isinstance(module, (torch.nn.Dropout, timm.layers.DropPath)):
            module.eval()
    images = [torch.randn(2, 3, *size) for size in SIZES]

    def gradients(checkpointing):
        model.set_grad_checkpointing(checkpointing)
        model.train()
        model.zero_grad()
        losses = [model(image).square().sum() for image in images]
        sum(losses).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected, ours = gradients(False), gradients(True)
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5)


def test_the_grid_travels_through_blocks_without_attention():
    model = interlayer.attach(flexible(depth=6), "mrla_base", stages=[["blocks.1"], ["blocks.4", "blocks.5"]]).eval()
    seen = []
    for index in (1, 4, 5):
        model.blocks[index].mrla.register_forward_pre_hook(lambda m, args: seen.append(args[6][:2]))
    for size in SIZES:
        assert model(torch.randn(1, 3, *size)).shape == (1, 5)
    assert seen == [(6, 2)] * 3 + [(3, 4)] * 3
    interlayer.detach(model)
    assert not any(isinstance(module, (GridPassing, Passing)) for module in model.modules())


def test_nothing_is_kept_on_the_patch_embedding():
    model = interlayer.attach(flexible(), "mrla_base").eval()
    before = set(model.patch_embed.__dict__)
    model(torch.randn(1, 3, 96, 32))
    assert set(model.patch_embed.__dict__) == before
    assert type(model.patch_embed).__name__ == "PatchEmbed"


def test_two_batches_of_vilt_in_flight_under_gradient_checkpointing():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.ViltConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        vocab_size=40, max_position_embeddings=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_image_length=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = interlayer.attach(transformers.ViltModel(config), "cb", tokens="text", blocks="all").train()
    words = torch.randint(0, 40, (2, 2, 6))
    masks = torch.ones(2, 2, 6, dtype=torch.long)
    masks[1, :, 3:] = 0
    pixels = torch.randn(2, 2, 3, 32, 32)

    def gradients(checkpointing):
        (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
        model.zero_grad()
        torch.manual_seed(1)
        batches = zip(words, masks, pixels, strict=True)
        outputs = [model(input_ids=w, attention_mask=m, pixel_values=p) for w, m, p in batches]
        sum(output.last_hidden_state[:, :6].square().sum() for output in outputs).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected, ours = gradients(False), gradients(True)
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5)
    states = model(input_ids=words[0], pixel_values=pixels[0], output_hidden_states=True).hidden_states
    assert all(type(state) is torch.Tensor for state in states)
