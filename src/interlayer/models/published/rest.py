"""Names in the published ResT checkpoints."""

from __future__ import annotations

from torch import Tensor, nn

from .family import Family, Rule, Tensors, rename_by

RULES: tuple[Rule, ...] = (
    (r"^stem\.pos\.pa_conv\.", "stages.0.embed.position.conv."),
    (r"^stem\.(conv|norm)(\d)\.", lambda found: f"stem.{3 * int(found[2]) - (3 if found[1] == 'conv' else 2)}."),
    (r"^patch_embed_(\d)\.pos\.pa_conv\.", lambda found: f"stages.{int(found[1]) - 1}.embed.position.conv."),
    (r"^patch_embed_(\d)\.", lambda found: f"stages.{int(found[1]) - 1}.embed."),
    (r"^stage(\d)\.", lambda found: f"stages.{int(found[1]) - 1}."),
    (r"\.attn\.sr\.", ".attn.shrink."),
    (r"\.attn\.sr_norm\.", ".attn.norm."),
    (r"\.attn\.transform_conv\.", ".attn.mix."),
)


def recognizes(tensors: Tensors, model: nn.Module) -> bool:
    return "patch_embed_2.pos.pa_conv.weight" in tensors


def rename(tensors: Tensors, model: nn.Module) -> dict[str, Tensor]:
    return rename_by(RULES, tensors)


REST = Family("ResT", recognizes, rename)
