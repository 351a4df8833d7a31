"""A vision transformer of eight blocks with one more layer of self-attention, or one more MLP, at its end.

Paper: Scratching Visual Transformer's Back with Uniform Attention, ICCV 2023, section 3.1 and Fig. 3, which asks
whether more spatial or more channel interaction helps.

    msa   x' = x + attention(norm(x))
    mlp   x' = x + MLP(norm(x))

    x   tokens [B, N, C]

Deviations: the text gives no width; these are ViT-S, 384 channels. It states that both layers add nearly equal numbers
of parameters and FLOPs, which holds for an MLP twice as wide as the tokens, with 4 C² weights as attention has; the MLP
of a block is four times as wide.
"""

from typing import Any, Literal

from timm.layers import DropPath, Mlp
from timm.models import build_model_with_cfg, register_model
from timm.models._manipulate import named_apply
from timm.models.vision_transformer import Attention, VisionTransformer, init_weights_vit_timm
from torch import Tensor, nn

from ...mechanisms.options import expect_choice
from ..config import default_config

Extra = Literal["none", "msa", "mlp"]
MLP_RATIO = 2


class ExtraLayer(nn.Module):
    """A layer of self-attention or an MLP, with a norm before it and a shortcut."""

    def __init__(self, channels: int, heads: int, kind: Extra, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.attn = Attention(channels, num_heads=heads, qkv_bias=True) if kind == "msa" else None
        self.mlp = Mlp(channels, MLP_RATIO * channels) if kind == "mlp" else None
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        normalized = self.norm(x)
        if self.mlp is not None:
            return x + self.drop_path(self.mlp(normalized))
        assert self.attn is not None
        return x + self.drop_path(self.attn(normalized, attn_mask=attn_mask, is_causal=is_causal))


class ExtraLayerViT(VisionTransformer):
    """timm's vision transformer with an `ExtraLayer` after its blocks.

    Args:
        extra: the kind of the layer: "none", "msa" or "mlp".
        options: options of timm's `VisionTransformer`.
    """

    def __init__(self, *, extra: Extra = "none", **options: Any) -> None:
        expect_choice("extra", extra, ("none", "msa", "mlp"))
        super().__init__(**options)
        if extra == "none":
            return
        layer = ExtraLayer(self.embed_dim, options["num_heads"], extra, options.get("drop_path_rate", 0.0))
        named_apply(init_weights_vit_timm, layer)
        self.feature_info.append({**self.feature_info[-1], "module": f"blocks.{len(self.blocks)}"})
        self.blocks.append(layer)


VARIANTS: dict[str, Extra] = {"vit_small_8": "none", "vit_small_8_msa": "msa", "vit_small_8_mlp": "mlp"}
default_cfgs = {
    name: default_config(classifier="head", first_conv="patch_embed.proj", fixed_input_size=True) for name in VARIANTS
}


def _create(variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    options = {"embed_dim": 384, "depth": 8, "num_heads": 6, "extra": VARIANTS[variant], **kwargs}
    feature_cfg = {"out_indices": 3, "feature_cls": "getter"}
    return build_model_with_cfg(ExtraLayerViT, variant, pretrained, feature_cfg=feature_cfg, **options)


@register_model
def vit_small_8(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-S with 8 blocks."""
    return _create("vit_small_8", pretrained, **kwargs)


@register_model
def vit_small_8_msa(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-S with 8 blocks and one more layer of self-attention."""
    return _create("vit_small_8_msa", pretrained, **kwargs)


@register_model
def vit_small_8_mlp(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ViT-S with 8 blocks and one more MLP."""
    return _create("vit_small_8_mlp", pretrained, **kwargs)
