"""`python -m tools.mutants`: plant each bug in a copy of the checkout, run its tests, say which test saw it.

Exit code 0 when every bug was caught, 1 when one was not or no longer fits the code.
"""

import json
import sys

import click
from rich.console import Console
from rich.table import Table

from tools.mutants.bugs import BUGS
from tools.mutants.mutant import Verdict, tried


@click.command(epilog="Example: python -m tools.mutants --only force")
@click.option("--only", default="", help="Only those with this in their name.")
@click.option("--list", "listing", is_flag=True, help="Say which there are, and try none.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(only: str, listing: bool, as_json: bool) -> None:
    """Try the planted bugs."""
    chosen = [bug for bug in BUGS if only in bug.name]
    if not chosen:
        raise click.UsageError(f"no planted bug has {only!r} in its name")
    console = Console(stderr=as_json)
    if listing:
        for bug in chosen:
            console.print(f"{bug.name}: {bug.promise} ({bug.file})", highlight=False)
        return
    verdicts = []
    for number, bug in enumerate(chosen, 1):
        console.print(f"[dim]{number} of {len(chosen)}: {bug.name}[/]", highlight=False)
        verdicts.append(tried(bug))
    console.print(table(verdicts))
    if as_json:
        print(json.dumps([row(v) for v in verdicts], indent=1))
    sys.exit(0 if all(v.caught for v in verdicts) else 1)


def row(verdict: Verdict) -> dict[str, object]:
    bug = verdict.mutant
    return {
        "name": bug.name,
        "promise": bug.promise,
        "caught": verdict.caught,
        "caught_by": verdict.caught_by,
        "seconds": round(verdict.seconds, 1),
        "trouble": verdict.trouble,
    }


def table(verdicts: list[Verdict]) -> Table:
    view = Table("planted bug", "promise it breaks", "caught by", "seconds")
    for verdict in verdicts:
        caught = verdict.caught_by[0] if verdict.caught else f"[bold red]NOT CAUGHT[/] {verdict.trouble}"
        view.add_row(verdict.mutant.name, verdict.mutant.promise, caught, f"{verdict.seconds:.0f}")
    return view


if __name__ == "__main__":
    main()
