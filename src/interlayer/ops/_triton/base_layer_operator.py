"""How a layer with MRLA-base runs at once, and in an operator that torch.compile takes as it is.

The function of a layer, a :class:`torch.autograd.Function`, returns the keys and values that it was given, so that
their gradients pass through all layers. An operator may not return its arguments: there the gradients pass through
links (see `linked.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..linked import Linked, new_link, new_stack
from .batch_norm import accumulator
from .own_gradients import references_of_own


class NothingSaved:
    """The context of a forward pass without a backward pass."""

    needs_input_grad = (False,)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


class Context(NothingSaved):
    """The context of a pass that a registered operator runs."""

    def __init__(self, differentiated: bool, saved: tuple[Tensor | None, ...] = (), **attributes: Any) -> None:
        self.needs_input_grad = (differentiated,)
        self.saved_tensors = saved
        vars(self).update(attributes)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


Memory = tuple[Tensor, ...] | Linked


def run_at_once(
    function: Any, arguments: tuple[Any, ...], earlier: int
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Runs the function of a layer and returns x', p, and the keys and values of all layers."""
    if torch.is_grad_enabled():
        references_of_own(arguments[0].device)
        outputs = function.apply(*arguments)
    else:
        outputs = function.forward(NothingSaved(), *arguments)  # autograd takes longer than a small kernel
    x, weights, *memory = outputs
    return x, weights, tuple(memory[: earlier + 1]), tuple(memory[earlier + 1 :])


def run_in_operator(
    function: Any, context: Context, arguments: tuple[Any, ...], earlier: int
) -> tuple[Tensor | None, ...]:
    """Runs the forward pass of a function in an operator, which may not return the earlier keys and values.

    Returns:
        x', p, the links of the keys and values so far (see `linked.py`), k and V.
    """
    result, weights, *memory = function.forward(context, *arguments)
    key, value = memory[earlier], memory[-1]
    return result, weights, *_links(key, value, earlier + 1, any(context.needs_input_grad)), key, value


def fake_results(x: Tensor, value: Tensor, earlier: int, heads: int, differentiated: bool) -> tuple[Tensor | None, ...]:
    """Returns tensors like those of `run_in_operator`, without values, given one like V."""
    (batch, channels), acc = value.shape[:2], accumulator(x)
    key = x.new_empty((batch, channels), dtype=acc)
    weights = x.new_empty((batch, heads, earlier + 1), dtype=acc)
    return torch.empty_like(x), weights, *_links(key, value, earlier + 1, differentiated), key, value


def _links(key: Tensor, value: Tensor, layers: int, differentiated: bool) -> tuple[Tensor | None, Tensor | None]:
    """Returns the links of the keys and values so far, or None if there is no backward pass."""
    return (new_link(key, layers), new_link(value, layers)) if differentiated else (None, None)


def differentiate_in_operator(
    function: Any, context: Any, keys: Sequence[Tensor], values: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[tuple[Any, ...], Tensor | None, Tensor | None]:
    """Runs the backward pass of a function in an operator.

    Args:
        function: The function of the layer.
        context: Its context.
        keys: The keys of the earlier layers.
        values: The values of the earlier layers.
        grads: The gradients of x', p and the links.

    Returns:
        What the function returns, and the gradients of the links of the keys and values.
    """
    earlier = len(keys)
    context.stacks = key_stack, value_stack = (new_stack(keys), new_stack(values)) if earlier else (None, None)
    grad, grad_weights, *stacks = grads
    memory = chain.from_iterable((None,) * (earlier + 1) if stack is None else stack.unbind() for stack in stacks)
    with torch.no_grad():
        return function.backward(context, grad, grad_weights, *memory), key_stack, value_stack


def examined(tensors: Sequence[Tensor] | Linked) -> Sequence[Tensor]:
    """Returns the tensors whose properties are examined. Linked ones are like the last of them."""
    return tensors.tensors[-1:] if isinstance(tensors, Linked) else tensors
