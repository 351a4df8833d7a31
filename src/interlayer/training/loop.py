"""The training loop.

A `Trainer` is one run in one folder. `run()` is a generator that yields after every step: `train` drains one, and a
comparison takes turns between several, each on a CUDA stream of its own, so that small networks fill the GPU together.

Nothing in a step waits for the device. The loss, the hits and the first step whose loss was not finite are summed on
the device and read when progress is shown, and always before a checkpoint is written. On one GPU with resident images,
augmentation, forward and backward pass are captured into one CUDA graph and replayed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from timm.loss import SoftTargetCrossEntropy
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..hosts.probe import reason
from ..models.build import check_size
from ..models.checkpoints import save_weights
from ..tasks import make_task
from .checkpoint import Checkpoints, random_state, restore_random_state
from .data import Data, EvalBatches, ImageTransform, LoadingContext, Ranks, eval_batches, open_data, train_batches
from .data.resident import ResidentTrainBatches
from .data.seeds import mixed_seed, seed_libraries
from .evaluation import Scores, evaluate_batches
from .files import FolderLock, TrainingError, write_json, write_text
from .logs import Logs, check_logs
from .network import build_network
from .parts import compiled, make_accelerator, make_optimizer, make_scheduler, set_precision, versions
from .recipe import Recipe, differences, read_recipe
from .sharding import full_state, load_full_state, load_full_weights, shard

logger = logging.getLogger(__name__)
WARMUP_STEPS = 3  # before a CUDA graph is captured
SHOW_SECONDS = 0.25  # between readings of the device's sums
AGREE_STEPS = 20  # between agreements of several processes to stop
MACHINE_KEYS = {  # may change when a run goes on: they do not change what is computed, but for the last bits
    "workers", "resident", "tensorboard", "wandb", "checkpoint_steps", "eval_batch_size", "compile", "cuda_graph",
}  # fmt: skip


class Stopped(Exception):  # noqa: N818  not an error: the run was asked to stop and did
    """The run saved a checkpoint and stopped where it was asked to."""


@dataclass(frozen=True)
class Progress:
    """Where a run is. Loss and accuracy are of the epoch so far, as last read."""

    folder: Path
    what: str  # what is being done: loading, training, evaluating, done
    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float = math.nan
    accuracy: float = math.nan
    eval_accuracy: float = math.nan
    images_per_second: float = math.nan
    seconds_left: float = math.nan


@dataclass
class Sums:
    """Sums of an epoch on the device: [loss, hits, images, first step whose loss was not finite or -1]."""

    values: Tensor
    step: Tensor  # that is being run

    @classmethod
    def zeros(cls, device: torch.device) -> Sums:
        values = torch.tensor([0.0, 0.0, 0.0, -1.0], dtype=torch.float64, device=device)
        return cls(values, torch.zeros((), dtype=torch.int64, device=device))

    def restart(self, step: int) -> None:
        self.values[:3].zero_()
        self.values[3:].fill_(-1)
        self.step.fill_(step)

    def add(self, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        labels = targets.argmax(dim=1) if targets.dim() == 2 else targets
        hits = (logits.argmax(dim=1) == labels).sum()
        count = len(labels)
        self.values[:3] += torch.stack([loss.double() * count, hits.double(), torch.full_like(hits, count).double()])
        first = (~torch.isfinite(loss)) & (self.values[3] < 0)
        self.values[3] = torch.where(first, self.step.double(), self.values[3])


class Trainer:
    """One run: a recipe trained in a folder.

    Args:
        recipe: what to train and how.
        folder: where the run's files go.
        resume: go on with the run that is in the folder, if there is one.
        data: the data, where several runs share it.
        accelerator: processes and devices, where several runs share them.
        stop: asked after every step; True saves a checkpoint and raises `Stopped`.
        show: told how loading goes, which happens between two steps of `run`.
        command: what to run to get this run again, for the record.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        *,
        resume: bool = False,
        data: Data | None = None,
        accelerator: Accelerator | None = None,
        stop: Callable[[], bool] = lambda: False,
        show: Callable[[Progress], None] = lambda progress: None,
        command: str = "",
    ) -> None:
        self.recipe, self.stop, self.show, self.command, self.resume = recipe, stop, show, command, resume
        self.accelerator = accelerator or make_accelerator(recipe)
        self.folder = agreed(folder, self.accelerator)
        self.device: torch.device = self.accelerator.device
        self.ranks = Ranks(self.accelerator.process_index, self.accelerator.num_processes)
        self.main = self.accelerator.is_main_process
        self.data = data
        self.checkpoints = Checkpoints(self.folder / "checkpoints")
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graph_refused: str | None = None  # why there is none, once it is known; empty if there can be one
        self.static_batch: Any = None
        self.steps_run = 0  # by this process
        self.read = [0.0, 0.0, 0.0, -1.0]  # the sums, as last read
        self.peeked: tuple[Tensor, torch.cuda.Event] | None = None  # sums on their way from the GPU
        self.logs: Logs | None = None
        self.position = (0, 0)  # epoch and step to go on with
        self.rows: list[dict[str, Any]] = []
        self.best: dict[str, float] | None = None
        self.seconds = 0.0
        self.best_weights: dict[str, Tensor] | None = None
        self.summary: dict[str, Any] = {}
        self.own_random = False  # whether random numbers are put aside between steps, for runs that take turns
        self.random: Any = None
        self.lock = FolderLock(self.folder) if self.main else None
        try:
            self._claim()
        except BaseException:
            self.close()
            raise

    # The folder

    def _claim(self) -> None:
        """Refuse a folder that holds another run."""
        written = (self.folder / "recipe.yaml").exists()
        if (written or self.checkpoints.all()) and not self.resume:
            raise TrainingError(
                f"{self.folder} already holds a run: --resume to go on with it, or choose another folder"
            )
        if written:
            check_same_recipe(self.folder, self.recipe)
        for unfinished in self.folder.glob(".*.safetensors.*"):  # of a process that was killed while it wrote
            unfinished.unlink(missing_ok=True)

    def close(self) -> None:
        """Let the folder go, and the GPU's memory."""
        self.graph = self.static_batch = None
        if hasattr(self, "stepper") and self.stepper in self.accelerator._optimizers:
            self.accelerator._optimizers.remove(self.stepper)  # accelerate would keep the network alive by it
        if self.logs is not None:
            self.logs.close()
        if self.lock is not None:
            self.lock.release(remove=not (self.folder / "recipe.yaml").exists())

    # Setting up

    def _set_up(self, report: Callable[[str, int, int], None]) -> None:
        recipe = self.recipe
        check_logs(recipe)
        set_precision(recipe)
        self._seed("weights")
        self.data = self.data or open_data(recipe)
        self.classes = self.data.classes
        self.network = build_network(recipe, len(self.classes))
        self.transform = ImageTransform.of(self.network, recipe)
        check_size(self.network, recipe.model, self.transform.size)
        task = make_task(dataclasses.asdict(recipe), self.classes)
        self.loading = LoadingContext(recipe, task, self.transform, self.ranks, self.device, self.data.problems, report)
        self.batch_transform = self.loading.batch_transform
        self.batches = train_batches(self.data.train, self.loading)
        watched = self.data.validation if self.data.validation is not None else self.data.test
        self.watched_batches = eval_batches(watched, self.loading)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # what was loaded is there for every stream
        memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self.network.to(self.device, memory_format=memory_format)  # type: ignore[call-overload]
        if recipe.sync_batchnorm:
            if self.ranks.world_size > 1 and self.device.type == "cuda":
                self.network = nn.SyncBatchNorm.convert_sync_batchnorm(self.network)
            else:
                logger.warning("sync_batchnorm=true does nothing here: it is for several GPUs")
        if recipe.sharding == "fsdp":
            shard(self.network, self.accelerator)
        if self.accelerator.scaler is not None:  # one of its own: runs of a comparison share the accelerator
            self.accelerator.scaler = torch.amp.GradScaler(self.device.type)
        self.optimizer = make_optimizer(recipe, self.network, self.device)
        self.scheduler = make_scheduler(recipe, self.optimizer, self.batches.steps)
        self.stepper = self.accelerator.prepare_optimizer(self.optimizer, device_placement=False)
        self.ema = ModelEmaV3(self.network, decay=recipe.ema) if recipe.ema else None
        self.trained: nn.Module = self.network
        if recipe.sharding == "none" and self.ranks.world_size > 1:
            devices = [self.device.index] if self.device.type == "cuda" else None
            self.trained = DistributedDataParallel(self.network, device_ids=devices)
        # evaluation runs the plain network: compiling that too takes longer than it saves
        self.run_model: Any = self.trained if recipe.compile == "no" else compiled(self.trained, recipe.compile)
        self.soft_loss = SoftTargetCrossEntropy()
        self.sums = Sums.zeros(self.device)
        self._seed("steps", self.ranks.rank)
        if self.resume:
            self._restore()
        if self.main and not (self.folder / "recipe.yaml").exists():  # only now: a mistake above leaves nothing behind
            write_text(self.folder / "recipe.yaml", recipe.to_yaml(self.command))
        self.logs = Logs(self.folder, recipe, self.rows) if self.main else None

    def _seed(self, purpose: str, *parts: int) -> None:
        seed_libraries(mixed_seed(purpose, self.recipe.seed, *parts))

    # Running

    def run(self) -> Iterator[Progress]:
        """Train to the end, yielding after every step. The last one yielded has `what == "done"`."""
        steps = self._run()
        while True:
            with self._on_stream():  # entered anew each time: the caller's stream is its own
                if self.own_random and self.random is not None:
                    restore_random_state(self.random, self.device)
                try:
                    progress = next(steps)
                except StopIteration:
                    return
                except torch.OutOfMemoryError as error:
                    raise TrainingError(
                        f"the GPU's memory is too small for batch_size={self.recipe.batch_size}: set accumulate="
                        f"{self.recipe.accumulate * 2} (the same training in smaller parts) or lower batch_size; if it "
                        f"was evaluating, set eval_batch_size; if it was loading, resident=no"
                    ) from error
                if self.own_random:
                    self.random = random_state(self.device)
            yield progress

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def _run(self) -> Iterator[Progress]:
        yield self._progress("loading", 0, 0, 0)
        self._set_up(lambda what, done, total: self.show(self._progress(what, 0, done, total)))
        start_epoch, start_step = self.position
        for epoch in range(start_epoch, self.recipe.epochs):
            yield from self._train_epoch(epoch, start_step)
            start_step = 0
            yield from self._end_epoch(epoch)
        yield from self._finish_run()

    def _train_epoch(self, epoch: int, start: int) -> Iterator[Progress]:
        recipe, steps = self.recipe, self.batches.steps
        if start == 0:
            self.sums.restart(0)
        self.network.train()
        self.epoch_began = self.read_at = time.perf_counter()
        self.epoch_start = start
        batches = self.batches.epoch(epoch, start)
        for step in range(start, steps):
            self._set_lr(epoch, step)
            self.batches.seed(epoch, step)
            self._step(next(batches))
            ended = step + 1 == steps
            if recipe.checkpoint_steps and (epoch * steps + step + 1) % recipe.checkpoint_steps == 0 and not ended:
                self._check_finite(epoch)
                self._save((epoch, step + 1))
            if self._asked_to_stop(step, ended) and not ended:
                self._check_finite(epoch)
                self._save((epoch, step + 1))
                raise Stopped(f"stopped at epoch {epoch + 1}, step {step + 1} of {steps}")
            if ended or self._must_read(step):
                self._check_finite(epoch)
            elif self.device.type == "cuda":
                self._peek(epoch)
            yield self._progress("training", epoch, step + 1, steps)

    def _must_read(self, step: int) -> bool:
        """Whether to wait for the sums: always on a CPU, where nothing waits; several processes must do it together."""
        return step % AGREE_STEPS == 0 if self.ranks.world_size > 1 else self.device.type == "cpu"

    def _peek(self, epoch: int) -> None:
        """Look at the sums of a while ago without waiting for the GPU."""
        if self.peeked is not None:
            values, event = self.peeked
            if event.query():
                self.read, self.peeked = values.tolist(), None
                if self.read[3] >= 0:
                    self._check_finite(epoch)
        elif time.perf_counter() - self.read_at > SHOW_SECONDS:
            values = torch.empty(4, dtype=torch.float64, pin_memory=True).copy_(self.sums.values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self.peeked, self.read_at = (values, event), time.perf_counter()

    def _set_lr(self, epoch: int, step: int) -> None:
        if self.scheduler is None:
            return
        if step == self.epoch_start:
            self.scheduler.step(epoch)
        self.scheduler.step_update(epoch * self.batches.steps + step)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _step(self, batch: Any) -> None:
        if self._captures() and self.steps_run >= WARMUP_STEPS:
            self._replay(batch)
        else:
            self.optimizer.zero_grad(set_to_none=True)
            parts = _parts(batch, self.recipe.accumulate)
            for index, (part, weight) in enumerate(parts):
                with nullcontext() if index == len(parts) - 1 else self._no_sync():
                    self._forward_backward(part, weight)
            self.sums.step += 1
        if self.recipe.clip_grad is not None:
            self.accelerator.unscale_gradients(self.stepper)
            nn.utils.clip_grad_norm_(self.network.parameters(), self.recipe.clip_grad)
        self.stepper.step()
        if self.ema is not None:
            self.ema.update(self.network)
        self.steps_run += 1

    def _no_sync(self) -> AbstractContextManager[Any]:
        return self.trained.no_sync() if isinstance(self.trained, DistributedDataParallel) else nullcontext()

    def _forward_backward(self, batch: Any, weight: float = 1.0) -> None:
        images, targets = self.batches.transform_batch(batch)
        with self._autocast():
            logits = self.run_model(images)
        logits = logits.float()
        if targets.dim() == 2:
            loss = self.soft_loss(logits, targets)
        else:
            loss = F.cross_entropy(logits, targets, label_smoothing=self.recipe.label_smoothing)
        self.accelerator.backward(loss * weight)
        self.sums.add(loss.detach(), logits.detach(), targets)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.recipe.precision)
        return torch.autocast(self.device.type, dtype) if dtype is not None else nullcontext()

    # CUDA graphs

    def _captures(self) -> bool:
        if self.graph_refused is None:
            self.graph_refused = self._why_no_graph()
            if self.recipe.cuda_graph == "yes" and self.graph_refused:
                raise TrainingError(f"cuda_graph=yes: the step cannot be captured, {self.graph_refused}")
        return not self.graph_refused

    def _why_no_graph(self) -> str:
        """Why the step cannot be one CUDA graph; empty if it can."""
        if self.recipe.cuda_graph == "no":
            return "the recipe says no"
        if self.device.type != "cuda":
            return "there is no GPU"
        if not isinstance(self.batches, ResidentTrainBatches):
            return "the images are not resident"
        if self.ranks.world_size > 1 or self.recipe.accumulate > 1:
            return "one process and accumulate=1 are needed"
        if self.recipe.precision == "float16":
            return "float16's scaler looks at the gradients"
        return ""

    def _replay(self, batch: Tensor) -> None:
        """Run the step as a graph, capturing it the first time."""
        if self.graph is None:
            self.static_batch = batch.clone()
            self.optimizer.zero_grad(set_to_none=True)  # gradients of the capture live in its own memory
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.batches.generator)  # type: ignore[attr-defined]
            try:
                with torch.cuda.graph(graph, stream=self.stream):
                    self._forward_backward(self.static_batch)
                    self.sums.step += 1
            except RuntimeError as error:
                raise TrainingError(
                    f"the step of {self.recipe.model} cannot be captured as a CUDA graph ({reason(error)[:200]}): "
                    f"set cuda_graph=no"
                ) from error
            self.graph = graph
        self.static_batch.copy_(batch)
        self.graph.replay()

    # What was seen

    def _check_finite(self, epoch: int) -> None:
        """Read the sums; stop if a loss was not finite."""
        self.read, self.peeked = self.sums.values.tolist(), None
        self.read_at = time.perf_counter()
        if self.ranks.world_size > 1:
            gathered = self.accelerator.gather(self.sums.values[None])
            seen = gathered[:, 3][gathered[:, 3] >= 0]  # one process passes it on to the others a step later
            first_bad = float(seen.min()) if len(seen) else -1.0
            self.read = [*gathered[:, :3].sum(0).tolist(), first_bad]
        bad = int(self.read[3])
        if bad < 0:
            return
        self.epoch_start = bad
        self._set_lr(epoch, bad)  # as it was then
        names = self.batches.names(epoch, bad)
        raise TrainingError(
            f"the loss is not finite at epoch {epoch + 1}, step {bad + 1} of {self.batches.steps}, learning rate "
            f"{self.lr:.3g}; the last checkpoint is from before it. Lower lr or set clip_grad; the batch was "
            f"{', '.join(names)}"
        )

    def _asked_to_stop(self, step: int, ended: bool) -> bool:
        asked = self.stop()
        if self.ranks.world_size == 1:
            return asked
        if step % AGREE_STEPS and not ended:
            return False
        asked_by = self.accelerator.reduce(torch.tensor(float(asked), device=self.device))
        return bool(asked_by > 0)

    def _progress(self, what: str, epoch: int, step: int, steps: int) -> Progress:
        loss, hits, count, _ = self.read
        rate = left = math.nan
        if what == "training":
            elapsed = time.perf_counter() - self.epoch_began
            done = step - self.epoch_start
            rate = done * self.recipe.batch_size / elapsed
            left = elapsed / done * ((self.recipe.epochs - epoch) * steps - step)
        evaluated = self.rows[-1]["eval_accuracy"] if self.rows else math.nan
        return Progress(
            self.folder, what, epoch, self.recipe.epochs, step, steps,
            loss / count if count else math.nan, hits / count if count else math.nan, evaluated, rate, left,
        )  # fmt: skip

    def _end_epoch(self, epoch: int) -> Iterator[Progress]:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        seconds = time.perf_counter() - self.epoch_began
        trained = (self.batches.steps - self.epoch_start) * self.recipe.batch_size
        loss, hits, count, _ = self.read
        began = time.perf_counter()
        scores = Scores.none()
        for evaluated in self._evaluate(self.watched_batches):
            scores = evaluated
            yield self._progress("evaluating", epoch, self.batches.steps, self.batches.steps)
        row = {
            "epoch": epoch + 1,
            "step": (epoch + 1) * self.batches.steps,
            "lr": self.lr,
            "train_loss": loss / count,
            "train_accuracy": hits / count,
            "eval_loss": scores.loss,
            "eval_accuracy": scores.accuracy,
            "eval_top5": scores.top5,
            "seconds": seconds,
            "eval_seconds": time.perf_counter() - began,
            "images_per_second": trained / seconds,
        }
        self.rows.append(row)
        self.seconds += seconds + row["eval_seconds"]
        if not math.isfinite(scores.loss):
            raise TrainingError(
                f"the evaluation after epoch {epoch + 1} has a loss that is not finite; the last checkpoint is from "
                f"before it. Lower lr or set clip_grad"
            )
        chosen = self.data is not None and self.data.validation is not None
        if chosen and (self.best is None or scores.accuracy > self.best["eval_accuracy"]):
            self.best = {"epoch": epoch + 1, "eval_accuracy": scores.accuracy}
            self.best_weights = {name: tensor.detach().cpu().clone() for name, tensor in self._weights().items()}
        if self.logs is not None:
            self.logs.add(row)
        self._save((epoch + 1, 0))
        yield self._progress("evaluated", epoch, self.batches.steps, self.batches.steps)
        if self._asked_to_stop(0, True) and epoch + 1 < self.recipe.epochs:
            raise Stopped(f"stopped at the end of epoch {epoch + 1}")

    def _evaluate(self, batches: EvalBatches, predictions: bool = False) -> Iterator[Scores]:
        network = self.evaluated_network
        self._agree_on_buffers(network)
        network.eval()
        try:
            yield from evaluate_batches(
                network,
                batches,
                self.batch_transform,
                self._autocast,
                len(self.classes),
                self.accelerator,
                predictions=predictions,
            )
        finally:
            self.network.train()

    @property
    def evaluated_network(self) -> nn.Module:
        """The moving average where there is one."""
        return self.ema.module if self.ema is not None else self.network

    def _agree_on_buffers(self, network: nn.Module) -> None:
        """Give all processes the first one's batch norm statistics, which drift apart."""
        if self.ranks.world_size > 1:
            for buffer in network.buffers():
                torch.distributed.broadcast(buffer, 0)

    # Checkpoints

    def _weights(self) -> dict[str, Tensor]:
        """Weights of the whole network that is evaluated."""
        if self.recipe.sharding == "fsdp":
            return full_state(self.network, None)[0]
        return self.evaluated_network.state_dict()

    def _save(self, position: tuple[int, int]) -> None:
        epoch, step = position
        if step and not self.batches.exact_resume:
            step = 0  # a stream begins its epoch again
        self._agree_on_buffers(self.network)
        if self.recipe.sharding == "fsdp":
            tensors, optimizer = full_state(self.network, self.optimizer)
        else:
            self._check_weights(epoch)
            tensors, optimizer = self.network.state_dict(), self.optimizer.state_dict()
        own = {"random": random_state(self.device), "sums": self.sums.values.cpu(), "step": int(self.sums.step)}
        states = [own]
        if self.ranks.world_size > 1:
            states = [{}] * self.ranks.world_size
            torch.distributed.all_gather_object(states, own)
        if self.main:
            weights = {"weights": tensors}
            if self.ema is not None:
                weights["ema"] = self.ema.module.state_dict()
            if self.best_weights is not None:
                weights["best"] = self.best_weights
            scaler = self.accelerator.scaler
            assert self.data is not None
            state = {
                "position": [epoch, step],
                "optimizer": optimizer,
                "scaler": scaler.state_dict() if scaler is not None else None,
                "processes": states,
                "rows": self.rows,
                "best": self.best,
                "seconds": self.seconds,
                "bad_images": self.data.problems.found,
            }
            self.checkpoints.save(epoch * self.batches.steps + step, self.network, weights, state)
        self.accelerator.wait_for_everyone()

    def _check_weights(self, epoch: int) -> None:
        """Keep an update that ruined the weights, after a loss that was still finite, out of the checkpoints."""
        norms = torch.stack(torch._foreach_norm([p.detach() for p in self.network.parameters()]))
        if not torch.isfinite(norms).all():
            raise TrainingError(
                f"the weights are not finite in epoch {epoch + 1}, learning rate {self.lr:.3g}; the last checkpoint is "
                f"from before it. Lower lr or set clip_grad"
            )

    def _restore(self) -> None:
        found = self.checkpoints.load() if self.main else None
        if self.ranks.world_size > 1:  # the other processes may be on machines that do not see the folder
            found = broadcast_object_list([found])[0]
        if found is None:
            return
        path, weights, state = found
        if len(state["processes"]) != self.ranks.world_size:
            raise TrainingError(
                f"{path} was written by {len(state['processes'])} processes, these are {self.ranks.world_size}: "
                f"use as many"
            )
        if self.recipe.sharding == "fsdp":
            load_full_state(self.network, self.optimizer, weights["weights"], state["optimizer"])
        else:
            self.network.load_state_dict(weights["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
        if self.ema is not None:
            self.ema.module.load_state_dict(weights["ema"])
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        own = state["processes"][self.ranks.rank]
        epoch, start = state["position"]
        if start:
            self.sums.restart(own["step"])
            self.sums.values.copy_(own["sums"])
        self.position = (epoch, start)
        self.rows, self.best, self.seconds = state["rows"], state["best"], state["seconds"]
        self.best_weights = dict(weights["best"]) if "best" in weights else None
        assert self.data is not None
        self.data.problems.found.update(state["bad_images"])
        restore_random_state(own["random"], self.device)

    # The end

    def _finish_run(self) -> Iterator[Progress]:
        """Test the chosen weights once, and write what the run came to."""
        assert self.data is not None
        chosen, batches = self.recipe.epochs, self.watched_batches
        if self.best is not None and self.best_weights is not None:
            chosen, batches = int(self.best["epoch"]), eval_batches(self.data.test, self.loading)
            self._load_weights(self.best_weights)
        scores = Scores.none()
        for evaluated in self._evaluate(batches, predictions=True):
            scores = evaluated
            yield self._progress("testing", self.recipe.epochs - 1, self.batches.steps, self.batches.steps)
        weights = self._weights()
        self.summary = self._summary(scores, chosen)
        if self.main:
            save_weights(self.network, self.folder / "weights.safetensors", weights)
            scores.save_predictions(self.folder / "predictions.safetensors")
            write_json(self.folder / "summary.json", self.summary)
        self.accelerator.wait_for_everyone()
        yield self._progress("done", self.recipe.epochs, self.batches.steps, self.batches.steps)

    def _load_weights(self, tensors: dict[str, Tensor]) -> None:
        if self.recipe.sharding == "fsdp":
            load_full_weights(self.network, tensors)
        else:
            self.evaluated_network.load_state_dict(tensors)

    def _summary(self, scores: Scores, chosen: int) -> dict[str, Any]:
        assert self.data is not None
        return {
            "model": self.recipe.model,
            "seed": self.recipe.seed,
            "test": {"accuracy": scores.accuracy, "top5": scores.top5, "loss": scores.loss, "images": scores.count},
            "chosen_epoch": chosen,
            "chosen_by": "validation accuracy" if self.best is not None else "last epoch",
            "epochs": self.recipe.epochs,
            "train_images": len(self.data.train),
            "classes": list(self.classes),
            "image_size": self.transform.size,
            "mean": list(self.transform.mean),
            "std": list(self.transform.std),
            "crop_pct": self.transform.crop_pct,
            "interpolation": self.transform.interpolation,
            "seconds": self.seconds,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU",
            "processes": self.ranks.world_size,
            "bad_images": self.data.problems.found,
            "notes": self.data.notes,
            "command": self.command,
            "versions": versions(),
        }


def _parts(batch: Any, count: int) -> list[tuple[Any, float]]:
    """A batch (indices, or pixels and labels) in `count` parts, each with its share of the batch.

    A batch that bad images made smaller than `count` has fewer parts.
    """
    if count == 1:
        return [(batch, 1.0)]
    tensors = (batch,) if isinstance(batch, Tensor) else batch
    total = len(tensors[0])
    pieces = list(zip(*(tensor.tensor_split(min(count, total)) for tensor in tensors), strict=True))
    return [(piece[0] if isinstance(batch, Tensor) else piece, len(piece[0]) / total) for piece in pieces]


def agreed(folder: Path, accelerator: Accelerator) -> Path:
    """The folder that the first process chose, where several chose by the clock."""
    if accelerator.num_processes > 1:
        folder = Path(broadcast_object_list([str(folder)])[0])
    return folder


def check_same_recipe(folder: Path, recipe: Recipe) -> None:
    """Refuse a folder whose run had another recipe."""
    changed = {
        key: values
        for key, values in differences(read_recipe(folder / "recipe.yaml"), recipe).items()
        if key not in MACHINE_KEYS
    }
    if changed:
        listed = ", ".join(f"{key} {before!r} -> {now!r}" for key, (before, now) in changed.items())
        raise TrainingError(f"{folder} holds a run of another recipe ({listed}): choose another folder")


def train(
    recipe: Recipe,
    folder: Path,
    *,
    show: Callable[[Progress], None] = lambda progress: None,
    **options: Any,
) -> dict[str, Any]:
    """Train a recipe in a folder to the end and return its summary. `options` are those of `Trainer`."""
    trainer = Trainer(recipe, folder, show=show, **options)
    try:
        for progress in trainer.run():
            show(progress)
    finally:
        trainer.close()
    return trainer.summary
