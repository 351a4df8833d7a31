"""A task from outside the package: regression of the value of a digit."""

import torch
import torch.nn.functional as F

from interlayer.tasks import MeanEvaluator, Metric, Section, Table, Task, register_task


class ValueEvaluator(MeanEvaluator):
    def values_of(self, outputs, targets):
        errors = outputs.float().flatten() - targets
        return {"loss": errors**2, "error": errors.abs()}

    def records_of(self, outputs, targets, places):
        return {"places": places, "values": torch.stack([targets, outputs.float().flatten()], dim=1)}


@register_task
class DigitValue(Task):
    """Trains with the mean squared error. The headline metric is the mean absolute error, for which lower is better."""

    name = "digit_value"
    headline = Metric("error", higher_is_better=False, label="mean absolute error")
    train_metrics = (headline,)
    eval_metrics = (headline,)

    def build(self):
        return self.build_network(1)

    def collate_targets(self, targets):
        return torch.as_tensor(targets, dtype=torch.float32)

    def mixable(self, targets):
        return targets[:, None]

    def loss(self, outputs, targets):
        values, targets = outputs.float().flatten(), targets.flatten()
        return F.mse_loss(values, targets), {"error": (values.detach() - targets).abs().sum()}

    def evaluator(self, *, records=False):
        return ValueEvaluator(records=records)

    def show_run(self, run, images):
        return [Section("Furthest off", tables=[self.furthest_off(run)])]

    def show_comparison(self, runs, images):
        return [Section("Furthest off", tables=[self.furthest_off(run) for run in runs])]

    def furthest_off(self, run):
        values = run.records["values"]
        worst = (values[:, 0] - values[:, 1]).abs().argsort(descending=True)[:5]
        return Table(run.model, ["digit", "predicted"], [[f"{t:.0f}", f"{p:.2f}"] for t, p in values[worst].tolist()])
