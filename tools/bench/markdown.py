"""The table of docs/performance.md, from what `python -m tools.bench --save FILE` kept.

Replaces the text between the two marks of the page, with the tables of several files one after the other, and
draws docs/peers.svg from the ratios to the peers.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tools.bench import peer_plot

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def number(value: float) -> str:
    """1438000.0 -> '1,438,000', 0.1756 -> '0.176'."""
    if value != value:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def line(figure: dict[str, Any]) -> str:
    sign = ">=" if figure["least"] else "<="
    target = "" if figure["target"] is None else f"{sign} {number(figure['target'])}"
    verdict = {True: "met", False: "**missed**", None: ""}[figure["met"]]
    cells = (figure["row"], figure["who"], number(figure["value"]), figure["unit"], target, verdict, figure["note"])
    return "| " + " | ".join(cells) + " |"


def table(runs: list[dict[str, Any]]) -> str:
    """All figures of the runs as one Markdown table."""
    head = ["| row | who | median | unit | target | | least to most |", "|---|---|---|---|---|---|---|"]
    return "\n".join(head + [line(figure) for run in runs for figure in run["figures"]])


def main() -> None:
    """Write the page's table from the files named on the command line."""
    if len(sys.argv) < 2:
        sys.exit("say which files: python -m tools.bench.markdown bench.json ...")
    runs = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(runs)}\n{END}{after}")
    ratios = [figure for run in runs for figure in run["figures"] if figure["who"].startswith(peer_plot.AHEAD)]
    if ratios:
        PAGE.with_name("peers.svg").write_text(peer_plot.draw(ratios))


if __name__ == "__main__":
    main()
