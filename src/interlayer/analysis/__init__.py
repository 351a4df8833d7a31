"""Analysis of models: contribution of mechanisms, attention scores, class activation, robustness, cost."""

from .attacks import fgsm, pgd
from .attention_layers import (
    LayerDistance,
    LayerEntropy,
    LayerJacobian,
    attention_distance,
    attention_entropy,
    attention_jacobian,
)
from .attention_measures import head_similarity, jacobian_norm, relative_distance, row_entropy
from .attention_pictures import AttentionRow, plot_emsa_heads, plot_query_attention
from .attention_plots import (
    plot_attention_distance,
    plot_attention_entropy,
    plot_attention_jacobian,
    plot_broadcast_scales,
)
from .attention_tokens import Tokens
from .broadcast_scales import BroadcastScale, broadcast_scales, scale_statistics
from .capture import capture, hooked
from .class_activation import ClassActivation, class_activation
from .class_activation_plot import ActivationColumn, plot_class_activation
from .contribution import TaskContribution, contribution, task_contribution
from .contribution_record import BlockContribution, Contribution, combined
from .cost import Cost, Setting, count_flops, count_parameters, measure, measure_inference, measure_memory
from .cost_plots import plot_depth, plot_flops_by_size
from .depth import DepthCost, depth_costs, depth_curves, depth_exponents, one_stage_network
from .emsa_heads import HeadSimilarity, emsa_heads
from .fits import Line, exponent, linear_fit
from .flops_by_size import FlopsBySize, flops_by_size
from .heads import HeadsPoint, attention_heads, plot_heads
from .layer_plots import plot_query_similarity, plot_score_sharing
from .perturbations import gaussian_blur, gaussian_noise, occlude_center, shot_noise
from .plots import plot_layer_scores, plot_shared_weights
from .queries import StageQueries, query_similarities, query_similarity, random_similarity
from .query_attention import QueryAttention, query_attention
from .robustness import PERTURBATIONS, Perturbation, PerturbedScore, parse_perturbations
from .robustness_plot import RobustnessPanel, plot_robustness
from .scores import StageScores, capture_scores, layer_scores
from .shared_weights import SharedWeights, shared_weights
from .sharing import StageSharing, score_divergence, score_sharing
from .spatial_attention import AttentionMap, attention_maps, capture_attention

__all__ = [
    "PERTURBATIONS",
    "ActivationColumn",
    "AttentionMap",
    "AttentionRow",
    "BlockContribution",
    "BroadcastScale",
    "ClassActivation",
    "Contribution",
    "Cost",
    "DepthCost",
    "FlopsBySize",
    "HeadSimilarity",
    "HeadsPoint",
    "LayerDistance",
    "LayerEntropy",
    "LayerJacobian",
    "Line",
    "Perturbation",
    "PerturbedScore",
    "QueryAttention",
    "RobustnessPanel",
    "Setting",
    "SharedWeights",
    "StageQueries",
    "StageScores",
    "StageSharing",
    "TaskContribution",
    "Tokens",
    "attention_distance",
    "attention_entropy",
    "attention_heads",
    "attention_jacobian",
    "attention_maps",
    "broadcast_scales",
    "capture",
    "capture_attention",
    "capture_scores",
    "class_activation",
    "combined",
    "contribution",
    "count_flops",
    "count_parameters",
    "depth_costs",
    "depth_curves",
    "depth_exponents",
    "emsa_heads",
    "exponent",
    "fgsm",
    "flops_by_size",
    "gaussian_blur",
    "gaussian_noise",
    "head_similarity",
    "hooked",
    "jacobian_norm",
    "layer_scores",
    "linear_fit",
    "measure",
    "measure_inference",
    "measure_memory",
    "occlude_center",
    "one_stage_network",
    "parse_perturbations",
    "pgd",
    "plot_attention_distance",
    "plot_attention_entropy",
    "plot_attention_jacobian",
    "plot_broadcast_scales",
    "plot_class_activation",
    "plot_depth",
    "plot_emsa_heads",
    "plot_flops_by_size",
    "plot_heads",
    "plot_layer_scores",
    "plot_query_attention",
    "plot_query_similarity",
    "plot_robustness",
    "plot_score_sharing",
    "plot_shared_weights",
    "query_attention",
    "query_similarities",
    "query_similarity",
    "random_similarity",
    "relative_distance",
    "row_entropy",
    "scale_statistics",
    "score_divergence",
    "score_sharing",
    "shared_weights",
    "shot_noise",
    "task_contribution",
]
