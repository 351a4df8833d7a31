"""Finds the module that turns an image into tokens, and with it the grid of the tokens.

The patch embeddings of timm state their grid. Those of other libraries, such as transformers, are found from the calls
of one forward pass: a module that takes the image, convolves it and returns the tokens that the first block reads,
possibly after further modules such as a norm. The grid is that of the output of the convolution. That the tokens are in
its order, row by row, is checked by changing single patches of the image.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..carried import Grid, first_convolution, grid_after, release
from .calls import Call
from .probe import evaluating

MAX_PREFIX = 8  # class, distillation and register tokens; more are no prefix


@dataclass
class PatchEmbedding:
    """A module that turns an image into tokens.

    Args:
        module: the module. Its first convolution reads the image.
        grid: height and width of the grid of the patches of the probe image.
        prefix: number of tokens before those of the grid.
        passing: modules between it and the first block.
    """

    module: nn.Module
    grid: Grid
    prefix: int
    passing: list[nn.Module] = field(default_factory=list)


def find_patch_embedding(calls: list[Call], tokens: Tensor) -> PatchEmbedding | None:
    """Returns the patch embedding from which `tokens` come, [B, N, C], or None if there is none.

    Args:
        calls: the calls of a forward pass, from `record_calls`.
        tokens: the input of the first block.
    """
    passing: list[nn.Module] = []
    while True:
        returning = [call for call in calls if call.output is tokens and call.input is not tokens]
        if not returning:
            return None
        call = returning[-1]  # calls are listed in the order in which they end, so the last one is the outermost
        if call.input is None:
            return None
        if call.input.dim() == 4:
            found = _described(calls, call)
            if found is not None:
                found.passing = passing
            return found
        passing.append(call.module)
        tokens = call.input


def _described(calls: list[Call], call: Call) -> PatchEmbedding | None:
    image, convolution = call.input, first_convolution(call.module)
    convolved = next((other for other in calls if other.module is convolution), None)
    if image is None or convolution is None or convolved is None or convolved.input is not image:
        return None
    if convolution.kernel_size != convolution.stride:
        return None
    grid = grid_after(convolution, image)
    prefix = call.output.shape[1] - grid[0] * grid[1]
    if grid != tuple(convolved.output.shape[2:]) or not 0 <= prefix < MAX_PREFIX:
        return None
    found = PatchEmbedding(call.module, grid, prefix)
    return found if image.is_meta or _is_row_by_row(call, found, convolution.stride) else None


def _is_row_by_row(call: Call, found: PatchEmbedding, stride: tuple[int, ...]) -> bool:
    """Whether the patches in three corners of the image determine the tokens of these corners, and only these."""
    image, (height, width) = call.input, found.grid
    assert image is not None
    corners = {(0, 0): 0, (0, width - 1): width - 1, (height - 1, width - 1): height * width - 1}

    def tokens(image: Tensor) -> Tensor:
        result = release(call.module(image, *call.positional, **call.keywords))
        return result[0] if isinstance(result, tuple) else result

    with evaluating(call.module), torch.no_grad():
        plain = tokens(image)
        for (row, column), token in corners.items():
            changed = image.clone()
            changed[:, :, row * stride[0], column * stride[1]] += 1
            differs = (tokens(changed) != plain).any(-1)[0]
            if differs.nonzero().flatten().tolist() != [found.prefix + token]:
                return False
    return True
