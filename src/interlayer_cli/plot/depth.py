"""`interlayer plot depth`: time and memory of a training step by depth."""

from pathlib import Path
from typing import Annotated

import typer

from .figure import Overwrite, check_output, save


def depth(
    mechanisms: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MECHANISM]...",
            help="Mechanisms to attach, MECHANISM or MECHANISM:OPTION=VALUE. Default: mrla_light mrla_base.",
        ),
    ] = None,
    depths: Annotated[str, typer.Option(help="Numbers of blocks, separated by commas.")] = "4,8,16,32,64",
    batch_size: Annotated[int, typer.Option(min=1, help="Number of images in a batch.")] = 8,
    channels: Annotated[int, typer.Option(min=4, help="Number of channels of the maps.")] = 128,
    map_size: Annotated[int, typer.Option(min=1, help="Height and width of the maps.")] = 14,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if available.")] = None,
    precision: Annotated[str, typer.Option(help="float32, or autocast to bfloat16 or float16.")] = "float32",
    steps: Annotated[int, typer.Option(min=1, help="Number of timed steps, of which the median is taken.")] = 5,
    output: Annotated[Path, typer.Option(help="The figure to write.")] = Path("depth.png"),
    overwrite: Overwrite = False,
) -> None:
    """Plot time and memory of a training step by the number of blocks T of a stage, plain and with mechanisms.

    The network is a ResNet with one stage of bottleneck blocks. Memory is the peak of a step less weights and momentum.
    The exponents of T are slopes of log-log regressions: one is linear in depth, and a layer that reads all layers
    before it can cost more.

    Example: `interlayer plot depth`

    Example: `interlayer plot depth mrla_base mla --depths 4,8,16 --channels 256`
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from interlayer import analysis

    from ..display import counting

    check_output(output, overwrite)
    if precision not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"--precision must be float32, bfloat16 or float16, got {precision!r}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no such device here, use --device cpu")
    try:
        chosen = sorted({int(number) for number in depths.split(",")})
    except ValueError:
        raise ValueError(f"--depths takes whole numbers separated by commas, such as 4,8,16, got {depths!r}") from None
    setting = analysis.Setting(batch_size, None, device, precision, channels_last=device != "cpu", steps=steps)  # type: ignore[arg-type]
    networks: dict[str, str | None] = {
        "plain": None,
        **{name: name for name in mechanisms or ["mrla_light", "mrla_base"]},
    }
    found: list[analysis.DepthCost] = []
    total = len(networks) * sum(chosen)  # a block takes about as long as another
    with counting("measuring") as progress:
        costs = analysis.depth_costs(
            networks, chosen, setting, channels=channels, map_size=map_size,
            progress=lambda name, blocks: progress(
                sum(cost.blocks for cost in found), total, f"{name}, {blocks} blocks"
            ),
        )  # fmt: skip
        for cost in costs:
            found.append(cost)
    plain = {cost.blocks: cost for cost in found if cost.name == "plain"}
    table = Table("network", "T", "step", "per block", "memory", "ratios to plain")
    for cost in found:
        row = [cost.name, str(cost.blocks)]
        if cost.fits:
            row += [f"{1e3 * cost.seconds:.1f} ms", f"{1e3 * cost.seconds / cost.blocks:.2f} ms"]
            row += [f"{cost.memory / 2**20:.1f} MiB"]
            other = plain[cost.blocks]
            if other.fits and cost.name != "plain":
                row += [f"{cost.seconds / other.seconds:.2f}, {cost.memory / other.memory:.2f}"]
        table.add_row(*row, *["does not fit"] * (not cost.fits))
    Console().print(table)
    for name, curve in analysis.depth_curves(found).items():
        if len(curve) > 1:
            (time, memory), (last_time, last_memory) = map(analysis.depth_exponents, (curve, curve[-2:]))
            typer.echo(
                f"{name}: time of a step grows with T^{time:.2f} ({last_time:.2f} between the two largest), "
                f"memory with T^{memory:.2f} ({last_memory:.2f})"
            )
    where = torch.cuda.get_device_name() if device != "cpu" else f"CPU, threads: {torch.get_num_threads()}"
    maps = f"{channels} channels, {map_size} x {map_size}, batch {batch_size}, {precision}"
    title = f"A training step by depth: {maps}; {where}"
    save(analysis.plot_depth(found, title=title), output)
