"""`python -m tools.mutants`: plant each bug in a copy of the checkout, run its tests, say which test saw it.

Exit code 0 when every bug was caught, 1 when one was not or no longer fits the code.
"""

from __future__ import annotations

import json
import sys

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tools.mutants import page
from tools.mutants.bugs import BUGS
from tools.mutants.mutant import Verdict, failing_without, tried_all


@click.command(epilog="Example: python -m tools.mutants --only force --jobs 2")
@click.option("--only", default="", help="Only those with this in their name or their file.")
@click.option("--list", "listing", is_flag=True, help="Say which there are, and try none.")
@click.option("--jobs", default=1, show_default=True, help="How many are tried at a time.")
@click.option("--baseline/--no-baseline", default=True, help="Run the tests without any bug first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Write the results into tests/planted-bugs.md.")
def main(only: str, listing: bool, jobs: int, baseline: bool, as_json: bool, markdown: bool) -> None:
    """Try the planted bugs."""
    chosen = [bug for bug in BUGS if only in bug.name or only in bug.file]
    if not chosen:
        raise click.UsageError(f"no planted bug has {only!r} in its name or its file")
    console = Console(stderr=as_json)
    if listing:
        for bug in chosen:
            console.print(f"{bug.name}: {bug.promise} ({bug.file})", highlight=False)
        return
    if baseline and (failing := failing_without(chosen, jobs)):
        raise click.ClickException(f"without any bug these fail already: {', '.join(failing)}")
    known = page.PAGE.read_text() if page.PAGE.exists() else ""
    verdicts = []
    for number, verdict in enumerate(tried_all(chosen, jobs, page.caught_by_in(known)), 1):
        said = "caught" if verdict.caught else f"NOT CAUGHT {verdict.trouble}"
        console.print(f"{number} of {len(chosen)}: {verdict.mutant.name}: {said}", highlight=False)
        verdicts.append(verdict)
    console.print(table(verdicts))
    if as_json:
        print(json.dumps([row(v) for v in verdicts], indent=1))
    if markdown:
        page.PAGE.write_text(page.text(BUGS, page.results_in(known) | page.results_of(verdicts)))
    sys.exit(0 if all(v.caught for v in verdicts) else 1)


def row(verdict: Verdict) -> dict[str, object]:
    """A verdict as JSON has it."""
    bug = verdict.mutant
    return {
        "name": bug.name,
        "promise": bug.promise,
        "file": bug.file,
        "caught": verdict.caught,
        "caught_by": verdict.caught_by,
        "seconds": round(verdict.seconds, 1),
        "trouble": verdict.trouble,
    }


def table(verdicts: list[Verdict]) -> Table:
    """The verdicts for a terminal."""
    view = Table("planted bug", "promise it breaks", "caught by", "seconds")
    for verdict in verdicts:
        caught = escape(verdict.caught_by[0]) if verdict.caught else f"[bold red]NOT CAUGHT[/] {verdict.trouble}"
        view.add_row(verdict.mutant.name, verdict.mutant.promise, caught, f"{verdict.seconds:.0f}")
    return view


if __name__ == "__main__":
    main()
