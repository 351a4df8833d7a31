"""The robustness of networks to perturbed images, side by side (CB, Section 4.6).

What is random, noise and the start of PGD, is repeated with other seeds and has a mean and a confidence interval. What
is not random is evaluated once. The random numbers of an image depend on the seed, the repetition and the index of the
image, so that networks with the same input size see the same noise.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..analysis.robustness import PERTURBATIONS, Inputs, Perturbation, PerturbedScore
from ..tasks import Collective, Evaluator, Metric, Scores, Task
from ..tasks.show import spread
from ..training import Progress, TrainingError
from ..training.data import Data, EvalBatches, Images, LoadingContext, Ranks, eval_batches
from ..training.data.images import Subset
from ..training.data.seeds import mixed_seed
from .evaluate import open_to_evaluate
from .statistics import interval_half_width
from .trained import LoadedNetwork

logger = logging.getLogger(__name__)
REPEATS = 5  # CB, Table 9
ATTACK_PIXELS = 2**21  # number of pixels in a batch, 41 images of 224 x 224: attacks keep activations for gradients


@dataclass(frozen=True)
class Condition:
    """A perturbation at one of its strengths. Without a perturbation, images are evaluated as they are."""

    perturbation: Perturbation | None = None
    strength: float = 0.0

    @property
    def title(self) -> str:
        return "none" if self.perturbation is None else self.perturbation.title

    @property
    def label(self) -> str:
        return "" if self.perturbation is None else self.perturbation.label(self.strength)

    def repeats(self, wanted: int) -> int:
        """Returns how often the condition is evaluated."""
        return wanted if self.perturbation is not None and self.perturbation.random else 1


@dataclass(frozen=True)
class Example:
    """An image under a condition, [3, H, W] with values from 0 to 1, and the same image without perturbation."""

    condition: Condition
    image: Tensor
    original: Tensor


@dataclass(frozen=True)
class Robustness:
    """The scores of several networks under the same conditions.

    Args:
        data: the name of the data.
        images: the number of images.
        metric: the headline metric of the task.
        repeats: the number of repetitions of what is random.
        seed: the seed of what is random.
        scores: the score of each network under each condition, by the name of the network.
        examples: an image under each condition; attacks are on the first network.
        bad_images: images that could not be used, with the reasons.
        notes: messages about the data.
    """

    data: str
    images: int
    metric: Metric
    repeats: int
    seed: int
    scores: Mapping[str, Mapping[Condition, PerturbedScore]]
    examples: Sequence[Example] = ()
    bad_images: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def conditions(self) -> list[Condition]:
        return list(next(iter(self.scores.values())))

    @property
    def perturbations(self) -> list[Perturbation]:
        found = (condition.perturbation for condition in self.conditions)
        return list(dict.fromkeys(row for row in found if row is not None))

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON-serializable values."""
        return {
            "data": self.data,
            "images": self.images,
            "metric": self.metric.name,
            "repeats": self.repeats,
            "seed": self.seed,
            "networks": list(self.scores),
            "results": [self._entry(condition) for condition in self.conditions],
            "bad_images": dict(self.bad_images),
        }

    def _entry(self, condition: Condition) -> dict[str, Any]:
        row = condition.perturbation
        scores = {
            name: {"mean": score.mean, "half_width": score.half_width, "values": list(score.values)}
            for name, score in ((name, scores[condition]) for name, scores in self.scores.items())
        }
        return {
            "perturbation": None if row is None else row.name,
            "strength": None if row is None else condition.strength,
            "label": condition.label,
            "random": row is not None and row.random,
            "scores": scores,
        }


