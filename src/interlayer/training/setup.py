"""Sets up a run: creates everything that a training step needs."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..models.build import ModelError, check_network, check_size, split_name
from ..models.origin import Origin, changes_outputs, origin_of
from ..models.pretrained import find_pretrained
from ..tasks import Task, TaskError, make_task
from .data import (
    Data,
    EvalBatches,
    ImageTransform,
    LoadingContext,
    Ranks,
    TrainBatches,
    eval_batches,
    open_data,
    train_batches,
)
from .data.context import Report, no_report
from .data.seeds import mixed_seed, seed_libraries
from .files import TrainingError
from .freezing import Freeze, check_fine_tuning, make_freeze
from .optimization import make_optimizer, make_scheduler
from .processes import Processes
from .recipe import Recipe, RecipeError
from .sharding import full_state, load_full_weights, shard

logger = logging.getLogger(__name__)
PROBE_SIZE = 224  # of the image on which a backbone under a detector or segmenter is probed
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TUNED: dict[str, Any] = {"max_autotune_gemm": True, "combo_kernels": True}  # inductor options for compile=tuned


@dataclass
class TrainingSetup:
    """A run that is ready to train.

    Args:
        recipe: the recipe of the run.
        processes: the ranks and their devices.
        task: the task to learn.
        data: the training, validation and test splits.
        loading: how images are loaded and transformed.
        batches: the training batches.
        held_out: the batches that are evaluated after every epoch: the validation split, or the test split if there is
            no validation split.
        network: the network itself, sharded if the recipe says so.
        replicated: the network wrapped in DistributedDataParallel, or the network itself in a single process.
        model: the module that a training step calls: `replicated`, compiled if the recipe says so.
        optimizer: the optimizer of the network's parameters.
        scheduler: timm's learning rate schedule; None if the learning rate never changes.
        scaler: scales the loss in float16, and is disabled otherwise.
        ema: the moving average of the weights; None if the recipe has none.
        origin: which tensors of the network came from trained weights.
        freeze: what is frozen, and for how long.
        starts_changed: whether an untrained mechanism changes what the network with the trained weights computes.
    """

    recipe: Recipe
    processes: Processes
    task: Task
    data: Data
    loading: LoadingContext
    batches: TrainBatches
    held_out: EvalBatches
    network: nn.Module
    replicated: nn.Module
    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    ema: ModelEmaV3 | None
    origin: Origin
    freeze: Freeze
    starts_changed: bool

    @property
    def device(self) -> torch.device:
        return self.processes.device

    @property
    def lr(self) -> float:
        """The learning rate, without the factors of groups of parameters."""
        group = max(self.optimizer.param_groups, key=lambda group: group.get("lr_scale", 1.0) == 1.0)
        return float(group["lr"]) / group.get("lr_scale", 1.0)

    def train(self) -> None:
        """Puts the network into training mode, and its frozen batch norms into eval mode."""
        self.network.train()
        self.freeze.set_modes()

    def update_freeze(self, epoch: int, step: int) -> bool:
        """Freezes or unfreezes the network as the recipe says for a step. Returns whether anything has changed."""
        frozen = self.freeze.covers(epoch * self.batches.steps + step)
        if frozen == self.freeze.active:
            return False
        self.freeze.set(frozen)
        self.train()
        if self.replicated is not self.network:  # DistributedDataParallel averages what was trained when it was created
            self.replicated = self.model = None  # type: ignore[assignment]
            gc.collect()  # removes its hooks
            self.replicated = _replicate(self.network, self.recipe, self.processes)
            self.model = compile_network(self.replicated, self.recipe.compile)
        return True

    def set_lr(self, epoch: int, step: int) -> None:
        """Sets the learning rate of a step, which depends only on the epoch and the step."""
        if self.scheduler is not None:  # only one of the two calls acts: the schedule is by epoch or by step
            self.scheduler.step(epoch)
            self.scheduler.step_update(epoch * self.batches.steps + step)

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the autocast context of the forward pass."""
        dtype = AUTOCAST.get(self.recipe.precision)
        return torch.autocast(self.device.type, dtype) if dtype is not None else nullcontext()

    @property
    def evaluated_network(self) -> nn.Module:
        """The moving average if there is one, otherwise the network itself."""
        return self.ema.module if self.ema is not None else self.network

    def evaluated_weights(self) -> dict[str, Tensor]:
        """Returns the full, unsharded weights of the evaluated network. Every rank must call this."""
        if self.recipe.sharding == "fsdp":
            return full_state(self.network, None)[0]
        return self.evaluated_network.state_dict()

    def load_evaluated_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads weights that `evaluated_weights` returned. Every rank must call this."""
        if self.recipe.sharding == "fsdp":
            load_full_weights(self.network, tensors)
        else:
            self.evaluated_network.load_state_dict(tensors)

    def broadcast_buffers(self, network: nn.Module) -> None:
        """Copies the batch norm statistics of rank 0 to all ranks, which update their own during training."""
        if self.processes.world_size > 1:
            for buffer in network.buffers():
                torch.distributed.broadcast(buffer, 0)

    def test_batches(self) -> EvalBatches:
        """Returns the batches of the test split."""
        return eval_batches(self.data.test, dataclasses.replace(self.loading, report=no_report))


def set_up(recipe: Recipe, processes: Processes, data: Data | None, report: Report = no_report) -> TrainingSetup:
    """Sets up the run that a recipe describes.

    The random number generators are seeded once before the network is built, and again for the training steps.

    Args:
        data: the data, if several runs share it; opened from the recipe if None.
        report: called with the progress of loading images.
    """
    check_start(recipe)
    device = processes.device
    seed_libraries(mixed_seed("weights", recipe.seed))
    data = data or open_data(recipe)
    task = make_task(dataclasses.asdict(recipe), data.classes)
    set_precision(recipe, tune=task.fixed_size)
    network = build_network(task)
    transform = ImageTransform.of(task.backbone(network), recipe, task.image_size)
    if task.annotations == "labels":
        try:
            check_size(network, recipe.model, transform.size)
        except ModelError as error:
            raise TrainingError(str(error)) from error
    ranks = Ranks(processes.rank, processes.world_size)
    loading_recipe = dataclasses.replace(recipe, workers=available_workers(recipe.workers))
    loading = LoadingContext(loading_recipe, task, transform, ranks, device, data.problems, report)
    batches = train_batches(data.train, loading)
    held_out = eval_batches(data.validation if data.validation is not None else data.test, loading)
    if device.type == "cuda":
        torch.cuda.synchronize()  # makes the loaded images visible to every stream
    origin = origin_of(network)
    starts_changed = _starts_changed(task, network, transform.size)
    network = _place(network, recipe, processes)
    optimizer = make_optimizer(recipe, network, device, origin)
    scheduler = make_scheduler(recipe, optimizer, batches.steps)
    ema = ModelEmaV3(network, decay=recipe.ema) if recipe.ema else None
    freeze = make_freeze(recipe, network, origin, batches.steps)
    freeze.set(freeze.covers(0))
    replicated = _replicate(network, recipe, processes)
    # Evaluation runs the network eagerly: compiling it for evaluation would take longer than it saves.
    model = compile_network(replicated, recipe.compile)
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "float16")
    seed_libraries(mixed_seed("steps", recipe.seed, processes.rank))
    return TrainingSetup(
        recipe, processes, task, data, loading, batches, held_out, network, replicated, model,
        optimizer, scheduler, scaler, ema, origin, freeze, starts_changed,
    )  # fmt: skip


def check_start(recipe: Recipe) -> None:
    """Raises a `RecipeError` if the weights that a recipe starts from are needed but not named, or cannot be found."""
    check_fine_tuning(recipe)
    if recipe.weights and not Path(recipe.weights).is_file():
        raise RecipeError(f"weights={recipe.weights}: no such file")
    if recipe.pretrained and not recipe.weights and recipe.model:
        try:
            check_network(recipe.model)
            find_pretrained(split_name(recipe.model)[0], recipe.model_options)
        except ValueError as error:
            raise RecipeError(str(error)) from error


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_workers(workers: int) -> int:
    """Returns the number of workers that load images: at most one per core that this process can use."""
    return min(workers, max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def build_network(task: Task) -> nn.Module:
    """Builds the network of a task. Raises a `RecipeError` if it cannot be built."""
    try:
        return task.build()
    except (ModelError, TaskError) as error:
        raise RecipeError(str(error)) from error


def _starts_changed(task: Task, network: nn.Module, size: int) -> bool:
    backbone = task.backbone(network)
    size = size if task.annotations == "labels" else min(size, PROBE_SIZE)
    return changes_outputs(backbone, origin_of(backbone), size)


def set_precision(recipe: Recipe, *, tune: bool = True) -> None:
    """Sets the precision of matrix products and whether kernels must be deterministic.

    Args:
        tune: whether cuDNN measures which kernel is the fastest, which it repeats for every new size of images.
    """
    allowed = recipe.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cudnn.benchmark = tune and torch.cuda.is_available() and not recipe.deterministic
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # must be set before cuBLAS is initialized
    torch.use_deterministic_algorithms(recipe.deterministic, warn_only=True)


def _place(network: nn.Module, recipe: Recipe, processes: Processes) -> nn.Module:
    """Moves the network to its device and memory format, converts its batch norms and shards it, as the recipe says."""
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    network.to(processes.device, memory_format=memory_format)  # type: ignore[call-overload]
    if recipe.sync_batchnorm:
        if processes.world_size > 1 and processes.device.type == "cuda":
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        else:
            logger.warning("sync_batchnorm=true does nothing here: it is for several GPUs")
    if recipe.sharding == "fsdp":
        shard(network, processes)
    return network


def _replicate(network: nn.Module, recipe: Recipe, processes: Processes) -> nn.Module:
    """Averages gradients over ranks with DistributedDataParallel. A sharded network averages them itself."""
    if recipe.sharding != "none" or processes.world_size == 1:
        return network
    devices = [processes.device.index] if processes.device.type == "cuda" else None
    return DistributedDataParallel(network, device_ids=devices)


def compile_network(network: nn.Module, how: str) -> Any:
    """Compiles the network in the mode of the recipe's ``compile``. Returns it unchanged if the mode is "no"."""
    if how == "no":
        return network
    if how == "default":
        return torch.compile(network)
    from torch._inductor import select_algorithm

    select_algorithm.PRINT_AUTOTUNE = False  # otherwise its output covers the progress bars
    return torch.compile(network, options=TUNED)
