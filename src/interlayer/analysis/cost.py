"""Cost of a model: parameters, FLOPs, memory of a training step, throughput."""

from __future__ import annotations

import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

from ..hosts import evaluating, probe_image
from .shapes import Memory, RememberedShapes

LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)


def count_parameters(model: nn.Module, *, layers_only: bool = False) -> int:
    """Returns the number of parameters.

    Args:
        model: the model.
        layers_only: whether to count only the parameters of convolutions, linear layers and norms, as tools that
            inspect layers do. Lambda, class tokens and position embeddings, which belong to no layer, are not counted.
    """
    if not layers_only:
        return sum(p.numel() for p in model.parameters())
    layers = (module for module in model.modules() if isinstance(module, LAYERS))
    return sum(p.numel() for layer in layers for p in layer.parameters(recurse=False))


def count_flops(
    model: nn.Module,
    image_size: int | tuple[int, int] | None = None,
    *,
    convention: Literal["paper", "torch"] = "paper",
) -> int:
    """Returns the number of multiply-adds of a forward pass of one image in eval mode.

    Args:
        model: the model.
        image_size: size of the image; the default size of the model if None.
        convention: "paper" counts the multiply-adds of convolutions and linear layers, 2 for each element of a batch
            norm and 1 for each input element of a global average pool. Activations, elementwise operations and matrix
            products of attention are not counted. This reproduces the figures of the MRLA paper for ResNets.
            "torch" is half the count of `torch.utils.flop_counter`: convolutions and all matrix products, those of
            attention included, fused or not.
    """
    paper, by_torch = count_flops_both_ways(model, image_size)
    return by_torch if convention == "torch" else paper


def count_flops_both_ways(
    model: nn.Module, image_size: int | tuple[int, int] | None = None, memory: Memory | None = None
) -> tuple[int, int]:
    """Returns `count_flops` for the conventions "paper" and "torch", computed in one forward pass.

    Args:
        model: the model.
        image_size: size of the image; the default size of the model if None.
        memory: results of operators on the meta device, from counting other networks; see `RememberedShapes`.
    """
    image = probe_image(model, image_size)
    with (
        evaluating(model),
        torch.no_grad(),
        _frozen(model),
        FlopCounterMode(display=False, custom_mapping=_fused_attention_counts()) as counter,
        _PaperCounter() as paper,
        RememberedShapes(memory, counter.get_total_flops) as shapes,
    ):
        model(image)
    return paper.total, (counter.get_total_flops() + shapes.repeated) // 2


def _fused_attention_counts() -> dict[Any, Any]:
    """Returns the counts of fused attention on devices for which some versions of torch have none, such as the CPU."""
    names = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable")
    operators = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return {operator: _attention_flops for operator in operators if operator not in flop_registry}


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Disables gradients of parameters: torch's counter fails on modules that receive one as an input, as in PiT."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


