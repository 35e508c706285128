"""`tfmq dlq`: dead letters, which are messages whose handling failed.

With a store in a file or a database, all commands except `redrive` and `retry --force` work without a broker.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from tfmq.cli import main
from tfmq.cli.main import NOT_DONE
from tfmq.cli.option_types import Moment, Rate
from tfmq.cli.output import (
    ROWS_SHOWN,
    Output,
    escape_unprintable,
    escape_values,
    json_text,
    output_options,
    progress,
    time_text,
    with_noun,
)
from tfmq.cli.read import message_row
from tfmq.cli.topic import find_topic
from tfmq.errors import BadRequest, DecodeFailed, TfmqError, UnknownTopic

if TYPE_CHECKING:
    from tfmq.dead_letters.admin import Desk
    from tfmq.dead_letters.model import Letter, Selection
    from tfmq.dead_letters.redrive import Report, Wish


Function = TypeVar("Function", bound=Callable[..., Any])

STATES = ("failing", "waiting", "retrying", "dead", "redriving", "redriven", "handled", "dropped")
PENDING_STATES = ("failing", "waiting", "retrying", "dead", "redriving")
"""States that still need an action of a person or a program."""
ERROR_CHARACTERS = 60
COLUMNS = ("id", "state", "group", "broker", "message", "key", "calls", "kept", "error")
BROKER_CHARACTERS = 8
"""Number of characters of a broker id in a table: enough to distinguish a few brokers."""


class LetterChoice(NamedTuple):
    """The dead letters that the user selected. `store` None: all stores of this user. `filters`: option -> value."""

    store: str | None
    group: str | None
    filters: Mapping[str, Any]

    def selection(self, states: Sequence[str] = (), ids: Sequence[str] = ()) -> Selection:
        from tfmq.dead_letters.model import Selection

        given = {name: value for name, value in self.filters.items() if value is not None}
        for name in ("since", "until"):
            moment = given.pop(name, None)
            if isinstance(moment, datetime):
                given[f"{name}_ms"] = round(moment.timestamp() * 1000)
        chosen = given.pop("states", ()) or tuple(states)
        return Selection(states=chosen, group=self.group, ids=tuple(ids), **given)

    @property
    def has_filters(self) -> bool:
        return self.group is not None or any(value not in (None, ()) for value in self.filters.values())


def store_options(command: Function) -> Function:
    """Add --store and --group. The command gets their values and the values of `filter_options` as `choice`."""

    @click.option(
        "--store", metavar="PATH|URL|topic:NAME", help="The dead-letter store [all below ~/.local/state/tfmq]."
    )
    @click.option(
        "-g", "--group", shell_complete=main.complete_groups, help="Only dead letters of this consumer group."
    )
    @functools.wraps(command)
    def wrapped(*args: Any, store: str | None, group: str | None, **kwargs: Any) -> Any:
        names = ("states", "topic", "partition", "key", "tag", "error", "since", "until")
        filters = {name: kwargs.pop(name) for name in names if name in kwargs}
        return command(*args, choice=LetterChoice(store, group, filters), **kwargs)

    return wrapped  # type: ignore[return-value]


def filter_options(command: Function) -> Function:
    """Add the options that filter dead letters, for a command that has `store_options` too."""
    options = (
        click.option("--topic", shell_complete=main.complete_topics, help="Only dead letters from this topic."),
        click.option("--partition", type=click.IntRange(min=0), help="Only dead letters from this partition."),
        click.option("-k", "--key", help="Only dead letters with this key."),
        click.option("-t", "--tag", help="Only dead letters with this tag."),
        click.option("--error", metavar="TEXT", help="Only dead letters whose last error contains this text."),
        click.option("--since", type=Moment(), help="Only dead letters stored from this time on, such as -1h."),
        click.option("--until", type=Moment(), help="Only dead letters stored before this time."),
    )
    for option in reversed(options):
        command = option(command)
    return command


state_option = click.option(
    "--state",
    "states",
    metavar="STATE",
    type=click.Choice(STATES),
    multiple=True,
    help=f"Only this state, of {', '.join(STATES)}; may be repeated.",
)


@contextmanager
def open_stores(choice: LetterChoice, output: Output) -> Iterator[list[Desk]]:
    from tfmq.dead_letters.admin import Desk, default_stores

    with ExitStack() as stack:
        if choice.store is not None:
            desk = stack.enter_context(Desk(choice.store, output.servers))
            desk.check()
            yield [desk]
            return
        wanted = default_stores(choice.group)
        found = [stack.enter_context(Desk(each, output.servers)) for each in wanted]
        yield [each for each in found if each.is_there()]


def none_found_text(choice: LetterChoice) -> str:
    return f"no matching dead letters in {store_text(choice)}; another place: --store PATH, URL or topic:NAME"


def store_text(choice: LetterChoice) -> str:
    """Return the store that was searched, or the folder of all stores of this user."""
    from tfmq.dead_letters.store import state_directory as state_folder

    return choice.store or str(state_folder())


def find_letter(desks: Sequence[Desk], id: str, choice: LetterChoice) -> tuple[Desk, Letter]:
    """Return the one dead letter whose id begins with `id`, and its store. Raises TfmqError for none or several."""
    found = [(desk, letter) for desk in desks for letter in desk.starting_with(id)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise TfmqError(
            f"There is no dead letter {id!r} at {store_text(choice)}; --store names another place.", outcome="not done"
        )
    raise TfmqError(f"Several dead letters begin with {id!r}: write more of the id.", outcome="not done")


def json_row(letter: Letter) -> dict[str, Any]:
    """Return the JSON object of a dead letter, without body and tracebacks; times are ISO 8601 in UTC."""
    from tfmq.dead_letters.model import iso_time as moment_text
    from tfmq.dead_letters.model import key_text

    return {
        "id": letter.id,
        "state": letter.state,
        "group": letter.group,
        "broker": letter.broker or None,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "ordinal": letter.ordinal,
        "message_id": f"{letter.message_id:016x}",
        "key": key_text(letter.key),
        "tag": letter.tag,
        "calls": letter.calls,
        "calls_left": letter.calls_left,
        "put_offs": letter.put_offs,
        "redrives": letter.redrives,
        "kept_at": moment_text(letter.kept_ms),
        "changed_at": moment_text(letter.changed_ms),
        "next_at": moment_text(letter.next_ms) or None,
        "appended_at": moment_text(letter.appended_ms),
        "payload_bytes": max(0, letter.payload_bytes),
        "error": letter.error,
        "sent_to": None if letter.journey is None else f"{letter.journey.topic}-{letter.journey.partition}",
        "sent_offset": None if letter.sent_offset < 0 else letter.sent_offset,
    }


def table_row(letter: Letter) -> dict[str, str]:
    row, error = json_row(letter), escape_unprintable(letter.error)
    return {
        "id": escape_unprintable(letter.id),
        "state": letter.state,
        "group": escape_unprintable(letter.group),
        "broker": escape_unprintable(letter.broker[:BROKER_CHARACTERS]) or "-",
        "message": f"{escape_unprintable(letter.topic)}-{letter.partition} {letter.offset}",
        "key": escape_unprintable(row["key"] or "-"),
        "calls": str(letter.calls),
        "kept": time_text(letter.kept_ms),
        "error": error if len(error) <= ERROR_CHARACTERS else f"{error[: ERROR_CHARACTERS - 3]}...",
    }


def detail_row(letter: Letter) -> dict[str, Any]:
    row = escape_values(json_row(letter))
    times = ("kept", "changed", "next", "appended")
    return row | {f"{name}_at": time_text(getattr(letter, f"{name}_ms") or None) for name in times}


def export_row(letter: Letter) -> dict[str, Any]:
    """Return the JSON object of a dead letter with its failures, and its message as `send --json` reads it."""
    from tfmq.dead_letters.model import iso_time as moment_text

    row = {
        **json_row(letter),
        "failures": [{**each._asdict(), "at": moment_text(each.at_ms)} for each in letter.failures],
    }
    for failure in row["failures"]:
        del failure["at_ms"]
    if letter.body is None:  # the message was too large for its store, and was deleted from its topic
        return row
    try:
        message = message_row(letter.message())
    except DecodeFailed:  # the attribute may have been the cause of the failure
        message = message_row(letter.message()._replace(attribute=None))
        message["attribute_hex"] = ((letter.body and letter.body.attribute) or b"").hex()
    del message["id"]
    return {**row, **message}


@click.group(epilog="\b\nExample:\n  tfmq dlq list --group billing")
def dlq() -> None:
    """Dead letters: list, show, retry, drop, export, redrive."""


@dlq.command(
    "list",
    epilog="\b\nExamples:\n  tfmq dlq list\n  tfmq dlq list --store dead.db --state dead --since -1h\n"
    "  tfmq dlq list --error Timeout --json | jq -r .[].id",
)
@store_options
@state_option
@filter_options
@click.option("-n", "count", type=click.IntRange(min=1), help=f"At most this many [a table: {ROWS_SHOWN}; JSON: all].")
@output_options
def list_command(choice: LetterChoice, count: int | None, output: Output) -> None:
    """List the dead letters, the oldest first. Without --state, only dead letters that need an action are listed."""
    with open_stores(choice, output) as found:
        letters = (each for desk in found for each in desk.letters(choice.selection(PENDING_STATES)))
        if output.json:
            output.print_array(json_row(each) for each in islice(letters, count))
            return
        most = count or ROWS_SHOWN
        shown = list(islice(letters, most + 1))
        output.print_rows(
            [table_row(each) for each in shown[:most]], COLUMNS, none_found_text(choice), ("state", "message")
        )
        if len(shown) > most:
            output.info("there are more: use -n, or filter with --topic, --error, --since ...")


@dlq.command(epilog="\b\nExample:\n  tfmq dlq show 3f2a")
@click.argument("id")
@store_options
@output_options
def show(id: str, choice: LetterChoice, output: Output) -> None:
    """Show one dead letter: its message, and each call with its traceback. The first letters of the id are enough."""
    with open_stores(choice, output) as found:
        desk, brief = find_letter(found, id, choice)
        letter = desk.get(brief.id) or brief
        row = export_row(letter)
    if output.json:
        output.print_object(row)
        return
    output.print_object(detail_row(letter))
    if output.quiet:
        return
    for number, failure in enumerate(letter.failures, 1):
        click.echo(f"\nfailure {number} of {len(letter.failures)}, at {time_text(failure.at_ms)}")
        click.echo("\n".join(map(escape_unprintable, (failure.traceback or failure.error).splitlines())))
    payload = row.get("payload", row.get("payload_base64"))
    click.echo(f"\npayload\n{escape_unprintable(payload) if payload is not None else '(none: a tombstone)'}")


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
    help="Write to this file [standard output].",
)
@output_options
def export(choice: LetterChoice, path: Path | None, output: Output) -> None:
    """Print dead letters with their messages, one JSON object per line (with --json one array), as `tfmq
    send --json` reads them.
    """
    number = 0
    path = None if path == Path("-") else path
    with open_stores(choice, output) as found:
        letters = (each for desk in found for each in desk.letters(choice.selection(PENDING_STATES), whole=True))
        rows = (export_row(each) for each in letters)
        if path is None and output.json:
            output.print_array(rows)
            return
        if path is None:
            for row in rows:
                click.echo(json_text(row))
                number += 1
        else:
            number = write_rows(path, rows, output.json)
    if number:
        output.info(f"{with_noun(number, 'dead letter')} exported")
        return
    kept = f"; {path} was not written" if path is not None else ""
    output.info(none_found_text(choice) + kept)


def write_rows(path: Path, rows: Iterator[dict[str, Any]], as_array: bool) -> int:
    """Write rows to a temporary file, then rename it to `path`. Without rows, write nothing. Return the row count."""
    first = next(rows, None)
    if first is None:
        return 0
    number, before = 0, "[" if as_array else ""
    # A device or a pipe, such as /dev/stdout, is written directly: it cannot be replaced by a file.
    if path.exists() and not path.is_file():
        path, beside = path, path
    else:
        path = path.resolve()  # replace the target of a link, not the link
        beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w") as file:
            if beside != path and path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)  # keep the permissions of the old file
            for row in chain([first], rows):
                number += 1
                file.write(f"{before}{json_text(row)}" if as_array else f"{json_text(row)}\n")
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


def chosen_options(command: Any) -> Any:
    all_option = click.option("--all", "everything", is_flag=True, help="All dead letters that match the filters.")
    return click.argument("ids", nargs=-1, metavar="[ID]...")(store_options(filter_options(all_option(command))))


@dlq.command(epilog="\b\nExamples:\n  tfmq dlq retry 3f2a\n  tfmq dlq retry --error Timeout --calls 3")
@chosen_options
@click.option(
    "--calls",
    type=click.IntRange(min=1),
    default=6,
    show_default=True,
    help="Calls of its handler after which it is a dead letter again.",
)
@click.option(
    "--force", is_flag=True, help="Let consumers at the broker of --servers handle dead letters of other brokers too."
)
@output_options
def retry(ids: tuple[str, ...], choice: LetterChoice, everything: bool, calls: int, force: bool, output: Output) -> int:
    """Let consumers of the group handle dead letters again.

    The consumers of the group at the broker of a dead letter look for such dead letters every few seconds.
    """
    what = "will be handled again by a running consumer of the group"
    return change_letters(
        output, choice, ids, everything, lambda desk, ids: desk.retry(ids, calls, force=force), "retried", what
    )


@dlq.command(epilog="\b\nExamples:\n  tfmq dlq drop 3f2a\n  tfmq dlq drop --topic orders --until -30d")
@chosen_options
@click.option("--force", is_flag=True, help="Also those of which it is unknown whether a redrive sent them.")
@output_options
def drop(ids: tuple[str, ...], choice: LetterChoice, everything: bool, force: bool, output: Output) -> int:
    """Drop dead letters that are no longer needed.

    Dropped dead letters remain in the store for a month, and can be retried until then.
    """
    return change_letters(
        output, choice, ids, everything, lambda desk, ids: desk.drop(ids, force=force), "dropped", "dropped"
    )


def select_letters(
    found: Sequence[Desk], ids: Sequence[str], choice: LetterChoice, everything: bool
) -> list[tuple[Desk, list[Letter]]]:
    """Return each store with its dead letters to change. Raises UsageError unless either ids or filters are given."""
    if ids:
        if everything or any(value is not None for value in choice.filters.values()):
            raise click.UsageError("give either IDs or filters")
        by_desk: dict[str, tuple[Desk, list[Letter]]] = {}
        for id in dict.fromkeys(ids):
            desk, letter = find_letter(found, id, choice)
            by_desk.setdefault(desk.name, (desk, []))[1].append(letter)
        return list(by_desk.values())
    if not (everything or choice.has_filters):
        raise click.UsageError("give IDs, filters or --all")
    return [(desk, list(desk.letters(choice.selection(("dead", "waiting"))))) for desk in found]


def change_letters(
    output: Output,
    choice: LetterChoice,
    ids: Sequence[str],
    everything: bool,
    change: Callable[[Desk, list[str]], list[Letter | None]],
    word: str,
    what: str,
) -> int:
    """Change the selected dead letters, print what was changed, and return the exit code.

    `change(desk, ids)`: changes dead letters of a store, and returns None for each that was not changed · `word`: the
    JSON key for the ids of changed dead letters · `what`: what was done, as a part of the printed sentence.
    """
    pairs: list[tuple[Letter, Letter | None]] = []
    with open_stores(choice, output) as found:
        for desk, letters in select_letters(found, ids, choice, everything):
            pairs += zip(letters, change(desk, [each.id for each in letters]), strict=True)
    done = [letter.id for letter, now in pairs if now is not None]
    left = [letter for letter, now in pairs if now is None]
    if output.json:
        rows = [{"id": each.id, "state": each.state} for each in left]
        output.print_object({word: done, "left": rows})
        return NOT_DONE if left else 0
    output.info(f"{with_noun(len(done), 'dead letter')}: {what}" if done or left else none_found_text(choice))
    for each in left:
        click.echo(
            f"{escape_unprintable(each.id)} is unchanged: its state was {each.state}, or changed meanwhile", err=True
        )
    return NOT_DONE if left else 0


@dlq.command(
    epilog="\b\nExamples:\n  tfmq dlq redrive --dry-run\n  tfmq dlq redrive --topic orders --error Timeout --rate 50\n"
    "  tfmq dlq redrive 3f2a --to orders-again"
)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@store_options
@filter_options
@click.option(
    "--to", "to_topic", metavar="TOPIC", help="To this topic, which must exist [the one that each came from]."
)
@click.option("--rate", type=Rate(), help="Highest number of messages per second.")
@click.option("-n", "count", type=click.IntRange(min=1), help="Highest number of messages.")
@click.option(
    "--loop-limit",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Skip messages that were redriven this often before.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be sent.")
@click.option("--force", is_flag=True, help="Also dead letters of other brokers than the one at --servers.")
@output_options
def redrive(
    ids: tuple[str, ...],
    choice: LetterChoice,
    to_topic: str | None,
    rate: float | None,
    count: int | None,
    loop_limit: int,
    dry_run: bool,
    force: bool,
    output: Output,
) -> int:
    """Send dead letters to their topic again, each once.

    If the command is killed, run it again: the next run continues.
    """
    from tfmq.dead_letters.redrive import Wish

    if to_topic is not None:
        with output.admin() as admin:
            find_topic(admin, to_topic)
    with open_stores(choice, output) as found:
        full = tuple(sendable_id(find_letter(found, each, choice)[1]) for each in ids)
        if dry_run and not found:
            output.info(none_found_text(choice))
        wish = Wish(choice.selection((), full), to_topic, rate, count, loop_limit, dry_run, force)
        return redrive_stores(found, wish, output)


def sendable_id(letter: Letter) -> str:
    if letter.state not in ("dead", "waiting", "redriving"):
        raise TfmqError(
            f"{letter.id} is {letter.state}: only dead and waiting ones are sent again.", outcome="not done"
        )
    return letter.id


def redrive_stores(desks: Sequence[Desk], wish: Wish, output: Output) -> int:
    from tfmq.dead_letters.redrive import Report

    total = Report()
    with progress(output, "redriving", None) as advance:
        for desk in desks:
            if wish.limit is not None and total.selected >= wish.limit:
                break
            try:
                desk.redrive(wish, advance, total)
            except TfmqError as error:
                report_redrive(total, wish, output)
                is_begun = bool(total.targets) or not isinstance(error, UnknownTopic)
                if is_begun and not wish.dry and not isinstance(error, BadRequest):
                    first = "" if error.retriable else "correct the cause and "
                    output.info(
                        f"the redrive is incomplete: {first}run the same command again; it continues where it stopped"
                    )
                raise
    report_redrive(total, wish, output)
    return NOT_DONE if total.unsure or total.unsendable or total.foreign else 0


def report_redrive(total: Report, wish: Wish, output: Output) -> None:
    if output.json:
        row: dict[str, Any] = {"dry_run": wish.dry, "sent": total.sent, "resumed": total.resumed}
        row.update(targets=total.targets, passed_over=total.looping)
        row.update(unsendable=total.unsendable, unsure=total.unsure, foreign=total.foreign)
        output.print_object(row)
        return
    where = ", ".join(f"{number:,} to {escape_unprintable(topic)}" for topic, number in sorted(total.targets.items()))
    word = "would be sent" if wish.dry else "sent"
    output.info(f"{with_noun(sum(total.targets.values()), 'dead letter')} {word}{f': {where}' if where else ''}")
    if total.waiting and not total.targets:
        output.info(f"{with_noun(total.waiting, 'dead letter')} waiting to be handled again: name an ID to send it now")
    if total.resumed:
        output.info(f"{total.resumed:,} of these had been sent by an interrupted redrive")
    if total.looping:
        output.info(
            f"{with_noun(total.looping, 'dead letter')} skipped: redriven {wish.loop_limit} times before and back"
            " again; check them first (tfmq dlq show), or raise --loop-limit"
        )
    for broker, number in sorted(total.foreign.items()):
        of = (
            f"of the broker {escape_unprintable(broker)}"
            if broker
            else "of an unknown broker, which an earlier release did not store"
        )
        click.echo(
            f"{with_noun(number, 'dead letter')} left, {of}: --servers is the broker {total.broker}; name that one's"
            " address, or --force sends them to this one",
            err=True,
        )
    for sentence in (*total.unsendable, *total.unsure):
        click.echo(escape_unprintable(sentence), err=True)
