"""Tests of context broadcasting in Hugging Face's ViLT: only the chosen tokens, without padding, are averaged."""

import copy

import pytest
import timm
import torch

import interlayer
from interlayer.hosts.carried import Carried
from interlayer.mechanisms import ContextBroadcast

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def make_vilt(cls="ViltModel", **changes):
    config = transformers.ViltConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        vocab_size=40, max_position_embeddings=12, num_labels=3, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, cls)(config).eval()


def inputs(padding=2):
    torch.manual_seed(1)
    words = torch.randint(0, 40, (2, 6))
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 6 - padding :] = 0
    return {"input_ids": words, "attention_mask": mask, "pixel_values": torch.randn(2, 3, 32, 32)}


@pytest.mark.parametrize("tokens", ["image", "text", "both"])
@pytest.mark.parametrize("scaled", [False, True])
def test_which_tokens_take_part(tokens, scaled):
    """The end of the MLP of an upper block, compared with its submodules run directly."""
    plain = make_vilt()
    model = interlayer.attach(copy.deepcopy(plain), "cb", tokens=tokens, scaled=scaled)
    assert [n for n, m in model.named_modules() if isinstance(m, ContextBroadcast)] == [
        "encoder.layer.2.output.cb", "encoder.layer.3.output.cb",
    ]  # fmt: skip
    own, part = plain.encoder.layer[2].output, model.encoder.layer[2].output
    if scaled:
        torch.nn.init.normal_(part.cb.scale)
    given = inputs()
    hidden, shortcut = torch.randn(2, 6 + 17, 32), torch.randn(2, 6 + 17, 16)
    y = own.dense(hidden)
    chosen = torch.zeros(2, 23, dtype=torch.bool)
    if tokens != "image":
        chosen[:, :6] = given["attention_mask"] == 1
    if tokens != "text":
        chosen[:, 6:] = True
    expected = y.clone()
    for image in range(2):
        average = y[image, chosen[image]].mean(0)
        row = y[image, chosen[image]]
        expected[image, chosen[image]] = row + part.cb.scale * average if scaled else 0.5 * row + 0.5 * average
    seen = []
    hook = part.register_forward_pre_hook(lambda module, args: seen.append(args[1].memories["cb"]))
    model(**given)
    hook.remove()
    assert torch.equal(seen[0], chosen), "the embedding's choice must arrive with the tokens"
    torch.testing.assert_close(part(hidden, Carried(shortcut, {"cb": chosen})), expected + shortcut)


def test_what_stands_at_padding_changes_nothing():
    model = interlayer.attach(make_vilt(), "cb", blocks="all")
    given = inputs()
    other = {**given, "input_ids": given["input_ids"].clone()}
    other["input_ids"][0, 4:] = 7
    one, two = (model(**g).last_hidden_state[:, :6] for g in (given, other))  # ViLT shuffles its image tokens
    real = given["attention_mask"] == 1
    torch.testing.assert_close(one[real], two[real])
    assert not torch.allclose(one[~real], two[~real])


def test_it_trains_copies_and_comes_out_again(tmp_path):
    plain = make_vilt("ViltForQuestionAnswering")
    expected = plain(**inputs()).logits
    model = copy.deepcopy(interlayer.attach(copy.deepcopy(plain), "cb", scaled=True))
    torch.testing.assert_close(model(**inputs()).logits, expected)  # the scale starts at zero
    model(**inputs()).logits.sum().backward()
    assert model.vilt.encoder.layer[3].output.cb.scale.grad.abs().sum() > 0
    interlayer.save_weights(model, tmp_path / "vilt.safetensors")
    again = interlayer.attach(make_vilt("ViltForQuestionAnswering"), "cb", scaled=True)
    interlayer.load_weights(again, tmp_path / "vilt.safetensors")
    torch.testing.assert_close(interlayer.detach(model)(**inputs()).logits, expected)
    assert [n for n, m in model.named_modules() if isinstance(m, ContextBroadcast)] == []


def test_what_it_does_not_take_is_refused():
    with pytest.raises(interlayer.AttachError, match="at the end of its MLPs alone"):
        interlayer.attach(make_vilt(), "cb", where="middle")
    with pytest.raises(interlayer.AttachError, match="has image tokens alone"):
        interlayer.attach(timm.create_model("vit_tiny_patch16_224"), "cb", tokens="text")


def test_hidden_states_of_a_tuple_are_plain_too():
    model = interlayer.attach(make_vilt(), "cb")
    states = model(**inputs(), output_hidden_states=True, return_dict=False)[2]
    assert len(states) == 5
    assert all(type(state) is torch.Tensor for state in states)


def test_a_layer_without_the_chosen_tokens_says_so():
    model = interlayer.attach(make_vilt(), "cb")
    with pytest.raises(RuntimeError, match="run the model from its embeddings"):
        model.encoder.layer[3](torch.randn(1, 9, 16))


def test_reentrant_checkpoints_are_refused():
    """They would silently drop the gradients of every layer except the last."""
    model = interlayer.attach(make_vilt(), "cb").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(RuntimeError, match="reentrant checkpoints do not carry the chosen tokens"):
        model(**inputs())
