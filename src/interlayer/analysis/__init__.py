"""Analysis of models: attention scores, shared weights, parameters, FLOPs, memory and throughput."""

from .cost import Cost, Setting, count_flops, count_parameters, measure, measure_inference, measure_memory
from .plots import plot_layer_scores, plot_shared_weights
from .scores import StageScores, capture_scores, layer_scores
from .shared_weights import SharedWeights, shared_weights

__all__ = [
    "Cost",
    "Setting",
    "SharedWeights",
    "StageScores",
    "capture_scores",
    "count_flops",
    "count_parameters",
    "layer_scores",
    "measure",
    "measure_inference",
    "measure_memory",
    "plot_layer_scores",
    "plot_shared_weights",
    "shared_weights",
]
