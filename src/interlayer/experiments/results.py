"""The results of a comparison: values and costs of every network, their differences, and what they say in words."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..analysis import Contribution, combined
from ..models.build import plain_name
from ..models.names import ControlNetwork, control_networks, same_network
from ..tasks import Metric
from ..training import Recipe, TrainingError
from ..training.summary import read_contribution, read_summary
from ..training.wording import listing, plural
from .attribution import ControlDifference, Finding, finding
from .costs import NetworkCost
from .statistics import Difference, adjust, paired_difference, seeds_sentence, spread, verdict


@dataclass(frozen=True)
class Result:
    """The result of one network over all seeds.

    Args:
        model: name of the network.
        folders: the folders of its runs, one per seed.
        values: the headline metric on the test images, one per seed.
        cost: the cost of the network.
        difference: the difference to the first network; None for the first network.
        contribution: the contribution of its mechanisms over all seeds; None if it has none, or if a run was finished
            by an earlier version that did not measure it.
        controls: the differences to its controls, for those that are in the comparison.
        control_of: the network that this one is a control of; an empty string if it is none.
        seeds: the seeds of its finished runs, in the order of the values.
        control_is_first: whether the first network is one of its controls. The difference to it is one test then.
    """

    model: str
    folders: list[Path]
    values: list[float]
    cost: NetworkCost
    difference: Difference | None
    contribution: Contribution | None = None
    controls: list[ControlDifference] = field(default_factory=list)
    control_of: str = ""
    seeds: list[int] = field(default_factory=list)
    control_is_first: bool = False

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds; NaN for a single seed."""
        return spread(self.values)

    @property
    def tested(self) -> list[Difference]:
        """The differences that the comparison decides about. A control is only compared with its network."""
        counted_elsewhere = self.difference is None or self.control_of or self.control_is_first
        own = [] if counted_elsewhere else [self.difference]
        return [*own, *(each.difference for each in self.controls)]  # type: ignore[list-item]


@dataclass(frozen=True)
class Comparison:
    """The comparison of several networks under one recipe.

    Args:
        recipe: the recipe that all runs share.
        folder: the folder of the comparison.
        metric: the headline metric of the task.
        seeds: the seeds of each network's runs.
        results: the result of each network; the first one is the baseline.
        together: the number of runs that shared the device.
        command: the command that reproduces the comparison.
        notes: messages to the user about the data and the controls.
        equal_time: whether networks were trained for as long as the slowest one instead of for as many epochs.
        unfinished: the seeds that are missing of each network, if the comparison was read before its last run ended.
    """

    recipe: Recipe
    folder: Path
    metric: Metric
    seeds: list[int]
    results: list[Result]
    together: int
    command: str
    notes: list[str] = field(default_factory=list)
    equal_time: bool = False
    unfinished: Mapping[str, list[int]] = field(default_factory=dict)

    @property
    def tested(self) -> list[Difference]:
        """The differences that the comparison decides about, to whose number the decisions are adjusted."""
        return [difference for result in self.results for difference in result.tested]

    def verdicts(self) -> list[str]:
        """Returns what the comparison says, each statement in one or several lines.

        Of each network, its difference to the first one and to its controls, and what switching its mechanism off does;
        then the epochs of networks that trained for the same time, and how many more seeds would tell more.
        """
        texts = []
        for result in self.results:
            if result.control_of:
                continue
            if result.difference is not None:
                texts.append(self._verdict(result, result.difference))
            elif result.controls:
                sentences = [each.sentence(None, "", self.metric) for each in result.controls]
                texts.append("\n".join([f"{result.model}:", *sentences]))
            if result.contribution is not None:
                texts.append(f"{result.model}: {result.contribution.sentence}.")
        texts += [self._times()] if self.equal_time else []
        fewest = min(len(result.seeds) for result in self.results)
        seeds = seeds_sentence(self.tested, self.metric, fewest)
        return [*texts, *([seeds] if seeds else [])]

    def finding(self, result: Result) -> Finding:
        """Returns whether the runs show that the mechanism of a network helps, and by what it is credited with."""
        if result.difference is None:
            return "undecided"
        known = {each.network.name for each in result.controls}
        networks = control_networks(result.model, self.recipe.attach_options)
        if networks and not same_network(self.results[0].model, plain_name(result.model)):
            return "undecided"  # its gain over the plain network is not known
        awaited = any(
            same_network(network.name, name) for network in networks for name in self.unfinished if name not in known
        )
        mildest = {network.mechanism: network.name for network in reversed(networks)}.values()
        complete = not awaited and all(any(same_network(name, other) for other in known) for name in mildest)
        return finding(result.difference, result.controls, self.metric, complete=complete)

    def _verdict(self, result: Result, difference: Difference) -> str:
        """Returns the verdict of one network, with those about its controls."""
        first, metric = self.results[0].model, self.metric
        pairs = len(set(result.seeds) & set(self.results[0].seeds))
        texts = [verdict(result.model, first, difference, metric, pairs, len(self.tested))]
        gain = difference if same_network(first, plain_name(result.model)) else None
        texts += [each.sentence(gain, first, metric) for each in result.controls]
        better = not difference.within_noise and metric.is_better(difference.mean, 0.0)
        missing = control_networks(result.model, self.recipe.attach_options)
        if gain is not None and better and missing and not result.controls:
            texts.append(
                f"The plain network does not tell whether this is from {missing[0].control.tested}: `interlayer resume "
                f"{self.folder} --control` trains the networks that do."
            )
        return "\n".join(texts)

    def _times(self) -> str:
        epochs = [f"{result.model} for {plural(result.cost.epochs, 'epoch')}" for result in self.results]
        return f"Networks were trained for the time that the slowest takes: {listing(epochs)}."


