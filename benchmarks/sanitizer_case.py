"""Launches every Triton kernel of the library on small tensors.

    compute-sanitizer --error-exitcode 1 python benchmarks/sanitizer_case.py        # on a GPU
    TRITON_INTERPRET=1 python benchmarks/sanitizer_case.py --device cpu

Names every operation before it runs and the kernels that it launched. The exit code is 1 if an operation fails or a
kernel was not launched. Sizes are odd and no powers of two, so that tiles extend beyond the tensors.
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from kernel_launches import find_kernels, record_launches
from layer_attention_cases import KINDS, Options, Run, Source, run_once
from torch import Tensor

from interlayer import backend, ops
from interlayer.ops.feed_forward import column_sums, gelu_gradients

SHARED: Options = {
    "dtype": torch.bfloat16, "batch": 3, "channels": 36, "heads": 9, "size": 3, "height": 5, "width": 7,
    "layout": "usual", "mask": True, "gradients": "maps", "score_gradients": True,
}  # fmt: skip
CNN = SHARED | {"end": "projected", "end_relu": True, "frozen": False, "training": True, "end_training": True}
EVAL = {"end": "shortcut", "training": False, "end_training": False}
LIGHT = {"gated": True, "memory": "attention", "decay": True, "layers": 2}
BASE = {"earlier": 2, "layers": 2, "relu": True, "last": False}
TOKENS = SHARED | {"stream": torch.float32, "prefix": 1, "add_prefix": True}
# operation, options, and whether it runs without gradients
LAYERS: list[tuple[str, Options, bool]] = [
    ("light_layer", CNN | LIGHT, False),
    ("light_layer", CNN | LIGHT | {"memory": "shortcut"}, False),
    ("light_layer", CNN | LIGHT | EVAL, False),
    ("light_layer", CNN | LIGHT | {"training": False}, False),
    ("light_layer", CNN | LIGHT | EVAL, True),
    ("base_layer", CNN | BASE, False),
    ("base_layer", CNN | BASE | EVAL, True),
    ("light_tokens", TOKENS | LIGHT, False),
    ("light_tokens", TOKENS | LIGHT, True),
    ("base_tokens", TOKENS | BASE, False),
    ("base_tokens", TOKENS | BASE, True),
]


def run_layer(operation: str, options: Options, device: str, inference: bool) -> None:
    tensors = KINDS[operation].make(Source(0, device, options))
    if not inference:
        run_once(operation, options, tensors, "fused")
        return
    with torch.no_grad(), backend("triton"), torch.autocast(device, options["dtype"]):
        KINDS[operation].run(Run(tensors, options, wide=False, fused=True))


def other_operations(device: str, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Returns a call of every operation that is not a layer with MRLA. Gradients are computed of their first result."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int, dtype: torch.dtype = dtype, channels_last: bool = False) -> Tensor:
        x = torch.randn(size, generator=generator).to(device, dtype)
        return (x.contiguous(memory_format=torch.channels_last) if channels_last else x).requires_grad_()

    def parameter(*size: int) -> Tensor:
        return draw(*size, dtype=torch.float32)

    maps = [draw(3, 36, 5, 7, channels_last=True) for _ in range(2)]
    norm = ops.BatchNormArguments(
        parameter(36), parameter(36), torch.zeros(36, device=device), torch.ones(36, device=device), True
    )
    halo = [draw(2, 24, 9, 8, channels_last=True) for _ in range(3)]
    mixed = [draw(2, n, 18) for n in (11, 7, 7)]
    tokens = draw(2, 11, 36)
    return {
        "residual_end": lambda: ops.residual_end(maps[0], norm, draw(5, 36, 1, 1), maps[1]),
        "broadcast_context": lambda: ops.broadcast_context(tokens),
        "broadcast_context, scaled": lambda: ops.broadcast_context(tokens, parameter(36)),
        "layer_norm": lambda: ops.layer_norm(tokens, parameter(36), parameter(36), 1e-6),
        "shrink": lambda: ops.shrink(maps[0], draw(36, 1, 3, 3), draw(36), stride=2),
        "gelu_gradients": lambda: gelu_gradients(draw(11, 36).detach(), draw(11, 36).detach()),
        "column_sums": lambda: column_sums(draw(11, 36).detach()),
        "halo_attention": lambda: ops.halo_attention(
            *halo, parameter(15, 6), parameter(15, 6), heads=2, block=4, halo=2
        ),
        "mixed_attention": lambda: ops.mixed_attention(*mixed, draw(3, 3), draw(3), heads=3, scale=6**-0.5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    kernels = find_kernels()
    launched = record_launches()
    calls: list[tuple[str, Callable[[], Any]]] = []
    for operation, options, inference in LAYERS:
        if hasattr(ops, operation):
            label = f"{operation}, {'inference' if inference else 'training' if options.get('training') else 'eval'}"
            calls.append((label, lambda o=operation, c=options, i=inference: run_layer(o, c, device, i)))
    # the interpreter does not support matrix products of bfloat16
    others = other_operations(device, torch.float32 if device == "cpu" else torch.bfloat16)
    calls += others.items()
    failed = 0
    seen: set[str] = set()
    for label, call in calls:
        print(f"{label}:", end=" ", flush=True)
        launched.clear()
        try:
            with backend("triton"):
                result = call()
                first = result[0] if isinstance(result, tuple) else result
                if label in others and first.requires_grad:
                    first.float().square().sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception:
            failed += 1
            print(traceback.format_exc(limit=-4), flush=True)
        seen |= set(launched)
        print(" ".join(dict.fromkeys(launched)), flush=True)
    missing = sorted(kernels - seen)
    print(f"\n{len(seen)} kernels launched, {failed} operations failed; not launched: {', '.join(missing) or 'none'}")
    sys.exit(bool(failed or missing))


if __name__ == "__main__":
    main()
