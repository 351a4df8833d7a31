"""Functions on tensors. Each one has a reference implementation in plain PyTorch that defines its result."""

from .attention import attention
from .base_layer import base_layer
from .base_tokens import base_tokens
from .broadcast_context import broadcast_context
from .dispatch import backend, backends, choose_from_environment
from .feed_forward import feed_forward
from .halo_attention import halo_attention, halo_windows
from .layer_attention import depthwise_value, layer_attention, light_attention, linear_recurrence
from .layer_norm import layer_norm
from .light_layer import (
    BlockEnd,
    block_output,
    channel_projections,
    light_layer,
    masked_sum,
    normalize_shortcut,
    supports_open_end,
)
from .light_tokens import LayerNormArguments, light_tokens, tokens_to_map
from .linked import tensors_of
from .mixed_attention import MixedMaps, mixed_attention, mixed_attention_maps
from .pointwise import pointwise
from .residual_end import BatchNormArguments, residual_end
from .shrink import shrink

choose_from_environment()

__all__ = [
    "BatchNormArguments",
    "BlockEnd",
    "LayerNormArguments",
    "MixedMaps",
    "attention",
    "backend",
    "backends",
    "base_layer",
    "base_tokens",
    "block_output",
    "broadcast_context",
    "channel_projections",
    "depthwise_value",
    "feed_forward",
    "halo_attention",
    "halo_windows",
    "layer_attention",
    "layer_norm",
    "light_attention",
    "light_layer",
    "light_tokens",
    "linear_recurrence",
    "masked_sum",
    "mixed_attention",
    "mixed_attention_maps",
    "normalize_shortcut",
    "pointwise",
    "residual_end",
    "shrink",
    "supports_open_end",
    "tensors_of",
    "tokens_to_map",
]
