"""Base classes with the interface that timm expects of a classifier."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import SelectAdaptivePool2d
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint, checkpoint_seq
from torch import Tensor, nn


class Classifier(nn.Module):
    """A network with a linear `head` of `num_features` inputs that classifies the result of `forward_features`."""

    grad_checkpointing = False
    num_classes: int
    num_features: int
    global_pool: Any
    head: nn.Module

    def pool_of(self, global_pool: str) -> Any:
        """Returns the pooling layer of this name. Raises a ValueError if the network does not support it."""
        raise NotImplementedError

    def forward_features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        raise NotImplementedError

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head

    def head_of(self, num_classes: int, pool: Any) -> nn.Module:
        """Returns the classifier that follows this pooling. Raises a ValueError if there is none."""
        return nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        pool = self.global_pool if global_pool is None else self.pool_of(global_pool)
        first = next(self.parameters())
        self.head = self.head_of(num_classes, pool).to(first.device, first.dtype)
        self.num_classes, self.global_pool = num_classes, pool

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


class StagedClassifier(Classifier):
    """A network over maps: a stem, `stages`, `last_activation`, global pooling and a linear head.

    A subclass creates the stem and the stages, and calls `_finish` to create the other modules.
    """

    stem: nn.Module
    stages: nn.Sequential
    feature_info: list[dict[str, Any]]

    def _finish(
        self, channels: int, num_classes: int, global_pool: str, drop_rate: float, norm: nn.Module | None = None
    ) -> None:
        """Creates the modules after the stages, `norm` first, and initializes all convolutions (He et al., 2015)."""
        self.num_classes = num_classes
        self.depth = len(self.stages)  # before pruning: the last norm follows only the last stage of the full network
        self.norm: nn.Module = nn.Identity() if norm is None else norm
        self.num_features = self.head_hidden_size = channels
        self.global_pool = self.pool_of(global_pool)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self.head_of(num_classes, self.global_pool)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else [(r"^stages\.(\d+)\.(\d+)", None)]}

    def pool_of(self, global_pool: str) -> nn.Module:
        return SelectAdaptivePool2d(pool_type=global_pool, flatten=bool(global_pool))

    def head_of(self, num_classes: int, pool: Any) -> nn.Module:
        if num_classes and pool.is_identity():
            raise ValueError(
                f"global_pool='' leaves a map, which no linear head takes: give num_classes=0 too, got {num_classes}"
            )
        return super().head_of(num_classes, pool)

    def _run_stage(self, stage: nn.Module, x: Tensor) -> Tensor:
        if self.grad_checkpointing and self.training:
            return checkpoint_seq(stage, x) if isinstance(stage, nn.Sequential) else checkpoint(stage, x)
        return stage(x)

    def last_activation(self, x: Tensor) -> Tensor:
        return self.norm(x).relu()

    def feature_of(self, index: int, x: Tensor) -> Tensor:
        """Returns the feature map of the stage `index` from its output x."""
        return x

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = self._run_stage(stage, x)
        return self.last_activation(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Returns the features of the selected stages, like the networks of timm."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.stages), indices)
        x = self.stem(x)
        intermediates = []
        for index, stage in enumerate(self.stages):
            if stop_early and index > last:
                break
            x = self._run_stage(stage, x)
            finished = index == self.depth - 1
            if index in take:
                feature = self.feature_of(index, x)
                intermediates.append(self.last_activation(x) if norm and finished and feature is x else feature)
        if intermediates_only:
            return intermediates
        return (self.last_activation(x) if finished else x), intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        take, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(self.global_pool(x))
        return x if pre_logits else self.head(x)
