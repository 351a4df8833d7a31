"""timm's ResNet blocks in two parts, the residual branch and the shortcut.

timm adds the shortcut inside the block, in place, so neither part can be seen from outside. Mechanisms that read one
of them run the block through these functions instead. They follow `timm.models.resnet`; a test compares them with it.
"""

from typing import Any

from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor


def projects(block: Any) -> bool:
    """Whether `block` is one of timm's ResNet blocks with a projection on its shortcut."""
    return isinstance(block, (BasicBlock, Bottleneck)) and block.downsample is not None


def branch(block: Any, x: Tensor) -> Tensor:
    """The residual branch of a BasicBlock or Bottleneck, before the shortcut is added."""
    if isinstance(block, Bottleneck):
        x = block.act1(block.bn1(block.conv1(x)))
        x = block.aa(block.act2(block.drop_block(block.bn2(block.conv2(x)))))
        x = block.bn3(block.conv3(x))
    else:
        x = block.aa(block.act1(block.drop_block(block.bn1(block.conv1(x)))))
        x = block.bn2(block.conv2(x))
    if block.se is not None:
        x = block.se(x)
    return x if block.drop_path is None else block.drop_path(x)


def output_and_shortcut(block: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """What `block(x)` returns, and the shortcut that went into it."""
    shortcut = x if block.downsample is None else block.downsample(x)
    last_activation = block.act3 if isinstance(block, Bottleneck) else block.act2
    return last_activation(branch(block, x) + shortcut), shortcut
