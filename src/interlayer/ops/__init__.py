"""What is computed: plain functions on tensors, each with a reference that defines it."""

from importlib.util import find_spec

from .broadcast import broadcast_context
from .dispatch import backend, backends, choose_from_environment
from .halo import halo_attention
from .layer_attention import depthwise_value, layer_attention, light_attention, linear_recurrence
from .mixed_attention import attention, mixed_attention
from .recurrence import pointwise, residual_end
from .shrink import shrink
from .tokens import feed_forward, layer_norm

if find_spec("triton") is not None:  # not on every platform that torch runs on
    from ._triton import broadcast as _fused_broadcast  # noqa: F401  adds itself to its operation
    from ._triton import halo as _fused_halo  # noqa: F401
    from ._triton import mixed_attention as _fused_mixed_attention  # noqa: F401
    from ._triton import residual_end as _fused_residual_end  # noqa: F401
    from ._triton import shrink as _fused_shrink  # noqa: F401
    from ._triton import tokens as _fused_tokens  # noqa: F401

choose_from_environment()

__all__ = [
    "attention",
    "backend",
    "backends",
    "broadcast_context",
    "depthwise_value",
    "feed_forward",
    "halo_attention",
    "layer_attention",
    "layer_norm",
    "light_attention",
    "linear_recurrence",
    "mixed_attention",
    "pointwise",
    "residual_end",
    "shrink",
]
