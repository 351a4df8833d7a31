"""Context broadcasting in Hugging Face's ViLT, a transformer over text and image tokens in one sequence.

Paper: Scratching Visual Transformer's Back with Uniform Attention, ICCV 2023, section 4.7: on image tokens, text tokens
or both. Padding takes no part in the mean and is left as it is.

ViLT's embedding knows which tokens are which; it notes that for the blocks of the same forward pass.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..mechanisms.broadcast import ContextBroadcast
from .carry import Extended, extend, restore
from .probe import match

Tokens = Literal["image", "text", "both"]
SLOT = "cb"  # the name under which a part of a block holds its broadcast


class NotingTokens(Extended):
    """ViltEmbeddings that note which tokens of the sequence are broadcast to."""

    interlayer_tokens: Tokens
    interlayer_chosen: Tensor  # [B, N]

    def forward(self, input_ids: Tensor | None, attention_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        embeddings, mask = super().forward(input_ids, attention_mask, *args, **kwargs)  # type: ignore[misc]
        is_text = torch.arange(mask.shape[1], device=mask.device) < attention_mask.shape[1]
        chosen = mask != 0
        if self.interlayer_tokens != "both":
            chosen = chosen & (is_text if self.interlayer_tokens == "text" else ~is_text)
        self.__dict__["interlayer_chosen"] = chosen
        return embeddings, mask


class BroadcastingOutput(Extended):
    """ViltOutput, the end of a block's MLP and its shortcut, with broadcasting before the shortcut is added."""

    interlayer_embeddings: tuple[Any]

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        block: Any = self
        (embeddings,) = self.interlayer_embeddings
        output = block.dropout(block.dense(hidden_states))
        return getattr(block, SLOT)(output, embeddings.interlayer_chosen) + input_tensor


def place_in_vilt(vilt: Any, *, upper: bool, scaled: bool, tokens: Tokens) -> None:
    layers = list(vilt.encoder.layer)
    for layer in layers[len(layers) // 2 if upper else 0 :]:
        broadcast = ContextBroadcast(vilt.config.hidden_size, scaled=scaled)
        match(broadcast, layer)
        layer.output.add_module(SLOT, broadcast)
        layer.output.__dict__["interlayer_embeddings"] = (vilt.embeddings,)
        extend(layer.output, BroadcastingOutput)
    vilt.embeddings.interlayer_tokens = tokens
    extend(vilt.embeddings, NotingTokens)


def take_out_of_vilt(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, BroadcastingOutput):
            delattr(module, SLOT)
            del module.__dict__["interlayer_embeddings"]
            restore(module)  # type: ignore[arg-type]
        elif isinstance(module, NotingTokens):
            module.__dict__.pop("interlayer_chosen", None)
            del module.interlayer_tokens
            restore(module)  # type: ignore[arg-type]
