"""What timm expects of every classifier, written once for the networks timm lacks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Classifier(nn.Module):
    """A network whose `head`, a linear layer of `num_features` inputs, classifies what `forward_features` gives."""

    grad_checkpointing = False
    num_classes: int
    num_features: int
    global_pool: Any
    head: nn.Module

    def pool_of(self, global_pool: str) -> Any:
        """The pooling of this name. Raises where the network has none of it."""
        raise NotImplementedError

    def forward_features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        raise NotImplementedError

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = self.pool_of(global_pool)
        first = next(self.parameters())
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head.to(first.device, first.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))
