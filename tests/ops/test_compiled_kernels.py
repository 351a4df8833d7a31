"""Tests of kernels that torch.compile takes as one operator, and that every other tracer replaces by the reference."""

from functools import partial

import pytest
import test_base_layer as base_layer
import test_base_tokens as base_tokens
import test_light_layer as light_layer
import test_light_tokens as light_tokens
import test_residual_end as residual_end
import torch
from operation_tester import DOUBLE, copied
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.flop_counter import FlopCounterMode

from interlayer import backend

QUICK = (0, 4)  # the other kinds of MRLA-light are tested in the slow tests
THREE = {"shape": (2, 12, 3, 2), "heads": 3, "layers": 3, "computed": 3}  # gradients pass through two layers
BASE_KINDS = [
    THREE,
    {**THREE, "layers": 4, "relu": True, "mask": True, "end": False},  # the first key and value are given
    {**THREE, "computed": 2, "training": False},
    {**THREE, "relu": True},
    {**THREE, "layers": 12, "computed": 2, "skip": False},
]
TOKENS = {**THREE, "shape": (2, 12, (3, 2), 1)}
TOKEN_KINDS = [
    TOKENS,
    {**TOKENS, "layers": 4, "add_prefix": True, "mask": True},  # the first key and value are given
    {**TOKENS, "shape": (3, 12, (1, 1), 0), "layers": 19, "computed": 2},  # more layers than a kernel reads
]
LINK = "interlayer.link.default"  # tensors that enter a graph are linked to its operators
KINDS = [
    *(
        pytest.param(light_layer.TestLightLayer, kind, marks=[] if i in QUICK else pytest.mark.slow)
        for i, kind in enumerate(light_layer.KINDS)
    ),
    *((residual_end.TestResidualEnd, {"relu": relu, "skip": skip}) for relu, skip in residual_end.KINDS),
    *(
        pytest.param(base_layer.TestBaseLayer, kind, marks=[] if i < 1 else pytest.mark.slow)
        for i, kind in enumerate(BASE_KINDS)
    ),
    *(
        pytest.param(base_tokens.TestBaseTokens, kind, marks=[] if i < 1 else pytest.mark.slow)
        for i, kind in enumerate(TOKEN_KINDS)
    ),
]
STAGES = pytest.mark.parametrize(("module", "kind"), [(base_layer, THREE), (base_tokens, TOKENS)])


def operation(module):
    """The name of the operation that a module tests."""
    return module.__name__.removeprefix("test_")


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
    """Results, gradients and running statistics equal those of the reference, and each layer is a single operator."""

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
    operator = f"interlayer.{case.operation.__name__}.default"
    assert [[name for name in names if name != LINK] for names in case.found] == [[operator] * kind.get("computed", 1)]
    for what, value in found.items():
        torch.testing.assert_close(
            value.double(), expected[what], msg=lambda m, what=what: f"{what}: {m}", **case.tolerance(DOUBLE)
        )


@pytest.mark.parametrize(
    "module", [light_layer, residual_end, base_layer, pytest.param(base_tokens, marks=pytest.mark.slow)]
)
def test_any_batch_size_uses_one_graph(module):
    """Neither the predicate nor the shapes of the results add guards on the batch size."""
    function, found = compiled(lambda *args: module.call(*args)[0])
    for batch in (2, 3, 7):
        shape = (batch, 12, (3, 2), 1) if module is base_tokens else (batch, 12, 3, 2)
        sample = module.make(shape).map(lambda t: t.to(DOUBLE))
        with backend("reference"):
            expected = module.call(sample.map(copied))[0]
        for name, tensor in sample.tensors.items():
            if tensor is not None and name.rstrip("_012") in ("x", "previous", "shortcut", "key", "value"):
                torch._dynamo.mark_dynamic(tensor, 0)
        with backend("triton"):
            result = function(sample)
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=2e-3)
    assert len(found) == 1
    assert len([name for name in found[0] if name != LINK]) == 1


@pytest.mark.parametrize(
    ("module", "kind"), [pytest.param(base_layer, THREE, marks=pytest.mark.slow), (base_tokens, TOKENS)]
)
def test_compiled_layers_without_a_backward_pass(module, kind):
    """Keys and values are passed on as they are, without a link for their gradients."""
    sample = module.make(**kind).map(lambda t: t.to(DOUBLE))
    function, found = compiled(module.call)
    with backend("triton"), torch.no_grad():
        torch.testing.assert_close(function(sample.map(copied)), module.call(sample.map(copied)))
    assert found == [[f"interlayer.{operation(module)}.default"] * 3]


