"""Analysis of models: contribution of mechanisms, attention scores, shared weights, FLOPs, memory and throughput."""

from .contribution import TaskContribution, contribution, task_contribution
from .contribution_record import BlockContribution, Contribution, combined
from .cost import Cost, Setting, count_flops, count_parameters, measure, measure_inference, measure_memory
from .plots import plot_layer_scores, plot_shared_weights
from .scores import StageScores, capture_scores, layer_scores
from .shared_weights import SharedWeights, shared_weights

__all__ = [
    "BlockContribution",
    "Contribution",
    "Cost",
    "Setting",
    "SharedWeights",
    "StageScores",
    "TaskContribution",
    "capture_scores",
    "combined",
    "contribution",
    "count_flops",
    "count_parameters",
    "layer_scores",
    "measure",
    "measure_inference",
    "measure_memory",
    "plot_layer_scores",
    "plot_shared_weights",
    "shared_weights",
    "task_contribution",
]