class _PaperCounter(TorchFunctionMode):
    """Counts calls of torch functions, which distinguish linear layers from other matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        arguments = dict(zip(("input", "weight"), args, strict=False)) | kwargs
        if func in (torch.conv1d, torch.conv2d, torch.conv3d):
            self.total += result.numel() * arguments["weight"][0].numel()
        elif func is F.linear:
            self.total += result.numel() * arguments["weight"].shape[1]
        elif func in (F.batch_norm, torch.batch_norm):
            self.total += 2 * result.numel()
        elif func is F.adaptive_avg_pool2d or (func in (torch.mean, Tensor.mean) and _is_global_pool(args, kwargs)):
            self.total += arguments["input"].numel()
        return result


def _is_global_pool(args: Any, kwargs: Any) -> bool:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    return (
        bool(args)
        and args[0].dim() == 4
        and isinstance(dims, (tuple, list))
        and sorted(d % 4 for d in dims) in ([2, 3], [1, 2])
    )


@dataclass(frozen=True)
class Setting:
    """Settings of a measurement."""

    batch_size: int = 8
    image_size: int | tuple[int, int] | None = None
    device: str = "cpu"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    channels_last: bool = False
    compile: bool = False
    steps: int = 5
    graph: bool = False  # time steps captured as a CUDA graph, without the launch overhead of the CPU


@dataclass(frozen=True)
class Cost:
    """Cost of one model in one setting."""

    parameters: int
    flops: int  # multiply-adds of convolutions and of all matrix products, those of attention included, for one image
    memory: int  # peak bytes allocated in a training step: weights, gradients, momentum, activations
    train_seconds: float  # median time of a training step
    inference_seconds: float  # median time of a forward pass in eval mode
    batch_size: int
    image_size: tuple[int, int] = (0, 0)  # height and width

    @property
    def train_throughput(self) -> float:
        return self.batch_size / self.train_seconds

    @property
    def inference_throughput(self) -> float:
        return self.batch_size / self.inference_seconds


def measure(model: nn.Module, setting: Setting, progress: Callable[[str], None] = lambda what: None) -> Cost:
    """Measures a model. `progress` is called with the name of each measurement before it starts."""
    if setting.graph and not (setting.device.startswith("cuda") and setting.precision != "float16"):
        raise ValueError(
            "steps are captured as a CUDA graph on a GPU alone, in float32 or bfloat16 (float16's scaler looks at the "
            f"gradients), got {setting.device} and {setting.precision}"
        )
    progress("counting")
    flops = count_flops(model, setting.image_size, convention="torch")
    parameters = count_parameters(model)
    run, images, optimizer, train_step = _training(model, setting)
    progress("warming up")
    for _ in range(3 if setting.compile or setting.device != "cpu" else 1):
        train_step()
    if setting.compile:
        _time_inference(run, model, images, replace(setting, steps=1, graph=False))
    progress("memory")
    memory = _peak_memory(train_step, model, optimizer, setting.device)
    progress("training step")
    train_seconds = _median_seconds(train_step, setting)
    progress("inference")
    inference_seconds = _time_inference(run, model, images, setting)
    size = (images.shape[-2], images.shape[-1])
    return Cost(parameters, flops, memory, train_seconds, inference_seconds, setting.batch_size, size)


def measure_memory(model: nn.Module, setting: Setting) -> int:
    """Returns the peak bytes allocated in a training step: weights, gradients, momentum, activations."""
    _, _, optimizer, train_step = _training(model, setting)
    train_step()
    return _peak_memory(train_step, model, optimizer, setting.device)


def _training(model: nn.Module, setting: Setting) -> tuple[Any, Tensor, torch.optim.Optimizer, Callable[[], None]]:
    """Returns the (compiled) model, its input, an optimizer and a function that runs a training step."""
    memory_format = torch.channels_last if setting.channels_last else torch.contiguous_format
    model = model.to(setting.device).to(memory_format=memory_format).train()
    images = probe_image(model, setting.image_size).repeat(setting.batch_size, 1, 1, 1)
    images = images.contiguous(memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if setting.compile:
        torch.compiler.reset()  # models measured before would count towards the recompilation limit
    run = torch.compile(model) if setting.compile else model
    scaler = torch.amp.GradScaler(setting.device, enabled=setting.precision == "float16")

    def train_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with _autocast(setting):
            loss = _as_scalar(run(images))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return run, images, optimizer, train_step


def measure_inference(model: nn.Module, setting: Setting) -> float:
    """Returns the median time of a forward pass in eval mode, in seconds."""
    model = model.to(setting.device)
    images = probe_image(model, setting.image_size).repeat(setting.batch_size, 1, 1, 1)
    return _time_inference(model, model, images, setting)


def _time_inference(run: Callable[..., Any], model: nn.Module, images: Tensor, setting: Setting) -> float:
    def infer() -> None:
        with torch.no_grad(), _autocast(setting):
            run(images)

    with evaluating(model):
        infer()
        return _median_seconds(infer, setting)


def _autocast(setting: Setting) -> AbstractContextManager[Any]:
    if setting.precision == "float32":
        return nullcontext()
    return torch.autocast(setting.device, getattr(torch, setting.precision))


def _as_scalar(output: Any) -> Tensor:
    tensors = output if isinstance(output, (list, tuple)) else [output]
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """Captures a step as a CUDA graph, which is replayed without the launch overhead of the CPU."""
    stream = _side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


@cache
def _side_stream() -> torch.cuda.Stream:
    """Returns one stream for all captures: memory that cuBLAS keeps for each stream would count for later models."""
    return torch.cuda.Stream()


def _median_seconds(step: Callable[[], None], setting: Setting) -> float:
    """Returns the median time of a step. On a GPU, steps are queued without synchronization, as in training."""
    if setting.graph:
        step = _captured(step)
    if setting.device.startswith("cuda"):
        return median_queued_seconds(step, setting.steps)
    seconds = []
    for _ in range(setting.steps):
        _synchronize(setting.device)
        start = time.perf_counter()
        step()
        _synchronize(setting.device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def median_queued_seconds(step: Callable[[], None], steps: int) -> float:
    """Returns the median time between the ends of consecutive steps on the GPU, queued without synchronization."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    events[-1].synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(events)) / 1e3


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def _peak_memory(step: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated() + peak_bytes(step, device)
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    optimizer.zero_grad(set_to_none=True)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + peak_bytes(step, device)


def peak_bytes(run: Callable[[], Any], device: str) -> int:
    """Returns the peak bytes that `run` allocates in addition to those allocated before."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with _StorageTracker() as tracker:
        run()
    return tracker.peak


class _StorageTracker(TorchDispatchMode):
    """Tracks the peak bytes of tensors created inside it, on devices without memory statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.now = 0
        self.live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self.live:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            self.now -= size
            self.live.pop(address, None)

        self.live[address] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)
