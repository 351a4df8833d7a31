"""Tests of kernels that torch.compile takes as one operator, and that every other tracer replaces by the reference."""

import pytest
import test_light_layer as light_layer
import test_residual_end as residual_end
import torch
from operation_tester import DOUBLE, copied
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.flop_counter import FlopCounterMode

from interlayer import backend

QUICK = (0, 1, 4, 6)  # the other kinds of MRLA-light are tested in the slow tests
KINDS = [
    *(
        pytest.param(light_layer.TestLightLayer, kind, marks=[] if i in QUICK else pytest.mark.slow)
        for i, kind in enumerate(light_layer.KINDS)
    ),
    *((residual_end.TestResidualEnd, {"relu": relu, "skip": skip}) for relu, skip in residual_end.KINDS),
]


def operators(graph_module):
    """The names of this library's operators in a graph."""
    targets = (str(node.target) for node in graph_module.graph.nodes)
    return [target for target in targets if target.startswith("interlayer.")]


def compiled(function):
    """Returns a compiled function and the list of operators of its graphs, which grows as it is compiled."""
    found = []

    def compile_graph(graph_module, inputs):
        found.append(operators(graph_module))
        return aot_eager(graph_module, inputs)

    return torch.compile(function, backend=compile_graph, fullgraph=True), found


@pytest.mark.parametrize(("tester", "kind"), KINDS)
def test_compiled_kernels_compute_the_same(tester, kind):
    """Results, gradients and running statistics equal those of the reference, and the graph has a single operator."""

    class Compiled(tester):
        __test__ = False

        def call(self, sample):
            function, self.found = compiled(super().call)
            return function(sample)

    case = Compiled()
    sample = case.cast(case.sample(**kind), DOUBLE)
    expected = tester().expected(sample)
    found = case.run("triton", sample)
    assert found.keys() == expected.keys()
    assert case.found == [[f"interlayer.{case.operation.__name__}.default"]]
    for what, value in found.items():
        torch.testing.assert_close(
            value.double(), expected[what], msg=lambda m, what=what: f"{what}: {m}", **case.tolerance(DOUBLE)
        )


@pytest.mark.parametrize("module", [light_layer, residual_end])
def test_any_batch_size_uses_one_graph(module):
    """Neither the predicate nor the shapes of the results add guards on the batch size."""
    function, found = compiled(lambda *args: module.call(*args)[0])
    for batch in (2, 3, 7):
        sample = module.make((batch, 36, 5, 3)).map(lambda t: t.to(DOUBLE))
        with backend("reference"):
            expected = module.call(sample.map(copied))[0]
        for name in ("x", "previous", "shortcut"):
            if sample.tensors.get(name) is not None:
                torch._dynamo.mark_dynamic(sample.tensors[name], 0)
        with backend("triton"):
            result = function(sample)
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=2e-3)
    assert len(found) == 1
    assert len(found[0]) == 1


class Layer(torch.nn.Module):
    """A layer with MRLA-light, or the end of a block with a state, of which only the map is an input."""

    def __init__(self, module, **options):
        super().__init__()
        self.module = module
        self.sample = module.make(**options).map(lambda t: t.float())

    def forward(self, x):
        return self.module.call(self.sample.change(x=x))[0]


def layers():
    eval_mode = {"training": False}
    return [Layer(light_layer), Layer(light_layer, **eval_mode), Layer(residual_end)]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_have_plain_operators(strict):
    """A program is loaded where this library is not installed."""
    for layer in layers():
        x = layer.sample.tensors["x"]
        with backend("triton"):
            program = torch.export.export(layer, (x,), strict=strict)
        assert not operators(program.graph_module)
        assert len(program.graph_module.graph.nodes) > 5


def test_other_tracers_see_plain_operators():
    """TorchScript, FLOP counters, tensors without values, and transforms in compiled functions get the reference."""
    layer = Layer(light_layer, training=False)
    x = layer.sample.tensors["x"].contiguous(memory_format=torch.channels_last)
    with backend("reference"):
        expected = layer(x)
        tangent = torch.func.jvp(layer, (x,), (x,))[1]
    with backend("triton"):
        traced = torch.jit.trace(layer, (x,))
        assert not [
            node.kind() for node in traced.inlined_graph.nodes() if not node.kind().startswith(("aten", "prim"))
        ]
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert counter.get_total_flops() > 0
        meta = Layer(light_layer, training=False)
        meta.sample = meta.sample.map(lambda t: t.to("meta"))
        assert meta(x.to("meta")).shape == x.shape
        torch.testing.assert_close(torch.func.jvp(layer, (x,), (x,))[1], tangent)
        function, found = compiled(torch.vmap(layer))
        torch.testing.assert_close(function(x[None])[0], expected, rtol=1e-4, atol=1e-4)
    assert found == [[]]


def test_statistics_are_updated_once_if_a_layer_is_recomputed():
    """A compiled layer under activation checkpointing runs twice, but counts its batch once."""
    updated = []
    for recomputed in (False, True):
        layer = Layer(light_layer)
        x = layer.sample.tensors["x"].requires_grad_()

        def run(x, layer=layer, recomputed=recomputed):
            if recomputed:
                return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return layer(x)

        with backend("triton"):
            function, _ = compiled(run)
            function(x).square().sum().backward()
        updated.append([x.grad, *layer.sample.buffers.values()])
    torch.testing.assert_close(*updated)
