"""The measured contribution of the mechanisms of a network, as a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..tasks import Metric

HARDLY = 0.01  # below this share of changed predictions a network hardly uses its mechanism
ENOUGH = 100  # number of images from which unchanged predictions are a statement about the network


@dataclass(frozen=True)
class BlockContribution:
    """The contribution of a mechanism to the output of one block.

    Args:
        block: name of the block, or of a module after the last block that reads a state.
        stage: number of the stage, starting from 1; None for a module after the last block, and for mechanisms that are
            placed without regard to stages (context broadcasting).
        mechanism: name of the mechanism, as `interlayer.attach` takes it.
        ratio: ‖with - without‖ / ‖with‖ of the output, averaged over images.
    """

    block: str
    stage: int | None
    mechanism: str
    ratio: float


@dataclass(frozen=True)
class Contribution:
    """How much a network uses its mechanisms. See `interlayer.contribution`.

    Args:
        blocks: the contribution to each block, in the order of the network.
        images: the number of images.
        changed: the number of predictions that change if all mechanisms are switched off; None if the outputs are not
            predictions that can be compared.
        metric: the metric of the next two values; None if there are no labels.
        value: the metric of the network.
        value_without: the metric of the network with all mechanisms switched off.
        ratio_images: the number of images over which the ratios of blocks are averaged.
        runs: the number of networks over which the values are added up or averaged.
    """

    blocks: tuple[BlockContribution, ...]
    images: int
    changed: int | None = None
    metric: Metric | None = None
    value: float | None = None
    value_without: float | None = None
    ratio_images: int = 0
    runs: int = 1

    @property
    def share_changed(self) -> float | None:
        """The share of predictions that change if all mechanisms are switched off."""
        return None if self.changed is None else self.changed / self.images

    @property
    def mechanisms(self) -> list[str]:
        """The names of the mechanisms."""
        return list(dict.fromkeys(row.mechanism for row in self.blocks))

    @property
    def range(self) -> str:
        """The smallest and the largest ratio of a block: 1.2% to 8.3%."""
        ratios = sorted(row.ratio for row in self.blocks)
        low, high = _percent(ratios[0]), _percent(ratios[-1])
        return high if low == high else f"{low} to {high}"

    @property
    def change(self) -> str:
        """How much the mechanisms change the outputs of their blocks, in words without a full stop."""
        changes, its = ("changes", "its") if len(self.mechanisms) == 1 else ("change", "their")
        return f"{' and '.join(self.mechanisms)} {changes} the outputs of {its} blocks by {self.range}"

    @property
    def sentence(self) -> str:
        """What switching the mechanisms off does, in one sentence without a full stop."""
        it = "it" if len(self.mechanisms) == 1 else "them"
        texts = [text for text in (self._changed_predictions(), self._changed_value()) if text]
        if not texts:
            return self.change
        text = f"switched off, {' and '.join(texts)}"
        if not any(row.ratio for row in self.blocks) or (self.changed == 0 and self.images >= ENOUGH):
            return f"{text}: the network does not use {it}"
        hardly = self.share_changed is not None and self.share_changed < HARDLY and self.images >= ENOUGH
        return f"{text}: the network hardly uses {it}" if hardly else text

    def _changed_predictions(self) -> str:
        if self.changed is None:
            return ""
        share = f" ({_percent(self.changed / self.images)})" if self.changed else ""
        seeds = f" of {self.runs} seeds" if self.runs > 1 else ""
        changes = "changes" if self.changed == 1 else "change"
        return f"{self.changed:,} of {self.images:,} predictions{seeds}{share} {changes}"

    def _changed_value(self) -> str:
        if self.metric is None or self.value is None or self.value_without is None:
            return ""
        if self.changed == 0:
            return ""
        title, value, without = (
            self.metric.title,
            self.metric.format(self.value),
            self.metric.format(self.value_without),
        )
        if value == without:
            return f"{title} stays at {value}"
        return f"{title} {'falls' if self.value_without < self.value else 'rises'} from {value} to {without}"

    def __str__(self) -> str:
        table = [("block", "stage", "mechanism", "ratio")]
        for row in self.blocks:
            stage = "" if row.stage is None else str(row.stage)
            table.append((row.block, stage, row.mechanism, _percent(row.ratio)))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            f"{block:<{widths[0]}}  {stage:>{widths[1]}}  {mechanism:<{widths[2]}}  {ratio:>{widths[3]}}"
            for block, stage, mechanism, ratio in table
        ]
        return "\n".join([*lines, f"{self.sentence[:1].upper()}{self.sentence[1:]}."])

    def as_dict(self) -> dict[str, Any]:
        """Returns the record as JSON-serializable values, with the sentence."""
        return {**asdict(self), "blocks": [asdict(row) for row in self.blocks], "sentence": self.sentence}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Contribution:
        """Returns the record that `as_dict` converted."""
        values = {key: value for key, value in values.items() if key != "sentence"}
        metric = values.pop("metric")
        blocks = tuple(BlockContribution(**row) for row in values.pop("blocks"))
        return cls(blocks, metric=None if metric is None else Metric(**metric), **values)


def combined(records: Sequence[Contribution]) -> Contribution:
    """Returns the contribution over several runs of one network: counts are added up, ratios and metrics averaged."""
    first = records[0]
    if len(records) == 1:
        return first

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if len(known) == len(records) else None

    rows = zip(*(record.blocks for record in records), strict=True)
    blocks = tuple(
        BlockContribution(row[0].block, row[0].stage, row[0].mechanism, sum(each.ratio for each in row) / len(row))
        for row in rows
    )
    changed = None if first.changed is None else sum(record.changed or 0 for record in records)
    return Contribution(
        blocks, sum(record.images for record in records), changed, first.metric,
        mean([record.value for record in records]), mean([record.value_without for record in records]),
        sum(record.ratio_images for record in records), len(records),
    )  # fmt: skip


def _percent(share: float) -> str:
    """Formats a share with three significant digits at most: 12.3%, 0.04%, 0%."""
    if share == 0:
        return "0%"
    return f"{share:.1%}" if share >= 0.001 else f"{share * 100:.2g}%"
