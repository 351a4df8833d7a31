"""Finds the feature maps of a network: which modules return one, and how it becomes [B, C, H, W].

The network is run once on an image. Maps at the ends of stages are those of `find_stages`. Any other module that is
called once can be named: a map [B, C, H, W] or [B, H, W, C] is known by the aspect ratio of the image, and tokens
[B, N, C] by the grid and the prefix of the stage that has as many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import Tensor, nn

from ..carried import Grid, first_convolution, grid_after, release
from .blocks import find_stages, layout_of, stages_in
from .calls import Call, record_calls
from .layout import Layout, grids_in
from .probe import AttachError
from .stages import Stage


@dataclass(frozen=True)
class FeatureMap:
    """A module whose output is a feature map.

    Args:
        name: the name of the module.
        layout: how its output is laid out.
        resolution: height and width of the map.
    """

    name: str
    layout: Layout
    resolution: Grid

    def of(self, output: object) -> Tensor:
        """Returns the map [B, C, H, W] in the output of the module, without prefix tokens."""
        value = release(output)
        tensor = value[0] if isinstance(value, (tuple, list)) else value
        return self.layout.to_map(tensor, self.resolution if self.layout.kind == "tokens" else None)[0]


class FoundMaps:
    """The feature maps of a network for images of one size.

    Args:
        model: the network. It runs in eval mode.
        image: one image, [1, C, H, W].

    Attributes:
        stages: the blocks of each stage, first stage first. A stage ends where the resolution changes; a network of one
            resolution is divided into the stages of `find_stages`. Empty if the network has no blocks.
    """

    def __init__(self, model: nn.Module, image: Tensor) -> None:
        self.model, self.image = model, image
        self.size: Grid = (image.shape[-2], image.shape[-1])
        self.calls = record_calls(model, image)
        self.stages: list[list[FeatureMap]] = []
        self.reason = ""  # why the network has no stages
        by_name = {call.name: call for call in self.calls}
        chains: list[list[FeatureMap]] = []
        for stage in self._found_stages():
            chains.append([self._described(by_name[name], stage.layout) for name in stage.names if name in by_name])
        chains = [chain for chain in chains if chain]
        isotropic = len({chain[-1].resolution for chain in chains}) == 1
        for chain in chains:
            if self.stages and not isotropic and self.stages[-1][-1].resolution == chain[-1].resolution:
                self.stages[-1] += chain
            else:
                self.stages.append(chain)

    def _found_stages(self) -> Sequence[Stage]:
        try:
            return stages_in(self.model, self.calls, self.size)
        except AttachError as error:
            self.reason = str(error)
        try:  # a network for images of any size may state the grid of its tokens only for its own size
            stages = find_stages(self.model)
        except AttachError:
            return []
        return stages if all(stage.layout.kind == "tokens" for stage in stages) else []

    def named(self, name: str) -> FeatureMap:
        """Returns the map that the module of this name returns.

        Raises:
            ValueError: there is no such module, or it does not return one map.
        """
        names = [module for module, _ in self.model.named_modules() if module]
        kind = type(self.model).__name__
        if name not in names:
            near = get_close_matches(name, names, n=3, cutoff=0.5) or names[:3]
            raise ValueError(f"{kind} has no module {name!r}: the nearest names are {', '.join(near)}")
        call = next((call for call in self.calls if call.name == name), None)
        if call is None:
            raise ValueError(f"{name} has no spatial structure: it does not return one feature map, or runs repeatedly")
        if call.output.dim() == 3:
            alike = [
                chain[-1].layout
                for chain in self.stages
                if chain[-1].layout.kind == "tokens" and self._tokens_of(chain[-1]) == call.output.shape[1]
            ]
            if alike:
                return self._described(call, alike[0])
        try:
            return self._described(call, layout_of(self.model, call, self.size, self.calls))
        except AttachError as error:
            raise ValueError(f"{name} has no spatial structure: it returns {_shape(call)} ({error})") from error

    def last(self) -> FeatureMap:
        """Returns the last map of a network without stages that is larger than 1 x 1.

        Raises:
            ValueError: there is none, or tokens follow it whose grid is not known.
        """
        for call in reversed(self.calls):
            if any(other.output is call.output and other.name.startswith(f"{call.name}.") for other in self.calls):
                continue  # it returns what a module inside it does, whose name says more
            shape = call.output.shape
            if call.output.dim() == 3 and shape[1] > 1:
                raise ValueError(
                    f"{type(self.model).__name__} has tokens whose grid is not known, such as those of {call.name}, "
                    f"{_shape(call)}: name a layer that returns a map with layer="
                )
            if call.output.dim() == 4 and max(shape[2:]) > 1:
                try:
                    return self._described(call, layout_of(self.model, call, self.size, self.calls))
                except AttachError:
                    continue
        raise ValueError(f"{type(self.model).__name__} has no layer that returns a feature map larger than 1 x 1")

    def following(self, block: FeatureMap) -> list[FeatureMap]:
        """Returns the maps that follow a block at its resolution or at a lower one, in the order in which they end.

        They are of modules beside the block or beside the modules around it, such as a last convolution, a norm, or a
        stage whose blocks are not known. Components of such modules are not listed.
        """
        start = next(index for index, call in enumerate(self.calls) if call.name == block.name)
        found: list[FeatureMap] = []
        listed = [self.calls[start]]
        for call in self.calls[start + 1 :]:
            beside = all(block.name.startswith(f"{outer}.") for outer in _enclosing(call.name))
            again = any(call.output is other.output for other in listed)  # a container, or an identity
            if not beside or (again and not _works_in_place(call)):
                continue
            try:
                after = self.named(call.name)
            except ValueError:
                continue
            listed.append(call)
            lower = all(side <= limit for side, limit in zip(after.resolution, block.resolution, strict=True))
            if lower and after.resolution != (1, 1):
                found.append(after)
        return found

    def reading(self, block: FeatureMap) -> FeatureMap | None:
        """Returns the norm through which a block reads its input; None if it has none, as with norms at its end."""
        outer = next(call for call in self.calls if call.name == block.name)
        for call in self.calls:
            inside = call.name.startswith(f"{block.name}.") and call.input is outer.input
            is_norm = not any(parameter.dim() > 1 for parameter in call.module.parameters())
            if inside and is_norm and call.output is not call.input and call.output.shape == outer.output.shape:
                return self._described(call, block.layout)
        return None

    def _tokens_of(self, place: FeatureMap) -> int:
        height, width = place.resolution
        return place.layout.prefix + height * width

    def _described(self, call: Call, layout: Layout) -> FeatureMap:
        shape = call.output.shape
        if layout.kind == "NCHW":
            return FeatureMap(call.name, layout, (shape[2], shape[3]))
        if layout.kind == "NHWC":
            return FeatureMap(call.name, layout, (shape[1], shape[2]))
        return FeatureMap(call.name, layout, self._grid(call, layout, shape[1] - layout.prefix))

    def _grid(self, call: Call, layout: Layout, tokens: int) -> Grid:
        """Returns the grid of the tokens: that in the arguments of a block, or that of the patch embedding."""
        known = [tuple(grid) for grid in grids_in(call.arguments, tokens)]
        known += [place.resolution for chain in self.stages for place in chain]
        if layout.patch_embed is not None:
            known.append(tuple(layout.patch_embed.dynamic_feat_size(self.size)))  # type: ignore[operator]
        if layout.embedding is not None:
            convolution = first_convolution(layout.embedding.module)
            known.append(grid_after(convolution, self.image))  # type: ignore[arg-type]
        for height, width in known:
            if height * width == tokens:
                return int(height), int(width)
        raise ValueError(f"{call.name} returns {_shape(call)}, and nothing tells the grid of its tokens")


def _works_in_place(call: Call) -> bool:
    """Whether a module returns the tensor that it gets, but with other values."""
    return call.output is call.input and bool(getattr(call.module, "inplace", False))


def _enclosing(name: str) -> list[str]:
    """Returns the names of the modules around a module: "a" and "a.b" of "a.b.c"."""
    steps = name.split(".")
    return [".".join(steps[:length]) for length in range(1, len(steps))]


def _shape(call: Call) -> str:
    return f"[{', '.join(str(side) for side in ('B', *call.output.shape[1:]))}]"
