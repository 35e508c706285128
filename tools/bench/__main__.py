"""`python -m tools.bench`: run rows of the performance table, beside the peers that are installed."""

import json
import os
import platform
import sys
import time
from importlib import import_module
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tools.bench.figures import Figure

MEASURE = "measure"
QUIET_SECONDS = 600.0
"""The load of the last minute falls from 4 to 0.5 in about two minutes."""
ROWS = {
    "produce": "tools.bench.produce",
    "consume": "tools.bench.consume",
    "single": "tools.bench.single",
    "clients": "tools.bench.clients",
    "peers": "tools.bench.peer_rows",
    "end_to_end": "tools.bench.end_to_end",
    "footprint": "tools.bench.footprint",
    "groups": "tools.bench.groups",
    "idle": "tools.bench.idle",
    "restart": "tools.bench.restart",
    "scale": "tools.bench.scale",
    "transactions": "tools.bench.transactions",
    "arrow": "tools.bench.arrow",
    "spark": "tools.bench.spark",
    "audit": "tools.bench.audit",
    "delay_accept": "tools.bench.delay:accepted",
    "delay_fire": "tools.bench.delay_fire",
    "delay_lateness": "tools.bench.delay_fire:lateness",
    "delay_pending": "tools.bench.delay:pending",
    "delay_catch_up": "tools.bench.delay:beside_a_catch_up",
    "delay_wheel": "tools.bench.delay:wheel",
}


@click.command(epilog="Example: python -m tools.bench --rows produce,consume --peers")
@click.option("--rows", default=",".join(ROWS), show_default=True, help="Which rows, separated by commas.")
@click.option(
    "--runs", default=5, show_default=True, type=click.IntRange(1, 50), help="Runs of each; the median counts."
)
@click.option("--peers", is_flag=True, help="Measure other brokers in the same run (tools/bench/peers/install.sh).")
@click.option(
    "--load-max",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0.05),
    help="Wait before each row until the load of the last minute is below this.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON to this file too.")
def main(rows: str, runs: int, peers: bool, load_max: float, as_json: bool, save: Path | None) -> None:
    """Measure tfmq on this machine. Nothing leaves loopback; every server stops by itself."""
    names = [name.strip() for name in rows.split(",") if name.strip()]
    if unknown := [name for name in names if name not in ROWS]:
        raise click.UsageError(f"there is no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    console, figures = Console(stderr=as_json, width=None if sys.stdout.isatty() else 150), []
    loads: dict[str, float] = {}
    for name in names:
        loads[name] = wait_until_quiet(load_max)
        console.print(f"[dim]{name}, at a load of {loads[name]:.2f} …[/]")
        module, _, function = ROWS[name].partition(":")
        found: list[Figure] = getattr(import_module(module), function or MEASURE)(runs, peers)
        figures += found
        console.print(table(found))
    machine = f"{platform.machine()}, Python {platform.python_version()}, {platform.system()} {platform.release()}"
    found_all = {"machine": machine, "runs": runs, "load_before": loads, "figures": [f.as_json() for f in figures]}
    text = json.dumps(found_all, indent=1)
    if save:
        save.write_text(text + "\n")
    if as_json:
        print(text)
    sys.exit(0)


def wait_until_quiet(load_max: float) -> float:
    """Return the load of the last minute once it is below `load_max`.

    Raises: click.ClickException after QUIET_SECONDS.
    """
    until = time.monotonic() + QUIET_SECONDS
    while (load := os.getloadavg()[0]) >= load_max:
        if time.monotonic() > until:
            raise click.ClickException(f"The machine is busy (load {load:.2f}): stop other work, or raise --load-max.")
        time.sleep(1)
    return load


def table(figures: list[Figure]) -> Table:
    view = Table("row", "who", "median", "unit", "target", "", "note", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for figure in figures:
        mark = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[figure.met]
        target = "" if figure.target is None else f"{'>=' if figure.least else '<='} {figure.target:,.4g}"
        view.add_row(figure.row, figure.who, f"{figure.value:,.4g}", figure.unit, target, mark, figure.note)
    return view


if __name__ == "__main__":
    main()
