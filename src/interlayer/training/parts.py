"""The parts a run is put together from: processes and device, precision, optimiser, schedule, compilation."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import timm
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

from ..hosts.finding.probe import reason
from .files import TrainingError
from .recipe import Recipe

FUSED = {"sgd", "momentum", "adam", "adamw"}  # optimisers whose PyTorch form has one kernel for all parameters
TUNED: dict[str, Any] = {"max_autotune_gemm": True, "combo_kernels": True}  # of inductor


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Processes, devices and mixed precision, from accelerate."""
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(recipe.precision, "no")
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("device=cuda: torch sees no GPU here, use device=cpu")
    if recipe.device not in (None, "cpu", "cuda"):
        raise TrainingError(
            f"device must be cpu or cuda, got {recipe.device!r}; choose among GPUs with CUDA_VISIBLE_DEVICES"
        )
    cpu = recipe.device == "cpu" or not torch.cuda.is_available()
    if precision == "fp16" and cpu:
        raise TrainingError("precision=float16 needs a GPU: use bfloat16 or float32 on the CPU")
    if AcceleratorState._shared_state:  # runs that follow each other in one process may differ in precision
        AcceleratorState._reset_state(reset_partial_state=AcceleratorState().num_processes == 1)
    return Accelerator(mixed_precision=precision, cpu=cpu)


def set_precision(recipe: Recipe) -> None:
    """Precision of products, and whether kernels must give the same bits every time."""
    allowed = recipe.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cudnn.benchmark = torch.cuda.is_available() and not recipe.deterministic
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(recipe.deterministic, warn_only=True)


def make_optimizer(recipe: Recipe, network: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """timm's optimiser of the recipe, in its one-kernel form on a GPU."""
    options = dict(recipe.optimizer_options)
    if device.type == "cuda" and recipe.optimizer in FUSED and recipe.sharding == "none":
        options.setdefault("fused", True)
    try:
        return create_optimizer_v2(
            network,
            opt=recipe.optimizer,
            lr=recipe.scaled_lr,
            weight_decay=recipe.weight_decay,
            momentum=recipe.momentum,
            filter_bias_and_bn=not recipe.decay_norms_and_biases,
            **{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()},
        )
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:
        known = ", ".join(sorted(timm.optim.list_optimizers()))
        message = f"optimizer={recipe.optimizer} cannot be made: {reason(error)}; timm knows {known}"
        raise TrainingError(message) from error


def make_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """timm's schedule of the learning rate; None where it never changes."""
    if recipe.schedule == "constant" and not recipe.warmup_epochs:
        return None
    by_epoch = recipe.schedule_on == "epoch"
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched={"constant": "multistep"}.get(recipe.schedule, recipe.schedule),
        num_epochs=recipe.epochs,
        decay_epochs=recipe.decay_epochs,  # type: ignore[arg-type]
        # timm's multistep looks one epoch ahead: it would decay at the start of epoch 149 for a milestone of 150
        decay_milestones=[] if recipe.schedule == "constant" else [m + by_epoch for m in recipe.milestones],
        decay_rate=recipe.decay_rate,
        min_lr=recipe.scaled_min_lr,
        warmup_lr=recipe.warmup_lr,
        warmup_epochs=recipe.warmup_epochs,  # type: ignore[arg-type]
        step_on_epochs=by_epoch,
        updates_per_epoch=steps,
    )
    return scheduler


def compiled(network: nn.Module, how: str) -> Any:
    """The network compiled, as the recipe's `compile` says."""
    if how == "default":
        return torch.compile(network)
    from torch._inductor import select_algorithm

    select_algorithm.PRINT_AUTOTUNE = False  # pages of it, over the progress bars
    return torch.compile(network, options=TUNED)


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("interlayer", "torch", "torchvision", "timm", "accelerate", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "from source"
    return found