def robustness(
    networks: Mapping[str, LoadedNetwork],
    data: str | None = None,
    *,
    perturbations: Sequence[Perturbation] = tuple(PERTURBATIONS.values()),
    repeats: int = REPEATS,
    images: int | None = None,
    seed: int = 0,
    split: str | None = None,
    labels: str | None = None,
    restrict: bool | None = None,
    skip_option: str = "on_bad_image=skip",
    show: Callable[[Progress], None] = lambda progress: None,
) -> Robustness:
    """Evaluates networks on perturbed images.

    Args:
        networks: the networks, by the name that they have in the results.
        data, split, labels, restrict, skip_option: the images, as in `evaluate`.
        perturbations: what is done to the images; see `interlayer.analysis.robustness.PERTURBATIONS`.
        repeats: the number of repetitions of what is random.
        images: the number of images, which are evenly spaced in the data; all of them if None.
        seed: the seed of what is random.
        show: called with the progress.
    """
    if repeats < 1:
        raise TrainingError(f"expected repeats of at least 1, got {repeats}")
    _check_together(networks, data, perturbations)
    conditions = [Condition(), *(Condition(row, strength) for row in perturbations for strength in row.strengths)]
    scores: dict[str, dict[Condition, PerturbedScore]] = {}
    notes: dict[str, None] = {}
    bad: dict[str, str] = {}
    counts: dict[str, int] = {}
    examples: list[Example] = []
    metric = next(iter(networks.values())).task.headline
    for name, trained in networks.items():
        recipe, opened, task = open_to_evaluate(
            trained, data, split=split, labels=labels, restrict=restrict, skip_option=skip_option
        )
        for note in opened.notes:
            if note not in notes:
                logger.warning(note)
            notes[note] = None
        size = trained.transform.size
        recipe = recipe.replace(eval_batch_size=recipe.eval_batch_size or max(1, ATTACK_PIXELS // size**2))
        context = LoadingContext(recipe, task, trained.transform, Ranks(), trained.device, opened.problems)
        batches = eval_batches(_some(opened, images), context)
        perturbed = PerturbedEvaluation(trained, task, conditions, repeats=repeats, seed=seed)
        total = batches.count * sum(condition.repeats(repeats) for condition in conditions)
        for done, condition in perturbed.run(batches):
            show(Progress(Path(name), f"measuring {condition.title} {condition.label}", 0, 1, min(done, total), total))
        show(Progress(Path(name), "done", 0, 1, total, total))
        results = perturbed.results()
        scores[name] = {key: _score([each.metrics[metric.name] for each in found]) for key, found in results.items()}
        counts[name] = results[conditions[0]][0].count
        bad |= opened.problems.found
        examples = examples or perturbed.examples
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count:,} for {name}" for name, count in counts.items())
        raise TrainingError(f"the networks have different images: {listed}; give networks of the same classes")
    return Robustness(
        recipe.data, counts[name], metric, repeats, seed, scores, examples, bad, list(notes)
    )  # fmt: skip


def _check_together(
    networks: Mapping[str, LoadedNetwork], data: str | None, perturbations: Sequence[Perturbation]
) -> None:
    """Raises if the networks cannot be evaluated on the same images, with the same metric and these perturbations."""
    if not networks:
        raise TrainingError("expected at least one network")
    tasks = {trained.task.name for trained in networks.values()}
    if len(tasks) > 1:
        raise TrainingError(f"the networks have different tasks, {' and '.join(sorted(tasks))}: give those of one task")
    task, attacks = next(iter(networks.values())).task, [row.name for row in perturbations if row.attacks]
    if attacks and task.why_not_attacked:
        left_out = " and ".join(attacks)
        raise TrainingError(f"task={task.name} cannot be attacked, {task.why_not_attacked}: leave {left_out} out")
    own = {trained.recipe.data for trained in networks.values()}
    if data is None and len(own) > 1:
        raise TrainingError(f"the runs have different data, {' and '.join(sorted(own))}: give --data")


def _some(opened: Data, wanted: int | None) -> Any:
    """Returns the test images, or some of them."""
    if wanted is None:
        return opened.test
    if not isinstance(opened.test, Images):
        raise TrainingError("images of a stream cannot be chosen: leave the number of images out")
    return Subset(opened.test, spread(len(opened.test), wanted))


def _score(values: Sequence[float]) -> PerturbedScore:
    half_width = interval_half_width(values) if len(values) > 1 else None
    return PerturbedScore(tuple(values), statistics.fmean(values), half_width)


class PerturbedEvaluation:
    """Evaluates a network under several conditions. Every batch is loaded once.

    Args:
        trained: the network.
        task: its task, with the classes that can be predicted.
        conditions: the conditions.
        repeats: the number of repetitions of conditions that are random.
        seed: the seed of what is random.
    """

    def __init__(
        self, trained: LoadedNetwork, task: Task, conditions: Sequence[Condition], *, repeats: int, seed: int
    ) -> None:
        self.task, self.seed = task, seed
        self.network: nn.Module = trained.network
        self.normalize = trained.batch_transform.normalize
        self.mean = torch.tensor(trained.transform.mean, device=trained.device)
        self.evaluators: dict[Condition, list[Evaluator]] = {
            condition: [task.evaluator() for _ in range(condition.repeats(repeats))] for condition in conditions
        }
        self.examples: list[Example] = []

    def run(self, batches: EvalBatches) -> Iterator[tuple[int, Condition]]:
        """Evaluates the network. Yields the number of images done, over all conditions, and the current condition."""
        done = 0
        for pixels, targets, places in batches:
            first = not self.examples
            used = int((places >= 0).sum())
            for condition, evaluators in self.evaluators.items():
                for repeat, evaluator in enumerate(evaluators):
                    images = self._perturbed(condition, repeat, pixels, targets, places)
                    with torch.no_grad():
                        evaluator.update(self._forward(images, targets), targets, places)
                    if first and repeat == 0 and used:
                        self._keep_example(condition, pixels, images, targets, places)
                    done += used
                    yield done, condition
        if not done:
            raise TrainingError("none of the images to evaluate on can be read")

    def results(self) -> dict[Condition, list[Scores]]:
        """Returns the scores of every repetition of every condition."""
        return {
            condition: [evaluator.result(Collective()) for evaluator in evaluators]
            for condition, evaluators in self.evaluators.items()
        }

    def _forward(self, pixels: Tensor, targets: Any) -> Any:
        """Runs the network on images with values from 0 to 255."""
        return self.task.forward(self.network, self.normalize(pixels), targets)

    def _perturbed(self, condition: Condition, repeat: int, pixels: Tensor, targets: Any, places: Tensor) -> Tensor:
        """Returns perturbed images with values from 0 to 255; the bytes themselves if there is no perturbation."""
        row = condition.perturbation
        if row is None:
            return pixels
        inputs = Inputs(
            pixels.float() / 255,
            self.task.image_sizes(pixels, targets),
            # The strength is left out: it scales the same noise, so that curves over strengths are smooth.
            [mixed_seed(row.name, self.seed, repeat, place + 1) for place in places.tolist()],
            self.mean,
            lambda images: self.task.evaluation_loss(self._forward(images * 255, targets), targets),
        )
        with torch.no_grad():
            return row.apply(inputs, condition.strength) * 255

    def _keep_example(self, condition: Condition, pixels: Tensor, images: Tensor, targets: Any, places: Tensor) -> None:
        """Keeps the first image of the batch that is not padding."""
        index = int((places >= 0).nonzero()[0])
        height, width = self.task.image_sizes(pixels, targets)[index]
        image, original = ((batch[index, :, :height, :width].float() / 255).cpu() for batch in (images, pixels))
        self.examples.append(Example(condition, image, original))
