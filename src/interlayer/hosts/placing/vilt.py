"""Context broadcasting in Hugging Face's ViLT, a transformer over text and image tokens in one sequence.

Paper: Scratching Visual Transformer's Back with Uniform Attention, ICCV 2023, section 4.7: on image tokens, text tokens
or both. Padding is excluded from the mean and is not changed.

The embedding of ViLT determines which tokens are chosen. It returns the mask with the tokens, and every layer passes it
on to the next, so that two batches can be in flight at the same time.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...mechanisms.broadcast import ContextBroadcast
from ..block import hold
from ..carried import Carried, refuse_reentrant, release
from ..extending import Extended, extend, restore
from ..finding.probe import match

Tokens = Literal["image", "text", "both"]
KEY = "cb"  # name of the submodule of a component, and of the mask of chosen tokens in `Carried`


class ChoosingEmbeddings(Extended):
    """ViltEmbeddings that also return the mask [B, N] of the tokens that are broadcast to."""

    interlayer_tokens: Tokens

    def forward(self, input_ids: Tensor | None, attention_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        embeddings, mask = super().forward(input_ids, attention_mask, *args, **kwargs)  # type: ignore[misc]
        is_text = torch.arange(mask.shape[1], device=mask.device) < attention_mask.shape[1]
        chosen = mask != 0
        if self.interlayer_tokens != "both":
            chosen = chosen & (is_text if self.interlayer_tokens == "text" else ~is_text)
        return Carried(embeddings, {KEY: chosen}), mask


class CarryingLayer(Extended):
    """ViltLayer that passes the mask of chosen tokens on, and to the end of its MLP.

    Attributes:
        interlayer_last: whether it is the last layer, which returns plain tensors.
    """

    interlayer_last: bool

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(hidden_states, Carried):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        layer: Any = self
        refuse_reentrant(layer, "the chosen tokens")
        memories = hidden_states.memories
        attended = layer.attention(layer.layernorm_before(hidden_states.x), *args, **kwargs)
        joined = attended[0] + hidden_states.x
        inner = layer.intermediate(layer.layernorm_after(joined))
        broadcasts = isinstance(layer.output, BroadcastingOutput)
        output = layer.output(inner, Carried(joined, memories) if broadcasts else joined)
        return (output if self.interlayer_last else Carried(output, memories), *attended[1:])


class BroadcastingOutput(Extended):
    """ViltOutput, the end of the MLP, with broadcasting before the shortcut is added."""

    def forward(self, hidden_states: Tensor, input_tensor: Any) -> Tensor:
        block: Any = self
        if not isinstance(input_tensor, Carried):
            raise RuntimeError("the input of the layer has no mask of chosen tokens: run the model from its embeddings")
        chosen = input_tensor.memories[KEY]
        output = block.dropout(block.dense(hidden_states))
        broadcast = getattr(block, KEY)
        return (output if broadcast.switched_off else broadcast(output, chosen)) + input_tensor.x


class PlainOutputs(Extended):
    """ViltEncoder that returns plain tensors as hidden states."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)  # type: ignore[misc]
        if isinstance(result, tuple):
            return release(result)
        states = getattr(result, "hidden_states", None)
        if states is not None:
            result.hidden_states = release(states)
        return result


def place_in_vilt(vilt: Any, *, upper: bool, scaled: bool, tokens: Tokens) -> None:
    """Add context broadcasting to the layers of a ViltModel."""
    layers = list(vilt.encoder.layer)
    for layer in layers[len(layers) // 2 if upper else 0 :]:
        broadcast = ContextBroadcast(vilt.config.hidden_size, scaled=scaled)
        match(broadcast, layer)
        hold(layer.output, KEY, broadcast)
        extend(layer.output, BroadcastingOutput)
    for layer in layers:
        layer.interlayer_last = layer is layers[-1]
        extend(layer, CarryingLayer)
    vilt.embeddings.interlayer_tokens = tokens
    extend(vilt.embeddings, ChoosingEmbeddings)
    extend(vilt.encoder, PlainOutputs)


def take_out_of_vilt(model: nn.Module) -> None:
    """Undo `place_in_vilt`."""
    for module in list(model.modules()):
        if isinstance(module, BroadcastingOutput):
            delattr(module, KEY)
            restore(module, BroadcastingOutput)  # type: ignore[arg-type]
        elif isinstance(module, CarryingLayer):
            del module.interlayer_last
            restore(module, CarryingLayer)  # type: ignore[arg-type]
        elif isinstance(module, ChoosingEmbeddings):
            del module.interlayer_tokens
            restore(module, ChoosingEmbeddings)  # type: ignore[arg-type]
        elif isinstance(module, PlainOutputs):
            restore(module, PlainOutputs)  # type: ignore[arg-type]
