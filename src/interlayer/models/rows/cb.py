"""Named models of the paper "Scratching Visual Transformer's Back with Uniform Attention".

Context broadcasting is applied at the end of the MLP in the upper half of the blocks, the best setting in the paper.
"""

from __future__ import annotations

from .row import Row, register_rows

BACKBONES = {
    **{f"deit_{size}": f"deit_{size}_patch16_224" for size in ("tiny", "small", "base")},
    "pit_b": "pit_b_224",
    "mixer_s16": "mixer_s16_224",
}

register_rows(Row(f"{name}_cb", backbone, "cb") for name, backbone in BACKBONES.items())
register_rows(
    Row(f"{name}_cb_scaled", backbone, "cb", {"scaled": True})
    for name, backbone in BACKBONES.items()
    if name.startswith("deit")
)
