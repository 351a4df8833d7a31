"""Analysis of models: contribution of mechanisms, attention scores, shared weights, robustness and cost."""

from .attacks import fgsm, pgd
from .contribution import TaskContribution, contribution, task_contribution
from .contribution_record import BlockContribution, Contribution, combined
from .cost import Cost, Setting, count_flops, count_parameters, measure, measure_inference, measure_memory
from .perturbations import gaussian_blur, gaussian_noise, occlude_center, shot_noise
from .plots import plot_layer_scores, plot_shared_weights
from .robustness import PERTURBATIONS, Perturbation, PerturbedScore, parse_perturbations
from .robustness_plot import RobustnessPanel, plot_robustness
from .scores import StageScores, capture_scores, layer_scores
from .shared_weights import SharedWeights, shared_weights

__all__ = [
    "PERTURBATIONS",
    "BlockContribution",
    "Contribution",
    "Cost",
    "Perturbation",
    "PerturbedScore",
    "RobustnessPanel",
    "Setting",
    "SharedWeights",
    "StageScores",
    "TaskContribution",
    "capture_scores",
    "combined",
    "contribution",
    "count_flops",
    "count_parameters",
    "fgsm",
    "gaussian_blur",
    "gaussian_noise",
    "layer_scores",
    "measure",
    "measure_inference",
    "measure_memory",
    "occlude_center",
    "parse_perturbations",
    "pgd",
    "plot_layer_scores",
    "plot_robustness",
    "plot_shared_weights",
    "shared_weights",
    "shot_noise",
    "task_contribution",
]
