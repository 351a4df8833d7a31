"""Tensors of earlier layers that pass through the operators of later layers, in the form for torch.compile.

Layer t of a stage reads the keys and values V_s of the layers s < t, and their gradients are accumulated from the last
layer to the first: G'_s = G_s + what layer t adds. For that, the function of layer t returns the V_s that it was given,
and layer t + 1 reads those. An operator for torch.compile may not return its arguments. It therefore gets the V_s
without a gradient, and beside them a link: zeros of the shape of all V_s stacked, without memory of their own, of which
nothing is read. It returns a new link, for the V_s up to its own, which layer t + 1 gets. The gradient of a link
consists of the gradients of the V_s, stacked. A V_s with its gradient is V_s + link[s].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Linked(NamedTuple):
    """Tensors of one shape and dtype, without a gradient, and the link that has theirs.

    Args:
        tensors: The tensors.
        link: The link, [number of tensors, ...], or None if there are no tensors or no gradients.
    """

    tensors: tuple[Tensor, ...]
    link: Tensor | None

    def extended(self, tensor: Tensor, link: Tensor) -> Linked:
        """Returns the tensors up to that of the next layer, with the link that its operator returned."""
        return Linked((*self.tensors, tensor), link if torch.is_grad_enabled() else None)


def linked(tensors: Sequence[Tensor] | Linked) -> Linked:
    """Returns tensors in the form for an operator."""
    if isinstance(tensors, Linked) and (tensors.link is not None or not torch.is_grad_enabled()):
        return tensors
    tensors = tuple(tensors.tensors if isinstance(tensors, Linked) else tensors)
    link = _link(list(tensors)) if tensors and torch.is_grad_enabled() else None
    return Linked(tuple(t.detach() for t in tensors), link)


def tensors_of(tensors: Sequence[Tensor] | Linked) -> tuple[Tensor, ...]:
    """Returns tensors with their gradients, as plain operators and eager code read them."""
    if not isinstance(tensors, Linked):
        return tuple(tensors)
    if tensors.link is None:
        return tensors.tensors
    return tuple(tensor + tensors.link[i] for i, tensor in enumerate(tensors.tensors))


def new_link(tensor: Tensor, number: int) -> Tensor:
    """Returns the link of some tensors of the shape of a given one."""
    return tensor.new_zeros(1).expand(number, *tensor.shape)


def new_stack(tensors: Sequence[Tensor]) -> Tensor:
    """Returns an empty tensor for the gradients of tensors, each with the strides of the first one."""
    first = tensors[0]
    return first.new_empty_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


@torch.library.custom_op("interlayer::link", mutates_args=(), schema="(Tensor[] tensors) -> Tensor")
def _link(tensors: list[Tensor]) -> Tensor:
    """Returns a link whose gradient becomes that of the tensors."""
    return new_link(tensors[0], len(tensors))


def _split(ctx: Any, grad: Tensor) -> list[Tensor]:
    return list(grad.unbind())


_link.register_fake(lambda tensors: new_link(tensors[0], len(tensors)))
_link.register_autograd(_split)
