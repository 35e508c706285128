"""`tfmq dlq`: dead letters, messages whose handling failed.

All but redrive works without a broker; where the store is a topic, nothing does.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfmq.cli.dead_letters import (
    COLUMNS,
    OPEN,
    Choice,
    desks,
    everything,
    filter_options,
    known,
    none_there,
    readable,
    row_of,
    state_option,
    store_options,
    whole_row,
)
from tfmq.cli.output import Output, counted, dumps, output_options, printable, time_text
from tfmq.cli.values import Rate
from tfmq.errors import TfmqError

if TYPE_CHECKING:
    from tfmq.dead_letters.admin import Desk
    from tfmq.dead_letters.model import Letter

ROWS_SHOWN = 100
"""A person reads no more; programs get all."""
NOT_DONE = 1
STANDARD_OUTPUT = Path("-")


@click.group(epilog="\b\nExample:\n  tfmq dlq list --group billing")
def dlq() -> None:
    """Dead letters: list, show, retry, drop, export, redrive."""


# Looking


@dlq.command(
    "list",
    epilog="\b\nExamples:\n  tfmq dlq list\n  tfmq dlq list --store dead.db --state dead --since -1h\n"
    "  tfmq dlq list --error Timeout --json | jq -r .[].id",
)
@store_options
@state_option
@filter_options
@click.option(
    "-n", "count", type=click.IntRange(min=1), help=f"At most so many [a table: {ROWS_SHOWN}; JSON: all]."
)
@output_options
def list_command(choice: Choice, count: int | None, output: Output) -> None:
    """List the dead letters, the oldest first; without --state those that wait for somebody or something."""
    with desks(choice, output) as found:
        letters = (each for desk in found for each in desk.letters(choice.selection(OPEN)))
        if output.json:
            output.array(row_of(each) for each in islice(letters, count))
            return
        most = count or ROWS_SHOWN
        shown = list(islice(letters, most + 1))
        output.rows(
            [readable(each) for each in shown[:most]], COLUMNS, none_there(choice), ("state", "message")
        )
        if len(shown) > most:
            output.say("there are more: -n, or narrow it with --topic, --error, --since ...")


@dlq.command(epilog="\b\nExample:\n  tfmq dlq show 3f2a")
@click.argument("id")
@store_options
@output_options
def show(id: str, choice: Choice, output: Output) -> None:
    """Show one dead letter: its message, and each call with its traceback. The first letters of the id are enough."""
    with desks(choice, output) as found:
        desk, brief = known(found, id, choice)
        letter = desk.get(brief.id) or brief
        row = whole_row(letter)
    if output.json:
        output.object(row)
        return
    output.object(everything(letter))
    if output.quiet:
        return
    for number, failure in enumerate(letter.failures, 1):
        click.echo(f"\nfailure {number} of {len(letter.failures)}, at {time_text(failure.at_ms)}")
        click.echo("\n".join(map(printable, (failure.traceback or failure.error).splitlines())))
    payload = row.get("payload", row.get("payload_base64"))
    click.echo(f"\npayload\n{printable(payload) if payload is not None else '(none: a tombstone)'}")


@dlq.command(
    epilog="\b\nExamples:\n  tfmq dlq export --topic orders > orders.jsonl\n"
    "  tfmq dlq export -o orders.jsonl && tfmq send orders --json < orders.jsonl"
)
@store_options
@state_option
@filter_options
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Into this file [standard output].",
)
@output_options
def export(choice: Choice, path: Path | None, output: Output) -> None:
    """Print dead letters whole, one JSON object a line (with --json one array), as `tfmq send --json` reads them."""
    number = 0
    path = None if path == STANDARD_OUTPUT else path
    with desks(choice, output) as found:
        letters = (each for desk in found for each in desk.letters(choice.selection(OPEN), whole=True))
        rows = (whole_row(each) for each in letters)
        if path is None and output.json:
            output.array(rows)
            return
        if path is None:
            for row in rows:
                click.echo(dumps(row))
                number += 1
        else:
            number = write_rows(path, rows, output.json)
    if number:
        output.say(f"{counted(number, 'dead letter')} exported")
        return
    kept = f"; {path} was not written" if path is not None else ""
    output.say(none_there(choice) + kept)


def write_rows(path: Path, rows: Iterator[dict[str, Any]], as_array: bool) -> int:
    """Write them into a file, as a whole: beside it, and in its place when all are there. None: it is left alone."""
    first = next(rows, None)
    if first is None:
        return 0
    number, before = 0, "[" if as_array else ""
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe: nothing is lost there
        path, beside = path, path
    else:
        path = path.resolve()  # what a link names is replaced, and not the link
        beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w") as file:
            if beside != path and path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)  # who may read it, may read it again
            for row in chain([first], rows):
                number += 1
                file.write(f"{before}{dumps(row)}" if as_array else f"{dumps(row)}\n")
                before = ",\n " if as_array else ""
            file.write("]\n" if as_array else "")
        if beside != path:
            beside.replace(path)
    except BaseException as error:
        if beside != path:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(beside):
            raise click.ClickException(f"{path} cannot be written: {error.strerror}") from None
        raise
    return number


# Changing


def chosen_options(command: Any) -> Any:
    """IDs, or filters, or --all."""
    all_option = click.option(
        "--all", "everything", is_flag=True, help="All that match the filters; without filters, all."
    )
    return click.argument("ids", nargs=-1, metavar="[ID]...")(
        store_options(filter_options(all_option(command)))
    )


@dlq.command(epilog="\b\nExamples:\n  tfmq dlq retry 3f2a\n  tfmq dlq retry --error Timeout --calls 3")
@chosen_options
@click.option(
    "--calls",
    type=click.IntRange(min=1),
    default=6,
    show_default=True,
    help="Calls of its handler, after which it is dead again.",
)
@click.option(
    "--force", is_flag=True, help="By a consumer at the broker of --servers, also those of another broker."
)
@output_options
def retry(
    ids: tuple[str, ...], choice: Choice, everything: bool, calls: int, force: bool, output: Output
) -> int:
    """Have dead letters handled again by a consumer of their group at their broker, which looks for them every few
    seconds."""
    with desks(choice, output) as found:
        meant = chosen(found, ids, choice, everything, ("dead", "waiting"))
        results = [
            (desk, letters, desk.retry([each.id for each in letters], calls, force=force))
            for desk, letters in meant
        ]
    return tell(
        output, results, "retried", "will be handled again by a running consumer of the group", choice
    )


@dlq.command(epilog="\b\nExamples:\n  tfmq dlq drop 3f2a\n  tfmq dlq drop --topic orders --until -30d")
@chosen_options
@click.option("--force", is_flag=True, help="Also those of which nobody knows whether a redrive sent them.")
@output_options
def drop(ids: tuple[str, ...], choice: Choice, everything: bool, force: bool, output: Output) -> int:
    """Drop dead letters: nobody wants them any more. They are remembered for a month, and can be retried until then."""
    with desks(choice, output) as found:
        meant = chosen(found, ids, choice, everything, ("dead", "waiting"))
        results = [
            (desk, letters, desk.drop([each.id for each in letters], force=force)) for desk, letters in meant
        ]
    return tell(output, results, "dropped", "dropped", choice)


def chosen(
    found: Sequence["Desk"], ids: Sequence[str], choice: Choice, everything: bool, states: Sequence[str]
) -> list[tuple["Desk", list["Letter"]]]:
    """The letters that are meant, by store. Raises `UsageError` where nothing was chosen."""
    if ids:
        if everything or any(value is not None for value in choice.filters.values()):
            raise click.UsageError("give IDs, or filters, not both")
        by_desk: dict[str, tuple[Desk, list[Letter]]] = {}
        for id in dict.fromkeys(ids):
            desk, letter = known(found, id, choice)
            by_desk.setdefault(desk.name, (desk, []))[1].append(letter)
        return list(by_desk.values())
    if not (everything or choice.narrows):
        raise click.UsageError("give IDs, or filters, or --all")
    return [(desk, list(desk.letters(choice.selection(states)))) for desk in found]


Results = list[tuple["Desk", list["Letter"], list["Letter | None"]]]


def tell(output: Output, results: Results, word: str, what: str, choice: Choice) -> int:
    """What became of each: JSON, or a sentence; the exit code."""
    pairs = [pair for _, letters, behind in results for pair in zip(letters, behind, strict=True)]
    done = [letter.id for letter, now in pairs if now is not None]
    left = [letter for letter, now in pairs if now is None]
    if output.json:
        rows = [{"id": each.id, "state": each.state} for each in left]
        output.object({word: done, "left": rows})
        return NOT_DONE if left else 0
    output.say(f"{counted(len(done), 'dead letter')}: {what}" if done or left else none_there(choice))
    for each in left:
        click.echo(
            f"{printable(each.id)} is left as it is: its state was {each.state}, or changed meanwhile",
            err=True,
        )
    return NOT_DONE if left else 0


@dlq.command(
    epilog="\b\nExamples:\n  tfmq dlq redrive --dry-run\n  tfmq dlq redrive --topic orders --error Timeout --rate 50\n"
    "  tfmq dlq redrive 3f2a --to orders-again"
)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@store_options
@filter_options
@click.option("--to", "to_topic", metavar="TOPIC", help="To this topic [the one that each came from].")
@click.option("--rate", type=Rate(), help="At most so many a second.")
@click.option("-n", "count", type=click.IntRange(min=1), help="At most so many.")
@click.option(
    "--loop-limit",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Pass over what was redriven so often before.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be sent.")
@click.option("--force", is_flag=True, help="Also those of another broker than the one at --servers.")
@output_options
def redrive(
    ids: tuple[str, ...],
    choice: Choice,
    to_topic: str | None,
    rate: float | None,
    count: int | None,
    loop_limit: int,
    dry_run: bool,
    force: bool,
    output: Output,
) -> int:
    """Send dead letters to their topic again, each once, also where this is killed: run it again, it goes on."""
    from tfmq.cli.redriving import redriven
    from tfmq.dead_letters.redrive import Wish

    with desks(choice, output) as found:
        full = tuple(sendable(known(found, each, choice)[1]) for each in ids)
        if dry_run and not found:
            output.say(none_there(choice))
        wish = Wish(choice.selection((), full), to_topic, rate, count, loop_limit, dry_run, force)
        return redriven(found, wish, output)


def sendable(letter: "Letter") -> str:
    """Its id. Raises `TfmqError` for one that is not sent."""
    if letter.state not in ("dead", "waiting", "redriving"):
        raise TfmqError(
            f"{letter.id} is {letter.state}: only dead and waiting ones are sent again.", outcome="not done"
        )
    return letter.id
