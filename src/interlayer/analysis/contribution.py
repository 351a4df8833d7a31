"""How much a network uses its mechanisms.

Ratio of a block, for one image. The block has the input x and, if the mechanism has one, the memory m that really
arrive there:

    ratio = ‖f(x, m) - g(x)‖ / ‖f(x, m)‖        f: the block with the mechanism, g: the block without it

Both outputs are computed from the same x, so the ratio is about this block alone. It means the same for every
mechanism: the part of the output that is added (layer attention), the change by a gate or by the average token, and the
effect of a recurrent state that the block reads. It is averaged over images. A module after the last block that reads
the memory, as the classifier does with recurrent layer aggregation, has a ratio too; there the state is set to zero.

Predictions are compared with those of the network with all its mechanisms switched off: `interlayer.switched_off`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..hosts import attached_blocks, attached_mechanisms, evaluating, switched_off
from ..hosts.carried import release
from ..hosts.placing.recurrent_state import JoiningHead, backbone_inputs
from ..hosts.switch import modules_off, some_switchable, switchable_mechanisms
from ..mechanisms import BlockMechanism, ContextBroadcast
from ..tasks import Classification, Collective, Scores, Task
from .batches import image_batches, shape_text
from .capture import After, hooked
from .contribution_record import BlockContribution, Contribution

BATCH = 64  # number of images that `contribution` runs at a time, if it is given one tensor
RATIO_IMAGES = 256  # number of images after which an evaluation adds no further batch to the ratios


@torch.no_grad()
def contribution(
    model: nn.Module, images: Tensor | Iterable[Any], labels: Tensor | Sequence[int] | None = None
) -> Contribution:
    """Measures how much of each block's output comes from the mechanism, and what switching it off does.

    The ratio of a block is ‖with - without‖ / ‖with‖, where both outputs of the block are computed from the same input,
    with and without the mechanism; it is averaged over images. Predictions are compared with those of the network with
    all mechanisms switched off (`interlayer.switched_off`). The model runs in eval mode and is left as it was.

    Args:
        model: a network with mechanisms, attached by `interlayer.attach` or built under a name such as
            "resnet50_mrla_light".
        images: preprocessed images [B, C, H, W], or an iterable of such batches or of batches (images, labels), such as
            a DataLoader. They are moved to the device of the model.
        labels: the label of every image, [B], if the batches do not contain them.

    Returns:
        The ratio of every block, the number of changed predictions if the outputs are logits [B, classes], and the
        accuracy with and without the mechanism if there are labels. `print` shows it as a table and one sentence.

    Raises:
        ValueError: the network has no mechanism that can be switched off, or images and labels do not fit.

    >>> print(interlayer.contribution(model, images, labels))
    """
    meter = ContributionMeter(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    count = changed = right = right_without = labeled = 0
    has_answers = True
    with evaluating(model):
        for batch, targets in image_batches(images, labels, size=BATCH):
            batch = batch.to(device)
            outputs, without = meter.run(lambda batch=batch: model(batch))  # type: ignore[misc]
            count += len(batch)
            answers, other = _classes(outputs), _classes(without)
            if answers is None or other is None:
                if targets is not None:
                    raise ValueError(
                        f"labels need a network whose outputs are logits [B, classes], got {shape_text(outputs)}"
                    )
                has_answers = False
                continue
            changed += int((answers != other).sum())
            if targets is not None:
                targets = targets.to(device)
                labeled += len(targets)
                right += int((answers == targets).sum())
                right_without += int((other == targets).sum())
    if not count:
        raise ValueError("there are no images to measure the contribution on")
    if labeled not in (0, count):
        raise ValueError(f"expected a label for each of the {count} images, got {labeled}")
    rows, images_measured = meter.rows()
    return Contribution(
        rows,
        count,
        changed if has_answers else None,
        Classification.headline if labeled else None,
        right / count if labeled else None,
        right_without / count if labeled else None,
        images_measured,
    )


def _classes(outputs: Any) -> Tensor | None:
    """Returns the predicted class of each image, or None if the outputs are not logits [B, classes]."""
    logits = getattr(outputs, "logits", outputs)  # transformers returns a record
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] < 2:
        return None
    return logits.argmax(1)


@dataclass
class _Site:
    """A module whose output depends on a mechanism.

    Args:
        name: the name of the module: a block, or a module after the last block.
        module: the module.
        stage: number of the stage, starting from 1; None after the last block, and if the mechanism has no stages.
        mechanism: the name of the mechanism.
        modules: the modules of the mechanism in this block.
        inputs: for a classifier that also reads a state, the number of its inputs from the backbone.
        total: sum of the ratios over the images so far.
    """

    name: str
    module: nn.Module
    stage: int | None
    mechanism: str
    modules: list[BlockMechanism]
    inputs: int | None = None
    total: Tensor | None = field(default=None, repr=False)

    def without(self, args: Any, kwargs: Any) -> Tensor:
        """Returns the output of the module without the mechanism."""
        if self.inputs is not None:
            x = args[0].clone()
            x[..., self.inputs :] = 0
            return _output(self.module(x))
        with modules_off(self.modules):
            return _output(self.module(*args, **kwargs))


class ContributionMeter:
    """Runs a network with and without its mechanisms, and accumulates the ratio of every block.

    Args:
        model: a network with mechanisms, in eval mode.
        images: the number of images after which no further batch is added to the ratios; all images if None.
    """

    def __init__(self, model: nn.Module, images: int | None = None) -> None:
        self.model, self.images = model, images
        self.sites = _sites(model)
        self.counted: Tensor | None = None  # of the current batch: the images that are no padding
        self.count: Tensor | None = None
        self.runs_again = False
        self.seen = 0

    def run(self, forward: Callable[[], Any], counted: Tensor | None = None) -> tuple[Any, Any]:
        """Returns the outputs of a batch with the mechanisms and with all of them switched off.

        Args:
            forward: runs the network on the batch.
            counted: [B], False for images that are padding.
        """
        self.counted = counted
        by_module: dict[nn.Module, list[_Site]] = {}
        for site in self.sites if self.images is None or self.seen < self.images else ():
            by_module.setdefault(site.module, []).append(site)
        hooks = {m: self._hook(sites, first=number == 0) for number, (m, sites) in enumerate(by_module.items())}
        with hooked(self.model, after=hooks):
            outputs = forward()
        with switched_off(self.model):
            return outputs, forward()

    def _hook(self, sites: list[_Site], first: bool) -> After:
        def measure(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.runs_again:  # a block inside a block that is run without a mechanism
                return
            self.runs_again = True
            try:
                with_mechanism = _output(output)
                for site in sites:
                    ratios = _ratios(with_mechanism, site.without(args, kwargs))
                    if self.counted is not None:
                        ratios = ratios * self.counted
                    total = ratios.double().sum()
                    site.total = total if site.total is None else site.total + total
            finally:
                self.runs_again = False
            if first:
                count = len(with_mechanism) if self.counted is None else self.counted.sum()
                self.count = count + (self.count if self.count is not None else total.new_zeros(()))
                self.seen += len(with_mechanism)

        return measure

    def rows(self, collective: Collective | None = None) -> tuple[tuple[BlockContribution, ...], int]:
        """Returns the ratio of every block, averaged over the images of all ranks, and the number of these images.

        Every rank must call this.
        """
        if self.count is None:
            raise ValueError(f"no block of {type(self.model).__name__} with a mechanism was run")
        sums = torch.stack([self.count, *(site.total for site in self.sites if site.total is not None)])
        count, *totals = (collective or Collective()).sum(sums).tolist()
        measured = [site for site in self.sites if site.total is not None]
        rows = (
            BlockContribution(site.name, site.stage, site.mechanism, total / count)
            for site, total in zip(measured, totals, strict=True)
        )
        return tuple(rows), int(count)


class TaskContribution:
    """Measures the contribution of the mechanisms during an evaluation with the metrics of a task.

    Args:
        task: the task. Its `answers` decide what a changed prediction is.
        model: a network with mechanisms, in eval mode.
        images: the number of images after which no further batch is added to the ratios of blocks.
    """

    def __init__(self, task: Task, model: nn.Module, *, images: int | None = RATIO_IMAGES) -> None:
        self.task = task
        self.meter = ContributionMeter(model, images)
        self.evaluator = task.evaluator()
        self.changed: Tensor | None = None

    def run(self, forward: Callable[[], Any], targets: Any, places: Tensor) -> Any:
        """Returns the outputs of a batch, and compares them with those of the network without its mechanisms.

        Args:
            forward: runs the network on the batch.
            targets, places: the targets and the indices of the images, as for `Evaluator.update`.
        """
        counted = places >= 0
        outputs, without = self.meter.run(forward, counted)
        self.evaluator.update(without, targets, places)
        answers, other = self.task.answers(outputs), self.task.answers(without)
        if answers is not None and other is not None:
            differ = (answers != other).flatten(1).any(1) if answers.dim() > 1 else answers != other
            changed = (differ & counted).sum()
            self.changed = changed if self.changed is None else self.changed + changed
        return outputs

    def result(self, scores: Scores, collective: Collective | None = None) -> Contribution:
        """Returns the contribution, given the scores of the evaluation with mechanisms. Every rank must call this."""
        collective, name = collective or Collective(), self.task.headline.name
        without = self.evaluator.result(collective).metrics[name]
        changed = None if self.changed is None else int(collective.sum(self.changed))
        rows, images = self.meter.rows(collective)
        return Contribution(rows, scores.count, changed, self.task.headline, scores.metrics[name], without, images)


def task_contribution(task: Task, model: nn.Module) -> TaskContribution | None:
    """Returns a `TaskContribution`, or None if the network has no mechanism that can be switched off."""
    return TaskContribution(task, model) if switchable_mechanisms(model) else None


def _sites(model: nn.Module) -> list[_Site]:
    """Returns every block with a mechanism, and the modules after the last block that read a state."""
    names = some_switchable(model)
    sites: dict[tuple[str, str], _Site] = {}

    def add(name: str, stage: int | None, mechanism: BlockMechanism) -> None:
        if isinstance(mechanism, ContextBroadcast):
            name, stage = _enclosing_block(name), None  # it is placed by blocks, not by stages
        key = (name, names[mechanism])
        site = sites.setdefault(key, _Site(name, model.get_submodule(name), stage, names[mechanism], []))
        site.modules.append(mechanism)

    seen = set()
    for name, block in attached_blocks(model):
        for entry in block.interlayer_entries:
            mechanism = entry.mechanism_in(block)
            add(name, entry.place.stage + 1, mechanism)
            seen.add(mechanism)
    for path, mechanism in attached_mechanisms(model).items():
        if mechanism in names and mechanism not in seen:  # in ViLT, whose blocks hold it in another way
            add(path.rpartition(".")[0], 1, mechanism)
    return [*sites.values(), *_heads(model, names)]


def _heads(model: nn.Module, names: dict[BlockMechanism, str]) -> Iterator[_Site]:
    """Yields the module that reads the last state of recurrent layer aggregation, if there is one."""
    for name, module in model.named_modules():
        if isinstance(module, JoiningHead):
            (rla,) = module.interlayer_state
            if rla.join is not None:
                yield _Site(name, module, None, names[rla], [rla])  # type: ignore[arg-type]
        widened = backbone_inputs(module)
        if widened is not None:
            classifier, inputs = widened
            path = next(path for path, each in model.named_modules() if each is classifier)
            rla = module.rla  # type: ignore[assignment]
            yield _Site(path, classifier, None, names[rla], [rla], inputs)


def _enclosing_block(name: str) -> str:
    """Returns the block that contains a component: the nearest element of a list of modules, "blocks.6" of
    "blocks.6.mlp".
    """
    path = name.split(".")
    numbers = [index for index, step in enumerate(path) if step.isdigit()]
    return ".".join(path[: numbers[-1] + 1]) if numbers else name


def _output(value: Any) -> Tensor:
    """Returns the output of a block, which may be returned with memories or in a tuple."""
    value = release(value)
    return _output(value[0]) if isinstance(value, (tuple, list)) else value


def _ratios(output: Tensor, without: Tensor) -> Tensor:
    """Returns ‖output - without‖ / ‖output‖ of each image, [B].

    The ratio is zero where nothing changes, and one where the mechanism leaves nothing, so that it is always finite.
    """
    output, without = output.flatten(1).float(), without.flatten(1).float()
    change, size = (output - without).norm(dim=1), output.norm(dim=1)
    return torch.where(size == 0, (change > 0).to(change), change / size)