def read_results(
    recipe: Recipe,
    folders: Mapping[str, Mapping[int, Path]],
    metric: Metric,
    costs: Mapping[str, NetworkCost],
) -> list[Result]:
    """Reads the finished runs of every network and compares each network with the first and with its controls.

    Decisions are adjusted to the number of differences. A difference is over the seeds that both networks have.

    Args:
        recipe: the recipe that all runs share.
        folders: the folders of the runs of each network, by the name of the network and the seed.
        costs: the cost of each network.
    """
    results: list[Result] = []
    resolution = 0.0
    for name, paths in folders.items():
        summaries = [read_summary(path) for path in paths.values()]
        tests = [summary["test"] for summary in summaries]
        values = [_value(test, metric, path) for test, path in zip(tests, paths.values(), strict=True)]
        resolution = metric.resolution(tests[0]["images"])
        result = Result(
            name, list(paths.values()), values, costs[name], None, _contribution(summaries), seeds=list(paths)
        )
        difference = _difference(results[0], result, resolution) if results else None
        results.append(replace(result, difference=difference))
    by_name = {result.model: result for result in results}
    found = controls_among(list(folders), recipe)
    first = results[0].model
    owners = {network.name: name for name, networks in found.items() for network in networks}
    results = [
        replace(
            result,
            controls=[
                ControlDifference(network, difference)
                for network in found[result.model]
                if (difference := _difference(by_name[network.name], result, resolution)) is not None
            ],
            control_of=owners.get(result.model, ""),
            control_is_first=any(network.name == first for network in found[result.model]),
        )
        for result in results
    ]
    return _adjusted(results)


def _value(test: Mapping[str, Any], metric: Metric, folder: Path) -> float:
    if test.get(metric.name) is None:  # such as the AP of images without objects
        raise TrainingError(f"{folder} has no {metric.title} on test images")
    return float(test[metric.name])


def _difference(first: Result, second: Result, resolution: float) -> Difference | None:
    """Returns the difference of two networks over the seeds that both have; None if they have none in common."""
    before, now = (dict(zip(each.seeds, each.values, strict=True)) for each in (first, second))
    common = [seed for seed in now if seed in before]
    if not common:
        return None
    return paired_difference([before[seed] for seed in common], [now[seed] for seed in common], resolution)


def controls_among(names: Sequence[str], recipe: Recipe) -> dict[str, list[ControlNetwork]]:
    """Returns the controls of each network that are among the networks themselves, under their names there.

    A network that is a control itself has none.
    """
    found = {}
    for name in names:
        networks = control_networks(name, recipe.attach_options)
        found[name] = [
            replace(network, name=other)
            for network in networks
            for other in names
            if other != name and same_network(network.name, other)
        ]
    controls = {network.name for networks in found.values() for network in networks}
    return {name: [] if name in controls else networks for name, networks in found.items()}


def _adjusted(results: Sequence[Result]) -> list[Result]:
    """Returns the results with p-values that are adjusted to the number of tested differences, if there are several."""
    tested = [difference for result in results for difference in result.tested]
    if len(tested) < 2:
        return list(results)
    adjusted = iter(adjust(tested))
    changed = []
    for result in results:
        own = result.difference
        if own is not None and not result.control_of and not result.control_is_first:
            own = next(adjusted)
        controls = [replace(each, difference=next(adjusted)) for each in result.controls]
        if result.control_is_first:
            own = next(each.difference for each in controls if each.network.name == results[0].model)
        changed.append(replace(result, difference=own, controls=controls))
    return changed


def _contribution(summaries: Sequence[dict[str, Any]]) -> Contribution | None:
    """Returns the contribution of a network's mechanisms over all its runs."""
    records = [read_contribution(summary) for summary in summaries]
    known = [record for record in records if record is not None]
    return combined(known) if len(known) == len(records) else None


def _plural(name: str) -> str:
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the contents of comparison.json."""
    return {
        "metric": comparison.metric.name,
        "models": [
            {
                "model": result.model,
                _plural(comparison.metric.name): result.values,
                "values": result.values,
                "mean": result.mean,
                "spread": None if math.isnan(result.spread) else result.spread,
                **asdict(result.cost),
                "difference": asdict(result.difference) if result.difference else None,
                "within_noise": result.difference.within_noise if result.difference else None,
                "control_of": result.control_of or None,
                "controls": [
                    {
                        "model": each.network.name,
                        "left": each.network.control.left,
                        "tested": each.network.control.tested,
                        "difference": asdict(each.difference),
                        "within_noise": each.difference.within_noise,
                    }
                    for each in result.controls
                ],
                "contribution": result.contribution.as_dict() if result.contribution else None,
                "runs": [str(path) for path in result.folders],
            }
            for result in comparison.results
        ],
        "seeds": comparison.seeds,
        "verdicts": comparison.verdicts(),
        "equal_time": comparison.equal_time,
        "together": comparison.together,
        "command": comparison.command,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
