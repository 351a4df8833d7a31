"""Recognizes spatial attention in the functions that a network calls, whatever its modules are.

Spatial attention is a call of `scaled_dot_product_attention` or `multi_head_attention_forward`, or a softmax over the
last dimension of products of queries and keys. A fused attention does not return its weights, so they are computed once
more from its arguments. Attention between channels (XCiT), which has as many queries and keys as a head has channels,
and attention between layers are left out.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..hosts.carried import Grid, release
from ..hosts.finding.layout import grids_in
from .attention_tokens import Moved, Movements, Tokens, tokens_of_windows, tokens_on_grid

LONGEST_PIXEL = 1.5  # the ratio of the sides of a pixel of a small map can differ from one, because sizes are rounded
MOST_PADDING = 64  # pixels; detectors and segmenters pad images to multiples of 32 at the right and at the bottom
RECENT = 16  # number of products and projections that are remembered
HEADS = ("num_heads", "heads", "num_attention_heads", "n_heads")  # attributes of modules
_SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, torch.einsum)
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


class Projection(NamedTuple):
    """A linear layer or convolution that was called.

    Args:
        tokens: number of tokens of the output, over all images and windows.
        widths: numbers of its input and output channels.
        moved: where the first two channels of its input come from, [..., 2], if it is applied to each token alone.
        running: the modules that were running.
    """

    tokens: int
    widths: tuple[int, int]
    moved: Moved | None
    running: tuple[nn.Module, ...]


class Product(NamedTuple):
    """A product of matrices.

    Args:
        size: number of its elements.
        keys: length of its rows.
        running: the modules that were running.
    """

    size: int
    keys: int
    running: tuple[nn.Module, ...]


class Arrangement(NamedTuple):
    """How the dimensions of attention weights are to be read.

    Args:
        windows: number of windows of an image; None for attention over the whole image.
        heads: number of heads.
        arrange: converts the weights to [B, heads, queries, keys] or [B, windows, heads, queries, keys].
    """

    windows: int | None
    heads: int
    arrange: Callable[[Tensor], Tensor]


@dataclass
class ForwardPass:
    """What has happened in a forward pass.

    Args:
        batch: number of images.
        given: height and width of the images that the network was given.
        image: height and width of the images in the first convolution, which may be resized and padded.
        grids: sizes of the maps that were computed, most recent last.
        stated: sizes of maps that were arguments of modules.
        products: products of matrices.
        projections: linear layers and convolutions.
        movements: where the values of tensors come from.
    """

    batch: int
    given: Grid
    image: Grid | None = None
    grids: list[Grid] = field(default_factory=list)
    stated: list[Grid] = field(default_factory=list)
    products: deque[Product] = field(default_factory=lambda: deque(maxlen=RECENT))
    projections: deque[Projection] = field(default_factory=lambda: deque(maxlen=RECENT))
    movements: Movements = field(default_factory=Movements)

    def is_map(self, grid: Grid) -> bool:
        """Whether a map of this size can be one of the image: its pixels are about as high as wide."""
        if self.image is None:
            return True
        ratio = (self.image[0] / grid[0]) / (self.image[1] / grid[1])
        return 1 / LONGEST_PIXEL <= ratio <= LONGEST_PIXEL

    @property
    def frame(self) -> tuple[float, float]:
        """Height and width of the given image as fractions of that in the first convolution, without its padding."""
        if self.image is None:
            return 1.0, 1.0
        ratios = [inner / given for inner, given in zip(self.image, self.given, strict=True)]
        is_padded = all(0 <= inner - given < MOST_PADDING for inner, given in zip(self.image, self.given, strict=True))
        scale = 1.0 if is_padded else min(ratios)
        return min(scale / ratios[0], 1.0), min(scale / ratios[1], 1.0)

    def note_grid(self, grid: Grid) -> None:
        if self.is_map(grid):
            self.grids.append(grid)


class AttentionWatch(TorchFunctionMode):
    """Calls a function for every spatial attention that is computed while it is active.

    Args:
        model: the network. `enter` and `leave` must be called before and after each of its modules.
        found: called with the name of the module, the weights, the queries, the keys and the frame of the image.
    """

    def __init__(self, model: nn.Module, found: Callable[..., None]) -> None:
        super().__init__()
        self.model, self.found = model, found
        self.names = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self.stack: list[nn.Module] = []  # the modules that are running, innermost last
        self.current: ForwardPass | None = None
        self.first: nn.Module | None = None  # with which the forward pass began
        self.channel_attentions = 0
        self.watched: dict[Any, Callable[..., None]] = {
            F.scaled_dot_product_attention: self._fused,
            F.multi_head_attention_forward: self._multi_head,
            F.linear: self._linear,
            F.conv2d: self._conv2d,
            **dict.fromkeys(_SOFTMAXES, self._softmax),
            **dict.fromkeys(_PRODUCTS, self._product),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.current is not None and self.stack:
            args, kwargs = release(args), release(kwargs)
            self.current.movements.follow(func, result, args, kwargs)
            if func in self.watched:
                self.watched[func](self.current, result, *args, **kwargs)
        return result

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes that a module starts to run."""
        if module is self.model:
            self.stack.clear()  # not empty if the network was left by an error
        arguments = (*release(args), *release(kwargs).values())
        # Where a part of the network is called, such as forward_features, modules run one after another, and only the
        # first one gets images; the others may get tokens, which look like a list of images.
        if not self.stack and (self.current is None or module in (self.model, self.first)):
            begun = _forward_pass(arguments)
            if begun is not None:
                self.current, self.first = begun, module
        self.stack.append(module)
        if self.current is not None and arguments and isinstance(arguments[0], Tensor) and arguments[0].dim() == 3:
            stated = list(grids_in(arguments[1:], arguments[0].shape[1]))
            self.current.grids += stated
            self.current.stated += stated

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Notes that a module has run."""
        while self.stack and self.stack.pop() is not module:
            pass
        if self.current is not None and not isinstance(module, nn.Linear):  # the output of a projection is no map
            for leaf in tree_leaves(release(output)):
                if isinstance(leaf, Tensor) and leaf.dim() in (3, 4) and len(leaf) == self.current.batch:
                    self.current.movements.start(leaf)

    def _linear(self, current: ForwardPass, result: Tensor, x: Tensor, weight: Tensor, bias: Any = None) -> None:
        widths = (weight.shape[1], weight.shape[0])
        moved = _first_channels(current.movements.moved(x))
        current.projections.append(Projection(x.numel() // x.shape[-1], widths, moved, tuple(self.stack)))
        if x.dim() == 4 and len(x) == current.batch:
            current.note_grid((x.shape[1], x.shape[2]))

    def _conv2d(self, current: ForwardPass, result: Tensor, x: Tensor, weight: Tensor, *args: Any, **kw: Any) -> None:
        if result.dim() != 4:
            return
        moved = current.movements.moved(x) if weight.shape[2:] == (1, 1) and x.shape[2:] == result.shape[2:] else None
        if moved is not None:
            moved = _first_channels(Moved(moved.places.permute(0, 2, 3, 1), moved.source))
        widths = (x.shape[1], result.shape[1])
        current.projections.append(Projection(result.numel() // result.shape[1], widths, moved, tuple(self.stack)))
        current.image = current.image or (x.shape[2], x.shape[3])
        current.note_grid((result.shape[2], result.shape[3]))

    def _product(self, current: ForwardPass, result: Tensor, *args: Any, **kwargs: Any) -> None:
        if result.dim() >= 3:
            current.products.append(Product(result.numel(), result.shape[-1], tuple(self.stack)))

    def _softmax(self, current: ForwardPass, result: Tensor, x: Tensor, dim: Any = None, *a: Any, **kw: Any) -> None:
        module = self._attending()
        are_scores = any(
            p.size == x.numel() and p.keys == x.shape[-1] and module in p.running for p in current.products
        )
        if dim in (-1, x.dim() - 1) and are_scores:
            self._attention(current, tuple(result.shape), lambda: result)

    def _fused(self, current: ForwardPass, result: Tensor, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> None:
        shape = (*result.shape[:-1], k.shape[-2])
        self._attention(current, shape, lambda: attention_weights(q, k, *args, **kwargs))

    def _multi_head(self, current: ForwardPass, result: Any, *args: Any, **kwargs: Any) -> None:
        bound = _MULTI_HEAD.bind(*args, **kwargs)
        bound.arguments |= {"need_weights": True, "average_attn_weights": False, "training": False}  # without dropout
        with torch.no_grad():
            _, weights = F.multi_head_attention_forward(*bound.args, **bound.kwargs)
        assert weights is not None
        self._attention(current, tuple(weights.shape), lambda: weights)

    def _attention(self, current: ForwardPass, shape: tuple[int, ...], weights: Callable[[], Tensor]) -> None:
        if any(getattr(module, "attends_to", None) == "layers" for module in self.stack):
            return
        heads = next(
            (n for module in self.stack[:-4:-1] for name in HEADS if _is_whole(n := getattr(module, name, 0))), 0
        )
        arrangement = arrangement_of(shape, current.batch, heads)
        if arrangement is None:
            return
        if self._is_between_channels(current, shape, arrangement):
            self.channel_attentions += 1
            return
        module = self._attending()
        queries, keys = self._tokens(current, module, shape[-2], shape[-1], arrangement.windows)
        with torch.no_grad():
            found = arrangement.arrange(weights().detach())
            if (
                arrangement.windows is None and queries.windows is not None
            ):  # a single window that was shifted or padded
                found = found[:, None]
            found = found.to(torch.promote_types(found.dtype, torch.float32))
            self.found(self.names.get(module, ""), found, queries, keys, current.frame)

    def _attending(self) -> nn.Module:
        """Returns the innermost module with parameters that is running. A softmax may be a module of its own."""
        return next((m for m in reversed(self.stack) if next(m.parameters(), None) is not None), self.stack[-1])

    def _is_between_channels(self, current: ForwardPass, shape: tuple[int, ...], arrangement: Arrangement) -> bool:
        queries, keys = shape[-2:]
        width, tokens = arrangement.heads * queries, current.batch * (arrangement.windows or 1) * queries
        projections = [p for p in current.projections if self._attending() in p.running]
        is_width = any(width in p.widths for p in projections)
        return queries == keys and is_width and all(p.tokens != tokens for p in projections)

    def _tokens(
        self, current: ForwardPass, module: Any, queries: int, keys: int, windows: int | None
    ) -> tuple[Tokens, Tokens]:
        """Returns what the queries and the keys are."""
        if hasattr(module, "attention_windows"):
            pixels = current.grids[-1]
            of_queries, of_keys = (
                Tokens(0, grid, places, stride, pixels) for grid, places, stride in module.attention_windows(*pixels)
            )
            return of_queries, of_keys
        of_windows = [self._moved_tokens(current, count, windows or 1) for count in (queries, keys)]
        if windows is not None or any(_is_rearranged(tokens) for tokens in of_windows):
            return of_windows[0], of_windows[1]
        of_queries = tokens_on_grid(queries, current.grids)
        return of_queries, of_queries if keys == queries else tokens_on_grid(keys, current.grids)

    def _moved_tokens(self, current: ForwardPass, count: int, windows: int) -> Tokens:
        """Returns what the tokens of windows are, if the input of a projection in the attention shows it."""
        total = current.batch * windows * count
        projections = [p for p in current.projections if p.tokens == total and self._attending() in p.running]
        for p in reversed(projections):
            if p.moved is not None and _has_windows(p.moved.places.shape[:-1], current.batch * windows):
                tokens = tokens_of_windows(p.moved, p.widths[0], (windows, count), current.stated)
                return tokens if tokens.grid is None or current.is_map(tokens.grid) else Tokens()
        return Tokens()


def attention_weights(
    q: Tensor,
    k: Tensor,
    v: Any = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Returns softmax(q kᵀ scale + mask), the weights of `scaled_dot_product_attention` with the same arguments.

    They are computed in float32, or in float64 from float64. Rows in which everything is masked are zero. Dropout is
    left out.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        if enable_gqa and k.shape[-3] != q.shape[-3]:
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        scores = q.to(dtype) @ k.to(dtype).transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask.to(dtype)
        return scores.softmax(-1).masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)


def arrangement_of(shape: tuple[int, ...], batch: int, heads: int) -> Arrangement | None:
    """Returns how weights of this shape are to be read, or None if they are no attention in images.

    Args:
        shape: the shape of the weights, of three to five dimensions, with queries and keys last.
        batch: number of images.
        heads: number of heads according to the module that runs; 0 if unknown.
    """
    count, rest = divmod(shape[0], batch)
    if rest or not 3 <= len(shape) <= 5 or (len(shape) == 5 and count > 1):
        return None
    if len(shape) == 3:  # [B heads, queries, keys]
        return (
            Arrangement(None, count, lambda w: w.unflatten(0, (batch, count))) if count in (1, heads or count) else None
        )
    if len(shape) == 5 and shape[1] == heads:  # [B, heads, windows, queries, keys]
        return Arrangement(shape[2], heads, lambda w: w.transpose(1, 2))
    if len(shape) == 5:  # [B, windows, heads, queries, keys]
        return Arrangement(shape[1], shape[2], lambda w: w)
    if count == 1:
        return Arrangement(None, shape[1], lambda w: w)
    if count == heads != shape[1]:  # [B heads, windows, queries, keys]
        return Arrangement(shape[1], heads, lambda w: w.unflatten(0, (batch, count)).transpose(1, 2))
    return Arrangement(count, shape[1], lambda w: w.unflatten(0, (batch, count)))


def _forward_pass(arguments: tuple[Any, ...]) -> ForwardPass | None:
    """Returns the beginning of a forward pass on images [B, C, H, W] or, for detectors, a list of images [C, H, W]."""
    leaves = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    batches = [leaf for leaf in leaves if leaf.dim() == 4]
    images = [leaf for leaf in leaves if leaf.dim() == 3]
    if not batches and not images:
        return None
    height, width = (batches or images)[0].shape[-2:]
    return ForwardPass(len(batches[0]) if batches else len(images), (height, width))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_rearranged(tokens: Tokens) -> bool:
    """Whether the tokens of a window are not all the tokens of a map, row by row."""
    if tokens.windows is None or tokens.grid is None:
        return False
    return tokens.windows.flatten().tolist() != list(range(tokens.grid[0] * tokens.grid[1]))


def _has_windows(shape: tuple[int, ...], windows: int) -> bool:
    """Whether tokens of this shape, without channels, are divided into windows, counted over all images."""
    return shape[0] == windows or (len(shape) > 3 and windows in accumulate(shape, mul))


def _first_channels(moved: Moved | None) -> Moved | None:
    """Keeps two channels, from which the layout of a map is seen."""
    return None if moved is None else Moved(moved.places[..., :2].clone(), moved.source)
