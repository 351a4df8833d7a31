"""Metrics of an evaluation, accumulated on the device and merged over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """The result of an evaluation.

    Args:
        metrics: ``loss`` and the metrics of the task, by name.
        count: number of images.
        records: tensors [N, ...] with one entry per image, in the order of the source; empty unless requested.
    """

    metrics: Mapping[str, float]
    count: int
    records: Mapping[str, Tensor] = field(default_factory=dict)


class Collective:
    """Collective communication between ranks. This base class is for a single rank."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum of a tensor over all ranks."""
        return tensor

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenates the rows of all ranks along the first dimension. Ranks with fewer rows are padded with -1."""
        return rows

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in the order of the ranks."""
        return [value]


class Evaluator(ABC):
    """Accumulates the metrics of an evaluation. Only `result` waits for the device."""

    @abstractmethod
    def update(self, outputs: Any, targets: Any, places: Tensor) -> None:
        """Adds a batch.

        Args:
            outputs: the value returned by the task's `forward`, in the precision of autocast.
            targets: the value returned by the task's `collate_targets`.
            places: [B], the index of each image in its source; -1 for padding, which is ignored.
        """

    @abstractmethod
    def result(self, collective: Collective) -> Scores:
        """Returns the scores over all ranks. Every rank must call this."""


class MeanEvaluator(Evaluator):
    """Computes metrics that are means over images. Subclasses return one value for each image of a batch.

    Args:
        records: whether to keep the tensors that `records_of` returns.
    """

    def __init__(self, *, records: bool = False) -> None:
        self.keeps_records = records
        self.names: list[str] = []
        self.totals: Tensor | None = None  # [metrics..., number of images], float64
        self.places: list[Tensor] = []
        self.records: list[dict[str, Tensor]] = []

    @abstractmethod
    def values_of(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Returns ``loss`` and every metric for each image, as tensors [B] by name."""

    def records_of(self, outputs: Any, targets: Any, places: Tensor) -> dict[str, Tensor]:
        """Returns the records of each image, as tensors [B, ...] by name."""
        return {}

    def update(self, outputs: Any, targets: Any, places: Tensor) -> None:
        counts = places >= 0
        values = self.values_of(outputs, targets)
        self.names = list(values)
        batch = torch.stack([(value * counts).double().sum() for value in (*values.values(), counts)])
        self.totals = batch if self.totals is None else self.totals + batch
        if self.keeps_records:
            self.places.append(places)
            self.records.append(self.records_of(outputs, targets, places))

    def result(self, collective: Collective) -> Scores:
        assert self.totals is not None, "update was never called"
        totals = collective.sum(self.totals)
        records: dict[str, Tensor] = {}
        if self.records:
            places = collective.gather(torch.cat(self.places))
            order = torch.argsort(places)
            order = order[places[order] >= 0]
            for name in self.records[0]:
                rows = collective.gather(torch.cat([record[name] for record in self.records]))
                records[name] = rows[order].cpu()
        *sums, count = totals.tolist()
        means = {name: total / count if count else float("nan") for name, total in zip(self.names, sums, strict=True)}
        return Scores(means, int(count), records)
