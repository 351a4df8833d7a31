"""CeiT: a vision transformer with convolutions in its embedding and its feed-forward layers.

Paper: Incorporating Convolution Designs into Visual Transformers, Yuan et al., ICCV 2021,
https://arxiv.org/abs/2103.11816. One of the backbones of the MRLA paper; timm does not have it.

It changes DeiT in three ways: image-to-tokens (a strided convolution, a norm and a max pool before the patch
embedding), locally enhanced feed-forward layers (a depthwise convolution over the grid of patch tokens between the two
linear layers), and layer-wise class-token attention (the class token of the last layer attends to those of all layers).

It has 6,356,904 (tiny) and 24,204,840 (small) parameters, the 6.4M and 24.2M of Table 1 of the MRLA paper.
"""

from typing import Any

import torch
from timm.layers import DropPath, HybridEmbed, Mlp, resample_abs_pos_embed, trunc_normal_
from timm.models import build_model_with_cfg, checkpoint, register_model
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from ..config import default_config
from .classifier import Classifier

Grid = tuple[int, int]


class ImageToTokens(nn.Module):
    """Stem: 7x7 convolution and max pool, both with stride 2. [B, 3, H, W] -> [B, 64, H / 4, W / 4]."""

    def __init__(self, in_chans: int = 3, channels: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, channels, 7, stride=2, padding=3, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.maxpool(self.bn(self.conv(x)))


class LocallyEnhancedFeedForward(nn.Module):
    """Feed-forward layer with a depthwise convolution of the patch tokens. [B, 1 + HW, C] -> [B, 1 + HW, C].

    The class token is not changed.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, hidden, 1)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.conv3 = nn.Conv2d(hidden, dim, 1)
        self.bn3 = nn.BatchNorm2d(dim)
        self.act = nn.GELU()

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        class_token, patches = x[:, :1], x[:, 1:]
        y = patches.unflatten(1, grid).permute(0, 3, 1, 2)
        y = self.act(self.bn1(self.conv1(y)))
        y = self.act(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.cat((class_token, y.flatten(2).transpose(1, 2)), dim=1)


class CeiTBlock(nn.Module):
    def __init__(self, dim: int, heads: int, mlp_ratio: float, proj_drop: float, attn_drop: float, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads=heads, qkv_bias=True, attn_drop=attn_drop, proj_drop=proj_drop)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = LocallyEnhancedFeedForward(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x), grid))


class ClassTokenAttention(nn.Module):
    """Attention of the last of the class tokens of L layers to all of them. [B, L, C] -> [B, 1, C]."""

    attends_to = "layers"  # not to tokens of the image

    def __init__(self, dim: int, heads: int, mlp_ratio: float, drop_path: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(tokens)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v)
        x = tokens[:, -1:] + self.drop_path(self.proj(attended.transpose(1, 2).flatten(2)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class CeiT(Classifier):
    """CeiT with the interface of timm: `forward_features`, `forward_head`, `forward_intermediates`, `feature_info`."""

    def __init__(
        self,
        img_size: int | Grid = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if patch_size % 4:
            raise ValueError(f"patch_size must be a multiple of the stem's stride 4, got {patch_size}")
        self.num_classes = num_classes
        self.global_pool = self.pool_of(global_pool)
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 1
        self.patch_embed = HybridEmbed(
            ImageToTokens(in_chans), img_size, patch_size=patch_size // 4, in_chans=in_chans, embed_dim=embed_dim
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.patch_embed.num_patches, embed_dim))
        self.pos_drop = nn.Dropout(pos_drop_rate)
        rates = [drop_path_rate * block / max(depth - 1, 1) for block in range(depth)]
        self.blocks = nn.ModuleList(
            CeiTBlock(embed_dim, num_heads, mlp_ratio, proj_drop_rate, attn_drop_rate, rate) for rate in rates
        )
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": patch_size} for i in range(depth)
        ]
        self.layer_embed = nn.Parameter(torch.zeros(1, depth, embed_dim))  # positions of the class tokens
        self.class_attention: nn.Module | None = ClassTokenAttention(embed_dim, num_heads, mlp_ratio, rates[-1])
        self.norm: nn.Module = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        for parameter in (self.cls_token, self.pos_embed, self.layer_embed):
            trunc_normal_(parameter, std=0.02)
        self.apply(_init_linear)

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token", "layer_embed"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^layer_embed|class_attention|norm", (99999,))],
        }

    def pool_of(self, global_pool: str) -> str:
        if global_pool not in ("token", ""):
            raise ValueError(f"CeiT classifies its class token: global_pool must be 'token' or '', got {global_pool!r}")
        return global_pool

    def _embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        grid = self.patch_embed.grid_size
        x = self.patch_embed(x)
        return self.pos_drop(torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed), grid

    def _run_block(self, block: nn.Module, x: Tensor, grid: Grid) -> Tensor:
        if self.grad_checkpointing and self.training:
            return checkpoint(block, x, grid)
        return block(x, grid)

    def _finish(self, x: Tensor, class_tokens: list[Tensor]) -> Tensor:
        """Applies the class-token attention and the last norm to tokens, [B, 1 + HW, C]."""
        if self.class_attention is not None:
            class_token = self.class_attention(torch.stack(class_tokens, dim=1) + self.layer_embed)
            x = torch.cat((class_token, x[:, 1:]), dim=1)
        return self.norm(x)

    def forward_features(self, x: Tensor) -> Tensor:
        x, grid = self._embed(x)
        class_tokens = []
        for block in self.blocks:
            x = self._run_block(block, x, grid)
            class_tokens.append(x[:, 0])
        return self._finish(x, class_tokens)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Returns the features of the selected blocks, like timm's VisionTransformer."""
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, grid = self._embed(x)
        intermediates, class_tokens = [], []
        for index, block in enumerate(self.blocks):
            if stop_early and index > last:
                break
            x = self._run_block(block, x, grid)
            class_tokens.append(x[:, 0])
            if index in take:
                intermediates.append(self.norm(x) if norm else x[:])
        prefixes = [y[:, :1] for y in intermediates]
        intermediates = [y[:, 1:] for y in intermediates]
        if output_fmt == "NCHW":
            intermediates = [y.unflatten(1, grid).permute(0, 3, 1, 2).contiguous() for y in intermediates]
        result = list(zip(intermediates, prefixes, strict=True)) if return_prefix_tokens else intermediates
        if intermediates_only:
            return result
        return (self._finish(x, class_tokens) if len(class_tokens) == len(self.blocks) else self.norm(x)), result

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        take, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.class_attention = None
            self.reset_classifier(0, "")
        return take

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool == "token":
            x = x[:, 0]
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: CeiT) -> dict[str, Tensor]:
    """Interpolates position embeddings of another image size. timm calls a function of this name."""
    positions = state_dict.get("pos_embed")
    if positions is None or positions.shape == model.pos_embed.shape:
        return state_dict
    return {**state_dict, "pos_embed": resample_abs_pos_embed(positions, list(model.patch_embed.grid_size))}


default_cfgs = {
    name: default_config(classifier="head", first_conv="patch_embed.backbone.conv", fixed_input_size=True)
    for name in ("ceit_tiny", "ceit_small")
}


def _create(variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    return build_model_with_cfg(
        CeiT, variant, pretrained, feature_cfg={"out_indices": 3, "feature_cls": "getter"}, **kwargs
    )


@register_model
def ceit_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """CeiT-T: 192 channels, 12 layers, 3 heads."""
    return _create("ceit_tiny", pretrained, **{"embed_dim": 192, "depth": 12, "num_heads": 3, **kwargs})


@register_model
def ceit_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """CeiT-S: 384 channels, 12 layers, 6 heads."""
    return _create("ceit_small", pretrained, **{"embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs})
