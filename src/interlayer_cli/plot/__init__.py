"""`interlayer plot`: figures of trained networks, one file a figure or a family of figures."""

import typer

from . import (
    attention,
    broadcast_scales,
    cam,
    depth,
    distance,
    emsa_heads,
    entropy,
    flops,
    heads,
    jacobian,
    queries,
    scores,
    shared_weights,
    sharing,
)

plot = typer.Typer(
    no_args_is_help=True,
    help="Plot what networks have learned, and what they cost.\n\n"
    "Example: `interlayer plot scores runs/20250101-120000-resnet50`",
)
COMMANDS = (
    scores.scores,
    scores.layer_scores,
    queries.queries,
    sharing.sharing,
    shared_weights.shared_weights,
    cam.cam,
    attention.attention,
    entropy.entropy,
    distance.distance,
    jacobian.jacobian,
    broadcast_scales.broadcast_scales,
    emsa_heads.emsa_heads,
    flops.flops,
    depth.depth,
    heads.heads,
)
for command in COMMANDS:
    plot.command(command.__name__.replace("_", "-"))(command)
