"""`interlayer demo`: attach layer attention to a backbone, measure its cost and plot its attention scores."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    backbone: Annotated[str, typer.Option(help="Any timm model.")] = "resnet50",
    mechanism: Annotated[str, typer.Option(help="mrla_light, mrla_base, mla, mrla_linear or crla.")] = "mrla_light",
    output: Annotated[Path, typer.Option(help="Folder of the figure.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Random seed of the weights.")] = 0,
) -> None:
    """Attach layer attention to a timm backbone, compare its cost with the plain backbone, and plot attention scores.

    The weights are random, so the figure shows which scores can be inspected, not what a trained network learns.

    Example: `interlayer demo --backbone convnext_atto --mechanism mrla_base`
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    import interlayer
    from interlayer.analysis import Setting, count_flops, count_parameters, measure_inference
    from interlayer.experiments import PretrainedNetwork, shown_images
    from interlayer.hosts import attached_mechanisms
    from interlayer.mechanisms import LayerAttention
    from interlayer.models.build import build_network, split_name

    torch.manual_seed(seed)
    plain = build_network(backbone)
    loaded = PretrainedNetwork(f"{backbone}+{mechanism}", device=torch.device("cpu"), untrained=True)
    attached = loaded.network
    if not any(isinstance(module, LayerAttention) for module in attached_mechanisms(attached).values()):
        raise ValueError(f"{mechanism} has no attention scores to draw; interlayer profile measures what it costs")
    figure = interlayer.plot_layer_scores(
        interlayer.layer_scores(attached, shown_images(loaded).inputs),
        title=f"Which layer reads which: {backbone} + {mechanism}, untrained",
    )
    output.mkdir(parents=True, exist_ok=True)
    console = Console()
    models = (plain, attached)
    with Console(stderr=True).status("measuring"):
        rows: list[tuple[str, list[float], str]] = [
            ("parameters", [count_parameters(model) for model in models], "{:,.0f}"),
            ("FLOPs (G)", [count_flops(model, convention="torch") / 1e9 for model in models], "{:.3f}"),
            ("latency (ms)", [measure_inference(model, Setting(1, steps=15)) * 1e3 for model in models], "{:.1f}"),
        ]
    table = Table("", backbone, f"+ {mechanism}", "ratio", title="one image on the CPU")
    for name, (without, with_attention), form in rows:
        ratio = with_attention / without
        table.add_row(name, form.format(without), form.format(with_attention), f"{ratio:.3f}")
    console.print(table)

    ((key, _),) = split_name(f"{backbone}+{mechanism}")[1]
    picture = output / f"{backbone}_{key}_scores.png"
    figure.savefig(picture, dpi=150)
    console.print(f"attention scores drawn in {picture}")
