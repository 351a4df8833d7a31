"""Blocked local attention alone: time, arithmetic and memory at the shapes of HaloNets' stages, beside other ways.

    python benchmarks/halo_attention.py                              # stages of H1, H4 and H7, bfloat16
    python benchmarks/halo_attention.py --models halo_h1 --batch-size 64

Ways: "triton" is the fused kernel, "gathered" copies the neighbourhoods for scaled_dot_product_attention, "timm" is its
HaloAttn from queries, keys and values on, "flex" is FlexAttention with the same mask and bias (whose tables get no
gradient there), "dense" is flash attention of as many queries and keys with no bias and no gathering: a bound, not an
equal. Times are medians on the GPU, which is kept busy until all calls are queued, so that Python's time is no part of
them; TFLOP/s counts the two products of attention forward, 2.5 times as many backward; memory is the peak beside the
inputs.
"""

import argparse

import timm
import torch
import torch.nn.functional as F

import interlayer
from interlayer import ops
from interlayer.analysis.cost import median_queued_seconds
from interlayer.mechanisms import HaloAttention2d

PAUSE = 10_000_000  # cycles of the GPU for each call to be queued: some 5 ms
WAYS = ("triton", "gathered", "timm", "flex", "dense")


def layers(name: str) -> list[tuple[str, HaloAttention2d, int]]:
    """The stride-1 attention of each stage, and the size of its map."""
    model = timm.create_model(name, depths=(2, 2, 2, 2))
    size = model.default_cfg["input_size"][-1] // 4
    return [(f"{name} stage {i + 1}", stage[1].spatial, -(-size // 2**i)) for i, stage in enumerate(model.stages)]


class _Joined(torch.nn.Module):
    """In the place of timm's projection to keys and values: those that are given, as it would have returned them."""

    def __init__(self, k, v):
        super().__init__()
        self.parts = (k, v)

    def forward(self, x):
        return torch.cat(self.parts, 2).flatten(1, 2)


def make_run(way: str, layer: HaloAttention2d, q, k, v, rows, cols):
    """A function of no arguments that computes the result in this way; raises where it cannot."""
    heads, block, halo, side = layer.heads, layer.block, layer.halo, q.shape[-1]
    options = {"heads": heads, "block": block, "halo": halo}
    if way in ("triton", "gathered"):

        def run():
            with interlayer.backend(way):
                return ops.halo_attention(q, k, v, rows, cols, **options)

        return run
    window, blocks = block + 2 * halo, -(-side // block)
    padded = (0, blocks * block - side, 0, blocks * block - side)
    if way == "timm":
        if side % block:
            raise ValueError("timm takes multiples of the block alone")
        from timm.layers.halo_attn import HaloAttn

        d, e = q.shape[1] // heads, v.shape[1] // heads
        layer_of_timm = HaloAttn(
            q.shape[1], dim_out=v.shape[1], dim_head=d, num_heads=heads, block_size=block, halo_size=halo, qk_ratio=1.0
        ).to(q.device)
        layer_of_timm.q = torch.nn.Identity()
        layer_of_timm.kv = _Joined(k.unflatten(1, (heads, d)), v.unflatten(1, (heads, e)))
        layer_of_timm.dim_head_v = e
        return lambda: layer_of_timm(q)
    n = q.shape[0] * heads * blocks * blocks
    if way == "dense":
        shape = [(n, 1, block * block), (n, 1, window * window), (n, 1, window * window)]
        dims = (q.shape[1] // heads, k.shape[1] // heads, v.shape[1] // heads)
        dense = [
            torch.randn(*s, d, device=q.device, dtype=q.dtype, requires_grad=True)
            for s, d in zip(shape, dims, strict=True)
        ]
        return lambda: F.scaled_dot_product_attention(*dense)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    half = q.shape[1] // heads // 2
    flat = [F.pad(t, padded).unflatten(1, (heads, -1)).flatten(3).transpose(2, 3).contiguous() for t in (q, k, v)]
    width = blocks * block
    row_logits = (flat[0][..., :half] @ rows.to(q.dtype).t()).detach()
    col_logits = (flat[0][..., half:] @ cols.to(q.dtype).t()).detach()
    scale = (2 * half) ** -0.5

    def visible(b, h, i, j):
        top, left = i // width // block * block - halo, i % width // block * block - halo
        y, x = j // width, j % width
        return (y >= top) & (y < top + window) & (x >= left) & (x < left + window) & (y < side) & (x < side)

    def position(score, b, h, i, j):
        below, beside = j // width - i // width + window - 1, j % width - i % width + window - 1
        below, beside = (t.clamp(0, 2 * window - 2) for t in (below, beside))
        return score + scale * (row_logits[b, h, i, below] + col_logits[b, h, i, beside])

    mask = create_block_mask(visible, None, None, width * width, width * width, device=q.device)
    torch.compiler.reset()  # of shapes before, which would make it compile for all shapes
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(*flat, score_mod=position, block_mask=mask)


def measure(run, inputs, backward: bool, steps: int) -> tuple[float, float]:
    """Median milliseconds and peak MiB beside what is there before."""

    def step():
        result = run()
        if backward:
            result.backward(torch.ones_like(result))
            for tensor in inputs:
                tensor.grad = None

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda._sleep(PAUSE * steps)
    milliseconds = 1e3 * median_queued_seconds(step, steps)
    return milliseconds, (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["halo_h1", "halo_h4", "halo_h7"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {arguments.batch_size}, bfloat16")
    print(
        f"{'shape':34} {'way':9} {'forward':>10} {'TFLOP/s':>8} {'with bwd':>10} {'TFLOP/s':>8} {'memory':>10}",
        flush=True,
    )
    for name in arguments.models:
        for label, layer, side in layers(name):
            generator = torch.Generator("cuda").manual_seed(0)

            def draw(channels, side=side, generator=generator):
                shape = (arguments.batch_size, channels, side, side)
                drawn = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
                return drawn.contiguous(memory_format=torch.channels_last).requires_grad_()

            qk, values = layer.query.out_channels, layer.value.out_channels
            inputs = [draw(qk), draw(qk), draw(values)]
            inputs += [t.detach().cuda().requires_grad_() for t in (layer.rel_rows, layer.rel_cols)]
            queries = arguments.batch_size * (-(-side // layer.block) * layer.block) ** 2
            flops = 2 * queries * (layer.block + 2 * layer.halo) ** 2 * (qk + values)
            shape = f"{label}, {side} px, {qk}/{values} ch"
            for way in arguments.ways:
                try:
                    with torch.autocast("cuda", torch.bfloat16, enabled=way == "timm"):
                        run = make_run(way, layer, *inputs)
                        forward, _ = measure(run, inputs, False, arguments.steps)
                        both, memory = measure(run, inputs, True, arguments.steps)
                except Exception as error:
                    print(f"{shape:34} {way:9} {str(error).strip().splitlines()[0][:70]}", flush=True)
                    continue
                rates = flops / forward / 1e9, 3.5 * flops / both / 1e9
                figures = f"{forward:7.3f} ms {rates[0]:8.1f} {both:7.3f} ms {rates[1]:8.1f} {memory:6.0f} MiB"
                print(f"{shape:34} {way:9} {figures}", flush=True)


if __name__ == "__main__":
    main()
