"""What is computed: plain functions on tensors, each with a reference that defines it."""

from .dispatch import backend, backends, choose_from_environment
from .layer_attention import depthwise_value, layer_attention, light_attention, linear_recurrence

choose_from_environment()

__all__ = ["backend", "backends", "depthwise_value", "layer_attention", "light_attention", "linear_recurrence"]
