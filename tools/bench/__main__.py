"""`python -m tools.bench`: run rows of the performance table, beside the peers that are installed."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tools.bench.figures import Figure

MEASURE = "measure"
QUIET_SECONDS = 600.0
"""The load of the last minute falls from 4 to 0.5 in about two minutes."""
ROWS = {
    "limits": "tools.bench.limits",
    "produce": "tools.bench.produce",
    "consume": "tools.bench.consume",
    "single": "tools.bench.single",
    "clients": "tools.bench.clients",
    "peers": "tools.bench.peer_rows",
    "end_to_end": "tools.bench.end_to_end",
    "footprint": "tools.bench.footprint",
    "groups": "tools.bench.groups",
    "idle": "tools.bench.idle",
    "tls": "tools.bench.tls",
    "hostile": "tools.bench.hostile",
    "replication": "tools.bench.replication",
    "verification": "tools.bench.verification",
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
@click.option("--resume", is_flag=True, help="Keep the rows that the file of --save has; the commit must be the same.")
def main(rows: str, runs: int, peers: bool, load_max: float, as_json: bool, save: Path | None, resume: bool) -> None:
    """Measure tfmq on this machine. Nothing leaves loopback; every server stops by itself."""
    names = [name.strip() for name in rows.split(",") if name.strip()]
    if unknown := [name for name in names if name not in ROWS]:
        raise click.UsageError(f"there is no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    if save and not save.parent.is_dir():
        raise click.UsageError(f"There is no folder {save.parent}: create it, or name another file for --save.")
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 150)
    measured: dict[str, dict[str, Any]] = {}
    machine = f"{platform.machine()}, Python {platform.python_version()}, {platform.system()} {platform.release()}"
    scale = os.environ.get("TFMQ_BENCH_SCALE", "1")
    found_all = {
        "commit": commit(), "machine": machine, "runs": runs, "peers": peers, "scale": scale, "rows": measured
    }  # fmt: skip
    if resume:
        measured |= earlier_rows(save, found_all)
    for name in names:
        if name in measured:
            continue
        load = wait_until_quiet(load_max)
        console.print(f"[dim]{name}, at a load of {load:.2f} …[/]")
        module, _, function = ROWS[name].partition(":")
        begun = time.monotonic()
        found: list[Figure] = getattr(import_module(module), function or MEASURE)(runs, peers)
        seconds = round(time.monotonic() - begun)
        measured[name] = {"load_before": load, "seconds": seconds, "figures": [figure.as_json() for figure in found]}
        console.print(table(found))
        if save:
            # After each row, so that an error in a later one does not lose the measurements of an hour.
            unfinished = save.with_name(f"{save.name}.new")
            unfinished.write_text(json.dumps(found_all, indent=1) + "\n")
            unfinished.replace(save)
    if as_json:
        print(json.dumps(found_all, indent=1))


def earlier_rows(save: Path | None, found_all: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of an earlier run that was interrupted. Raises click.UsageError if they cannot stand beside new ones."""
    if save is None:
        raise click.UsageError("--resume needs --save FILE: the file with the rows of the earlier run.")
    if not save.exists():
        return {}
    try:
        earlier: dict[str, Any] = json.loads(save.read_text())
        rows = dict(earlier["rows"])
    except (ValueError, KeyError, TypeError):
        raise click.UsageError(f"{save} is no file that --save has written: name another one.") from None
    for key in ("commit", "machine", "runs", "peers", "scale"):
        if earlier.get(key) != found_all[key]:
            raise click.UsageError(f"{save} is of {key} {earlier.get(key)}, not {found_all[key]}: name another file.")
    if not re.fullmatch("[0-9a-f]+", str(found_all["commit"])):
        raise click.UsageError("--resume needs a checkout without changed or new files: commit or remove them first.")
    return rows


def commit() -> str:
    """The commit of this checkout, with `+` if files were changed or added since; "unknown" outside of a checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "--short=12", "HEAD").strip() + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


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
