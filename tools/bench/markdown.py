"""The tables of the pages, from what `python -m tools.bench --peers --save FILE` stored.

The pages are docs/performance.md, docs/security.md and docs/replication.md.

Between the marks `figures of ROW, ROW` and `end of figures` of a page stands the table of these rows, between the
marks `measured` and `end of measured` what was measured where and when. A page without any of the rows stays as it
is. docs/peers.svg is drawn from the ratios to the peers.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from tools.bench import peer_plot

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = tuple(DOCS / name for name in ("performance.md", "security.md", "replication.md"))
TABLE = re.compile(r"(<!-- figures of ([a-z_, ]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
MEASURED = re.compile(r"(<!-- measured -->\n).*?(<!-- end of measured -->)", re.DOTALL)


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


def table(figures: list[dict[str, Any]]) -> str:
    head = ["| row | who | median | unit | target | | least to most |", "|---|---|---|---|---|---|---|"]
    return "\n".join(head + [line(figure) for figure in figures])


def measured(run: dict[str, Any]) -> str:
    """Commit, machine, number of runs, and the load before each row."""
    loads = ", ".join(f"{name} {row['load_before']:.2f}" for name, row in run["rows"].items())
    return (
        f"Commit {run['commit']}, {run['machine']}; {run['runs']} runs of each row unless it says otherwise. "
        f"Load of the last minute before each row: {loads}."
    )


def main() -> None:
    """Write the tables of the pages from the file named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("Say which file: python -m tools.bench.markdown bench.json")
    run = json.loads(Path(sys.argv[1]).read_text())
    rows = {name: row["figures"] for name, row in run["rows"].items()}
    texts = {page: page.read_text() for page in PAGES}
    wanted = {page: {name for m in TABLE.finditer(text) for name in m[2].split(", ")} for page, text in texts.items()}
    pages = [page for page in PAGES if wanted[page] & set(rows)]
    if difference := set().union(*(wanted[page] for page in pages)) ^ set(rows):
        sys.exit(f"The pages and {sys.argv[1]} do not have the same rows: {', '.join(sorted(difference))}.")

    def tables(match: re.Match[str]) -> str:
        return f"{match[1]}{table([each for name in match[2].split(', ') for each in rows[name]])}\n{match[3]}"

    for page in pages:
        text = TABLE.sub(tables, texts[page])
        page.write_text(MEASURED.sub(lambda match: f"{match[1]}{measured(run)}\n{match[2]}", text))
    ratios = [figure for figure in rows.get("peers", ()) if figure["who"].startswith(peer_plot.AHEAD)]
    if ratios:
        (DOCS / "peers.svg").write_text(peer_plot.draw(ratios))


if __name__ == "__main__":
    main()
