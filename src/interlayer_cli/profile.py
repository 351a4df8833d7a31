"""`interlayer profile`: measure the cost of models relative to their plain backbones."""

from typing import Annotated, Any

import typer


def profile(
    names: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Models to measure: NAME, or NAME+MECHANISM:OPTION=VALUE.")
    ],
    batch_size: Annotated[int, typer.Option(min=1, help="Number of images in a batch.")] = 8,
    image_size: Annotated[int | None, typer.Option(min=1, help="Image size; by default that of the model.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if available.")] = None,
    precision: Annotated[str, typer.Option(help="float32, or autocast to bfloat16 or float16.")] = "float32",
    channels_last: Annotated[
        bool, typer.Option("--channels-last", help="Use the channels_last memory format.")
    ] = False,
    compile_models: Annotated[bool, typer.Option("--compile", help="Compile the models with torch.compile.")] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="Capture steps as CUDA graphs, which excludes the time of kernel launches.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Number of timed steps, of which the median is printed.")] = 5,
) -> None:
    """Measure parameters, FLOPs, memory of a training step and throughput, and their ratios to the plain backbone.

    The plain backbones of the given models are measured in the same run. FLOPs are multiply-adds, half of what torch's
    counter gives: convolutions and all matrix products, those of attention included.

    Examples: `interlayer profile resnet50_mrla_light resnet50_mrla_base --batch-size 16`,
    `interlayer profile resnet50+mrla_light:channels_per_head=16`
    """
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from interlayer.analysis import Cost, Setting, measure
    from interlayer.models.build import build_network, plain_name

    if precision not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"--precision must be float32, bfloat16 or float16, got {precision!r}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no such device here, use --device cpu")
    setting = Setting(batch_size, image_size, device, precision, channels_last, compile_models, steps, graph)  # type: ignore[arg-type]
    order = list(dict.fromkeys(name for model in names for name in (plain_name(model), model)))
    costs: dict[str, Cost] = {}
    remarks: list[str] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(order))
        for name in order:
            network = build_network(name, image_size=image_size)
            if image_size and image_size < _reduction(network) and name == plain_name(name):
                remarks.append(
                    f"interlayer: {name} reduces images by a factor of {_reduction(network)}: at {image_size} pixels "
                    "its last feature map is a single pixel, and its cost says little about larger images"
                )

            def report(what: str, name: str = name) -> None:
                progress.update(task, description=f"{name}: {what}")

            try:
                costs[name] = measure(network, setting, report)
            except (RuntimeError, AssertionError) as error:
                size = f" at {image_size} pixels" if image_size else ""
                raise ValueError(f"{name} could not be measured{size}, batch {batch_size}: {error}") from error
            progress.update(task, advance=1)
            del network
            if device.startswith("cuda"):
                torch.cuda.empty_cache()
    where = torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, threads: {torch.get_num_threads()}"
    how = ", ".join(
        text
        for text in (
            f"batch {batch_size}",
            precision,
            "channels_last" if channels_last else "",
            "compiled" if compile_models else "",
            "captured as a CUDA graph" if graph else "",
        )
        if text
    )
    console = Console(width=None if Console().is_terminal else 160 + max(map(len, order)))
    console.print(_table(f"{where}; {how}", order, {name: plain_name(name) for name in order}, costs))
    for remark in remarks:
        typer.echo(remark, err=True)


def _reduction(network: Any) -> int:
    """Returns by which factor a network of timm makes images smaller; 1 if it does not say so."""
    return max((int(stage.get("reduction", 1)) for stage in getattr(network, "feature_info", None) or []), default=1)


def _table(title: str, order: list[str], plain_names: dict[str, str], costs: Any) -> Any:
    from rich.table import Table

    table = Table(
        title=title,
        caption="in brackets: difference from and ratio to the plain backbone; GFLOPs: multiply-adds of convolutions "
        "and of all matrix products for one image, those of attention included; memory: peak of a training step",
    )
    table.add_column("model", overflow="fold")
    table.add_column("image", justify="right")
    for column in ("parameters", "GFLOPs", "memory", "training step", "training img/s", "inference img/s"):
        table.add_column(column, justify="right")
    for name in order:
        cost, plain = costs[name], costs[plain_names[name]]

        def ratio(get: Any, cost: Any = cost, plain: Any = plain) -> str:
            return "" if cost is plain else f" ({get(cost) / get(plain):.2f}x)"

        def added(get: Any, form: str, cost: Any = cost, plain: Any = plain) -> str:
            difference = form.format(get(cost) - get(plain))
            return "" if cost is plain else f" ({difference}, {get(cost) / get(plain):.2f}x)"

        table.add_row(
            name,
            " x ".join(map(str, cost.image_size)),
            f"{cost.parameters / 1e6:.2f}M" + added(lambda c: c.parameters / 1e6, "{:+.3f}M"),
            f"{cost.flops / 1e9:.2f}" + added(lambda c: c.flops / 1e9, "{:+.3f}"),
            f"{cost.memory / 2**30:.2f} GiB" + ratio(lambda c: c.memory),
            f"{cost.train_seconds * 1e3:.1f} ms" + ratio(lambda c: c.train_seconds),
            f"{cost.train_throughput:.1f}" + ratio(lambda c: c.train_throughput),
            f"{cost.inference_throughput:.1f}" + ratio(lambda c: c.inference_throughput),
        )
    return table