class Layer(torch.nn.Module):
    """A layer with MRLA, or the end of a block with a state, of which only the map or the tokens are an input."""

    def __init__(self, module, **options):
        super().__init__()
        self.module = module
        self.sample = module.make(**options).map(lambda t: t.float())
        self.name = next(name for name in self.sample.tensors if name in ("x", "x_0"))

    @property
    def x(self):
        return self.sample.tensors[self.name]

    def forward(self, x):
        return self.module.call(self.sample.change(**{self.name: x}))[0]


def layers():
    eval_mode = {"training": False}
    others = (light_layer, residual_end, base_layer, light_tokens, base_tokens)
    return [Layer(light_layer, **eval_mode), *map(Layer, others)]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_have_plain_operators(strict):
    """A program is loaded where this library is not installed."""
    for layer in layers():
        x = layer.x
        with backend("triton"):
            program = torch.export.export(layer, (x,), strict=strict)
        assert not operators(program.graph_module)
        assert len(program.graph_module.graph.nodes) > 5


@pytest.mark.parametrize(("module", "options"), [(light_layer, {"training": False}), (base_tokens, {})])
def test_other_tracers_see_plain_operators(module, options):
    """TorchScript, FLOP counters, tensors without values, and transforms in compiled functions get the reference."""
    layer = Layer(module, **options)
    x = layer.x
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
        meta = Layer(module, **options)
        meta.sample = meta.sample.map(lambda t: t.to("meta"))
        assert meta(x.to("meta")).shape == x.shape
        torch.testing.assert_close(torch.func.jvp(layer, (x,), (x,))[1], tangent)
        function, found = compiled(torch.vmap(layer))
        torch.testing.assert_close(function(x[None])[0], expected, rtol=1e-4, atol=1e-4)
    assert found == [[]]


@pytest.mark.parametrize("module", [light_layer, pytest.param(base_layer, marks=pytest.mark.slow)])
def test_statistics_are_updated_once_if_a_layer_is_recomputed(module):
    """A compiled layer under activation checkpointing runs twice, but counts its batch once."""
    updated = []
    for recomputed in (False, True):
        layer = Layer(module)
        x = layer.x.requires_grad_()

        def run(x, layer=layer, recomputed=recomputed):
            if recomputed:
                return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return layer(x)

        with backend("triton"):
            function, _ = compiled(run)
            function(x).square().sum().backward()
        updated.append([x.grad, *layer.sample.buffers.values()])
    torch.testing.assert_close(*updated)


class Stage:
    """Three layers with MRLA-base."""

    def __init__(self, module, kind):
        self.run_layer = module.run_layer
        self.sample = module.make(**kind).map(lambda t: t.to(DOUBLE))
        self.leaves = [t.requires_grad_() for t in self.sample.tensors.values()]

    def run(self, n, memory):
        output, _, *memory = self.run_layer(self.sample, n, *memory)
        return output.square().sum(), memory

    def run_by_reference(self, n, memory):
        with backend("reference"):
            return self.run(n, memory)

    def loss(self, *functions):
        """Run each layer by one of the functions."""
        memory, loss = ((), ()), 0
        for n, function in enumerate(functions):
            part, memory = function(n, memory)
            loss = loss + (n + 1) * part
        return loss

    def results(self, loss):
        loss.backward()
        return [loss.detach(), *self.sample.buffers.values(), *(leaf.grad for leaf in self.leaves)]


@pytest.mark.slow
@STAGES
def test_a_compiled_stage_can_have_a_layer_without_kernels(module, kind):
    """Its reference reads the keys and values of operators, and their gradients reach them."""
    expected, stage = Stage(module, kind), Stage(module, kind)
    with backend("triton"):
        function, found = compiled(lambda: stage.loss(stage.run, stage.run, stage.run_by_reference))
        torch.testing.assert_close(
            stage.results(function()), expected.results(expected.loss(*[expected.run] * 3)), rtol=1e-8, atol=1e-8
        )
    assert found == [[f"interlayer.{operation(module)}.default"] * 2]


@pytest.mark.slow
@STAGES
def test_layers_can_be_compiled_one_by_one(module, kind):
    """Keys and values, and their gradients, pass from a compiled layer to one that is not, and back."""
    expected, stage = Stage(module, kind), Stage(module, kind)
    with backend("triton"):
        first, third = (compiled(partial(stage.run, n))[0] for n in (0, 2))  # as an argument, n would be a symbol
        torch.testing.assert_close(
            stage.results(stage.loss(lambda n, memory: first(memory), stage.run, lambda n, memory: third(memory))),
            expected.results(expected.loss(*[expected.run] * 3)),
            rtol=1e-8,
            atol=1e-8,
        )
