"""Tests of blocked local attention: neighborhoods, positions, masks and gradients."""

import itertools

import pytest
import torch
from operation_tester import DEVICE, Limit, OperationTester, Sample, sizes

from interlayer import backend, ops
from interlayer.ops.halo_attention import halo_attention_operation

DOUBLE = torch.float64
KERNELS = ["gathered", "triton"]
EVERY = [
    "reference",
    "gathered",
    pytest.param("triton", marks=pytest.mark.slow),
]  # covered by the five shapes above as well


def make(
    height=11, width=9, *, heads=2, d=6, e=5, block=4, halo=2, stride=1, batch=2, dtype=DOUBLE, relative=True, seed=0
):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    def channels_last(x):
        return x.contiguous(memory_format=torch.channels_last)

    q = channels_last(draw(batch, heads * d, -(-height // stride), -(-width // stride)))
    k, v = channels_last(draw(batch, heads * d, height, width)), channels_last(draw(batch, heads * e, height, width))
    size = 2 * (block + 2 * halo) - 1
    tables = [draw(size, d // 2), draw(size, d // 2)] if relative else [None, None]
    return [q, k, v, *tables], {"heads": heads, "block": block, "halo": halo, "stride": stride}


def exact(name):
    """Return the most precise dtype of an implementation and its tolerance: Triton supports float64 only on the CPU."""
    single = name == "triton" and DEVICE == "cuda"
    return (torch.float32, {"rtol": 1e-3, "atol": 1e-4}) if single else (DOUBLE, {"rtol": 1e-8, "atol": 1e-8})


def assert_as_reference(name, tensors, options):
    """Compare the result and every gradient with the reference in float64."""
    dtype, tolerance = exact(name)
    expected = run("reference", tensors, options)
    for what, value in run(name, [None if t is None else t.to(dtype) for t in tensors], options).items():
        torch.testing.assert_close(value.double(), expected[what], msg=lambda m, w=what: f"{w}: {m}", **tolerance)


def run(name, tensors, options):
    """Return the result and the gradients of all inputs."""
    leaves = [
        None if t is None else t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors
    ]
    with backend(name):
        result = ops.halo_attention(*leaves, **options)
    generator = torch.Generator().manual_seed(1)
    result.backward(torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result))
    names = ("q", "k", "v", "rel_rows", "rel_cols")
    return {"result": result.detach()} | {n: t.grad for n, t in zip(names, leaves, strict=True) if t is not None}


def by_pixel(q, k, v, rel_rows, rel_cols, *, heads, block, halo, stride, centered=False, mask_padding=True):
    """Compute the definition query by query."""
    _, _, height, width = k.shape
    window = block + 2 * halo
    split = [t.unflatten(1, (heads, -1)) for t in (q, k, v)]
    d = split[0].shape[2]
    result = torch.zeros(q.shape[0], heads, split[2].shape[2], *q.shape[2:], dtype=q.dtype)
    for i, j in itertools.product(range(q.shape[2]), range(q.shape[3])):
        y0, x0 = stride * i, stride * j
        top, left = y0 // block * block - halo, x0 // block * block - halo
        query = split[0][..., i, j]
        logits, values = [], []
        for y, x in itertools.product(range(top, top + window), range(left, left + window)):
            inside = 0 <= y < height and 0 <= x < width
            if (not inside and mask_padding) or (centered and max(abs(y - y0), abs(x - x0)) > halo):
                continue
            key = split[1][..., y, x] if inside else torch.zeros_like(query)
            logit = (query * key).sum(-1)
            if rel_rows is not None:
                logit = logit + (query[..., : d // 2] * rel_rows[window - 1 + y - y0]).sum(-1)
                logit = logit + (query[..., d // 2 :] * rel_cols[window - 1 + x - x0]).sum(-1)
            logits.append(logit / d**0.5)
            values.append(split[2][..., y, x] if inside else torch.zeros_like(split[2][..., 0, 0]))
        weights = torch.stack(logits, -1).softmax(-1)
        result[..., i, j] = (weights[..., None, :] * torch.stack(values, -1)).sum(-1)
    return result.flatten(1, 2)


OPTIONS = [
    {},
    {"stride": 2},
    {"centered": True},
    {"mask_padding": False},
    {"centered": True, "stride": 2, "mask_padding": False},
]


@pytest.mark.skipif(DEVICE != "cpu", reason="one query after another: on the CPU")
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_reference_is_the_definition(options, relative):
    tensors, shape = make(7, 6, relative=relative, stride=options.get("stride", 1))
    shape |= {key: value for key, value in options.items() if key != "stride"}
    with backend("reference"):
        torch.testing.assert_close(ops.halo_attention(*tensors, **shape), by_pixel(*tensors, **shape))


SHAPES = [
    {},
    {"height": 8, "width": 8},
    {"height": 1, "width": 1},
    {"height": 5, "width": 9, "heads": 1, "d": 16, "e": 24},
    {"height": 13, "width": 6, "block": 6, "halo": 1, "heads": 3, "d": 2, "e": 1},
    {"height": 6, "width": 6, "block": 8, "halo": 3},
    {"height": 9, "width": 9, "block": 2, "halo": 0},
]


def without_channels_last(sample):
    return sample.change(q=sample.tensors["q"].contiguous())


class TestHaloAttention(OperationTester):
    """The shapes include odd maps, one pixel, a block larger than the map and no halo, with all options."""

    operation = halo_attention_operation
    implementations = ("triton", "gathered")
    small = sizes(height=5, width=4, d=2, e=1, block=2, halo=1, batch=1)
    precise_shape = sizes(height=9, width=10, d=16, e=16)
    precisions = ((torch.float32, 1e-4), (torch.bfloat16, 3e-2))
    limits = (
        Limit("triton", "the maps must be channels_last", change=without_channels_last),
        Limit("triton", "at most 64 pixels wide, got 66", sizes(halo=31)),
        Limit("triton", "expected a block divisible by the stride 3, got 4", sizes(stride=3)),
        Limit("gathered", "expected a block divisible by the stride 3, got 4", sizes(stride=3)),
        Limit(
            "triton",
            "the maps must be of one floating-point type",
            change=lambda s: s.change(q=s.tensors["q"].half()),
            runs=False,
        ),
        Limit("triton", "a head must have at most 256 channels", sizes(heads=1, e=257)),
        Limit("triton", "scale is 0", change=lambda s: s.change(scale=0.0)),
    )

    @classmethod
    def cases(cls):
        # the interpreter is slow: each shape is tested with one of the options, and with all of them in the slow tests
        cases = [("gathered", shape | options) for shape in SHAPES for options in OPTIONS]
        return cases + [
            pytest.param("triton", shape | options, marks=[] if number < 5 and number == index else pytest.mark.slow)
            for number, shape in enumerate(SHAPES)
            for index, options in enumerate(OPTIONS)
        ]

    def sample(self, centered=False, mask_padding=True, **shape):
        tensors, options = make(**shape)
        options |= {"centered": centered, "mask_padding": mask_padding}
        return Sample(dict(zip(("q", "k", "v", "rel_rows", "rel_cols"), tensors, strict=True)), options)

    def call(self, sample):
        return ops.halo_attention(*sample.tensors.values(), **sample.options)

    def best_dtype(self, name):
        return exact(name)[0]

    def tolerance(self, dtype):
        return {"rtol": 1e-8, "atol": 1e-8} if dtype == DOUBLE else {"rtol": 1e-3, "atol": 1e-4}


@pytest.mark.parametrize("name", KERNELS)
def test_without_positions_and_with_scales(name):
    assert_as_reference(name, *make(relative=False))
    tensors, given = make()
    scaled = given | {"scale": 0.3, "position_scale": 1.0}
    results = [run("reference", tensors, options)["result"] for options in (given, scaled)]
    assert not torch.allclose(*results), "the scales must count"
    assert_as_reference(name, tensors, scaled)


def rolled(x, pixels):
    return torch.roll(x, (pixels, pixels), (2, 3)).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", EVERY)
def test_translation_by_whole_blocks(name):
    """Shifting the image by b pixels shifts the result of queries with a neighborhood inside the map."""
    dtype, tolerance = exact(name)
    (q, k, v, *tables), given = make(24, 24, batch=1, dtype=dtype)
    shifted = [rolled(t, 4) for t in (q, k, v)]
    with backend(name):
        result, moved = ops.halo_attention(q, k, v, *tables, **given), ops.halo_attention(*shifted, *tables, **given)
    torch.testing.assert_close(moved[:, :, 8:16, 8:16], result[:, :, 4:12, 4:12], **tolerance)


@pytest.mark.parametrize("name", EVERY)
def test_centred_windows_move_by_one_pixel(name):
    dtype, tolerance = exact(name)
    (q, k, v, *tables), given = make(16, 16, batch=1, dtype=dtype)
    shifted = [rolled(t, 1) for t in (q, k, v)]
    with backend(name):
        result = ops.halo_attention(q, k, v, *tables, **given, centered=True)
        moved = ops.halo_attention(*shifted, *tables, **given, centered=True)
        blocked = [ops.halo_attention(*t, *tables, **given) for t in ((q, k, v), shifted)]
    torch.testing.assert_close(moved[:, :, 4:12, 4:12], result[:, :, 3:11, 3:11], **tolerance)
    assert not torch.allclose(blocked[1][:, :, 4:12, 4:12], blocked[0][:, :, 3:11, 3:11]), (
        "blocks must see where they are"
    )


@pytest.mark.parametrize("name", EVERY)
def test_a_strided_query_is_the_query_at_its_position(name):
    """Query i of a layer with stride 2 is at pixel 2i, not i."""
    dtype, tolerance = exact(name)
    (q, k, v, *tables), given = make(10, 14, dtype=dtype)
    with backend(name):
        full = ops.halo_attention(q, k, v, *tables, **given)
        some = q[:, :, ::2, ::2].contiguous(memory_format=torch.channels_last)
        strided = ops.halo_attention(some, k, v, *tables, **{**given, "stride": 2})
    torch.testing.assert_close(strided, full[:, :, ::2, ::2], **tolerance)


@pytest.mark.parametrize("name", ["reference", *KERNELS])
def test_a_block_as_large_as_the_map_is_global_attention(name):
    dtype, tolerance = exact(name)
    (q, k, v, *_), given = make(6, 5, block=6, halo=0, relative=False, dtype=dtype)
    with backend(name):
        result = ops.halo_attention(q, k, v, None, None, **given)
    flat = [t.unflatten(1, (2, -1)).flatten(3).transpose(2, 3) for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*flat)
    torch.testing.assert_close(result, expected.transpose(2, 3).reshape(result.shape), **tolerance)


@pytest.mark.parametrize("name", ["reference", *KERNELS])
def test_it_is_timms_where_the_definitions_agree(name):
    """timm's HaloAttn has unmasked padding, complete blocks, and tables shifted by `halo` entries for all channels."""
    from timm.layers.halo_attn import HaloAttn

    layer = HaloAttn(12, dim_head=6, num_heads=2, block_size=4, halo_size=2, qk_ratio=1.0).double().to(DEVICE)
    x = torch.randn(2, 12, 8, 12, dtype=DOUBLE, device=DEVICE)
    with torch.no_grad():
        layer.pos_embed.height_rel.normal_()
        layer.pos_embed.width_rel.normal_()
        layer.pos_embed.height_rel[:, 3:] = 0
        layer.pos_embed.width_rel[:, :3] = 0
    q, kv = layer.q(x), layer.kv(x).unflatten(1, (2, -1))
    k, v = (part.flatten(1, 2) for part in kv.split([6, kv.shape[2] - 6], 2))
    rows, cols = (torch.roll(t, -2, 0) for t in (layer.pos_embed.height_rel[:, :3], layer.pos_embed.width_rel[:, 3:]))
    dtype, tolerance = exact(name)
    q, k, v = (t.to(dtype).contiguous(memory_format=torch.channels_last) for t in (q, k, v))
    with backend(name):
        result = ops.halo_attention(
            q, k, v, rows, cols, heads=2, block=4, halo=2, mask_padding=False, position_scale=1.0
        )
    torch.testing.assert_close(result.double(), layer(x), **tolerance)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"stride": 2}, r"expected queries of \(6, 5\) for keys of \(11, 9\) at stride 2, got \(11, 9\)"),
        ({"heads": 5}, "divisible by heads=5"),
        ({"halo": 3}, r"expected tables of \(19, 3\)"),
        ({"block": 0}, "expected block, stride and heads of at least 1"),
    ],
)
@pytest.mark.parametrize("name", ["reference", *KERNELS])
def test_bad_input_is_named(name, change, reason):
    tensors, given = make()
    with backend(name), pytest.raises(ValueError, match=reason):
        ops.halo_attention(*tensors, **{**given, **change})


def test_shapes_alone():
    """FLOPs are counted on the meta device."""
    tensors, given = make()
    with backend("gathered"):
        assert ops.halo_attention(*(t.to("meta") for t in tensors), **given).shape == (2, 10, 11, 9)


def test_maps_must_be_maps():
    tensors, given = make()
    with pytest.raises(ValueError, match=r"expected maps of \[B, C, H, W\]"):
        ops.halo_attention(tensors[0][0], *tensors[1:], **given)


def test_large_tables_are_left_to_the_gathering_one():
    """Large tables would not fit into the shared memory of a GPU."""
    tensors, given = make(heads=1, d=128, e=4, block=8, halo=16, batch=1, dtype=torch.float32)
    with backend("triton"), pytest.raises(ValueError, match="too large for heads of 128 channels"):
        ops.halo_attention(*tensors, **given)


@pytest.mark.parametrize("relative", [True, False])
def test_it_is_a_registered_operator(relative):
    """Checks schema, fake tensors and gradients, on which torch.compile relies."""
    from interlayer.ops._triton import halo_attention as kernels

    tensors, given = make(5, 6, d=4, e=3, batch=1, dtype=torch.float32, relative=relative)
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    plan = (given["heads"], given["block"], given["halo"], given["stride"], False, True, 0.5, 0.25)
    # without "test_aot_dispatch_dynamic", which runs the interpreter on tensors without data
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(kernels._forward.registered, (*leaves, *plan), test_utils=tests)
    output, lse = kernels._forward(*leaves, *plan)
    given = (torch.ones_like(output), *leaves, output, lse)
    given = [None if t is None else t.detach() for t in given]
    torch.library.opcheck(kernels._backward.registered, (*given, *plan), test_utils=tests)


def test_its_flops_are_counted():
    """torch's counter counts the two products of the forward pass and five of the backward pass, without positions."""
    from torch.utils.flop_counter import FlopCounterMode

    tensors, given = make(8, 8, d=4, e=6, block=4, halo=1, batch=1, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in tensors]
    with backend("triton"), FlopCounterMode(display=False) as counter:
        result = ops.halo_attention(*leaves, **given)
        forward = counter.get_total_flops()
        result.sum().backward()
    assert forward == 2 * 64 * 36 * 2 * (4 + 6)
    assert counter.get_total_flops() - forward == 2 * 64 * 36 * 2 * (3 * 4 + 2 * 6)


REAL = [  # shapes of stages of H1, H4 and H7: tiles large enough for matrix products on a GPU
    {"height": 64, "width": 64, "heads": 4, "d": 16, "e": 16, "block": 8, "halo": 3},
    {"height": 64, "width": 64, "heads": 4, "d": 16, "e": 16, "block": 8, "halo": 3, "stride": 2},
    {"height": 16, "width": 16, "heads": 8, "d": 32, "e": 32, "block": 8, "halo": 3},
    {"height": 8, "width": 8, "heads": 8, "d": 64, "e": 64, "block": 8, "halo": 3},
    {"height": 96, "width": 96, "heads": 4, "d": 16, "e": 16, "block": 12, "halo": 2},
    {"height": 96, "width": 96, "heads": 4, "d": 16, "e": 64, "block": 12, "halo": 2, "stride": 2},
    {"height": 150, "width": 150, "heads": 4, "d": 16, "e": 64, "block": 10, "halo": 3},
    {"height": 75, "width": 75, "heads": 8, "d": 32, "e": 128, "block": 10, "halo": 3, "stride": 1},
    {"height": 19, "width": 19, "heads": 8, "d": 64, "e": 256, "block": 10, "halo": 3},
    {"height": 32, "width": 48, "heads": 2, "d": 32, "e": 32, "block": 32, "halo": 4},
]


@pytest.mark.skipif(DEVICE != "cuda", reason="too large for the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", REAL)
def test_real_sizes(shape, dtype):
    """Runs four times on two images, because values read from a wrong address may be right by chance."""
    tensors, given = make(**shape, dtype=dtype)
    expected = run("gathered", [t.float() for t in tensors], given)
    for _ in range(4):
        for what, value in run("triton", tensors, given).items():
            error = (value.float() - expected[what]).norm() / expected[what].norm()
            assert error < 2e-2, f"{what}: {error:.1e}"


def test_keys_are_numbered_without_a_division():
    """It is exact for every window that the kernel supports, clipped to any width, and for every chunk."""
    from interlayer.ops._triton.halo_attention import MOST_WINDOW, RECIPROCAL

    for cols in range(1, MOST_WINDOW + 1):
        n = torch.arange(MOST_WINDOW * cols + 128, dtype=torch.int32)
        products = n.long() * (RECIPROCAL.value // cols + 1)
        assert products.max() < 2**31
        assert torch.equal(products // RECIPROCAL.value, n.long() // cols)


@pytest.mark.skipif(DEVICE != "cuda", reason="compiles for a GPU")
def test_compiled():
    """It compiles to one graph with the same result and gradients."""
    tensors, given = make(20, 17, d=16, e=16, block=8, halo=3, dtype=torch.bfloat16)

    def attention(*leaves):
        return ops.halo_attention(*(t * 1.0 for t in leaves), **given)

    compiled, found = torch.compile(attention, fullgraph=True), []
    for function in (attention, compiled):
        leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
        result = function(*leaves)
        result.float().square().sum().backward()
        found.append([result, *(t.grad for t in leaves)])
    for one, other in zip(*found, strict=True):
        assert (one.float() - other.float()).norm() < 1e-2 * one.float().norm()


@pytest.mark.parametrize("stride", [1, 2])
def test_windows_say_where_queries_and_keys_are(stride):
    """Without scores, every query gets the mean of the values at the keys of its block."""
    (q, k, v, *_), options = make(relative=False, stride=stride)
    with backend("reference"):
        result = ops.halo_attention(0 * q, k, v, None, None, **options)
    windows = ops.halo_windows(*k.shape[2:], block=options["block"], halo=options["halo"], stride=stride)
    expected = torch.zeros_like(result)
    for queries, keys in zip(*windows, strict=True):
        queries, keys = queries[queries >= 0], keys[keys >= 0]
        expected.flatten(2)[:, :, queries] = v.flatten(2)[:, :, keys].mean(-1, keepdim=True)
    torch.testing.assert_close(result, expected)
    assert sorted(windows[0][windows[0] >= 0].tolist()) == list(range(q.shape[2] * q.shape[3])), "every query once"
    with pytest.raises(ValueError, match="divisible by the stride 3, got 4"):
        ops.halo_windows(8, 8, block=4, halo=1, stride=3)
