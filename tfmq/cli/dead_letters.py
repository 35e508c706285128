"""What the commands of `tfmq dlq` have in common: which stores and letters are meant, and how a letter is shown."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from tfmq.cli import completion
from tfmq.cli.output import Output, printable, time_text
from tfmq.cli.read import as_row
from tfmq.cli.values import Moment
from tfmq.errors import DecodeFailed, TfmqError

if TYPE_CHECKING:
    from tfmq.dead_letters.admin import Desk
    from tfmq.dead_letters.model import Letter, Selection

Function = TypeVar("Function", bound=Callable[..., Any])

STATES = ("failing", "waiting", "retrying", "dead", "redriving", "redriven", "handled", "dropped")
OPEN = ("failing", "waiting", "retrying", "dead", "redriving")
"""What somebody, or something, has still to look after."""
ERROR_CHARACTERS = 60
COLUMNS = ("id", "state", "group", "broker", "message", "key", "calls", "kept", "error")
BROKER_CHARACTERS = 8
"""Of a broker's id, in a table; enough to tell those of one person's machine from each other."""


class Choice(NamedTuple):
    """What the user chose: a store or None for all of this user's, and which letters."""

    store: str | None
    group: str | None
    filters: Mapping[str, Any]

    def selection(self, states: Sequence[str] = (), ids: Sequence[str] = ()) -> "Selection":
        """The letters that are meant; `states` where the user named none."""
        from tfmq.dead_letters.model import Selection

        given = {name: value for name, value in self.filters.items() if value is not None}
        for name in ("since", "until"):
            moment = given.pop(name, None)
            if isinstance(moment, datetime):
                given[f"{name}_ms"] = round(moment.timestamp() * 1000)
        chosen = given.pop("states", ()) or tuple(states)
        return Selection(states=chosen, group=self.group, ids=tuple(ids), **given)

    @property
    def narrows(self) -> bool:
        """Whether it says anything about the letters."""
        return self.group is not None or any(value not in (None, ()) for value in self.filters.values())


def store_options(command: Function) -> Function:
    """--store and --group; the command gets a `choice`."""

    @click.option(
        "--store",
        metavar="PATH|URL|topic:NAME",
        help="Where the dead letters are [all below ~/.local/state/tfmq].",
    )
    @click.option(
        "-g", "--group", shell_complete=completion.groups, help="Only those of this consumer group."
    )
    @functools.wraps(command)
    def wrapped(*args: Any, store: str | None, group: str | None, **kwargs: Any) -> Any:
        names = ("states", "topic", "partition", "key", "tag", "error", "since", "until")
        filters = {name: kwargs.pop(name) for name in names if name in kwargs}
        return command(*args, choice=Choice(store, group, filters), **kwargs)

    return wrapped  # type: ignore[return-value]


def filter_options(command: Function) -> Function:
    """What letters are chosen by, as arguments of the choice."""
    options = (
        click.option(
            "--topic", shell_complete=completion.topics, help="Only those that came from this topic."
        ),
        click.option("--partition", type=click.IntRange(min=0), help="Only those of this partition."),
        click.option("-k", "--key", help="Only those with this key."),
        click.option("-t", "--tag", help="Only those with this tag."),
        click.option("--error", metavar="TEXT", help="Only those whose last error has this text in it."),
        click.option("--since", type=Moment(), help="Only those kept from this time on; -1h is a time too."),
        click.option("--until", type=Moment(), help="Only those kept before this time."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def state_option(command: Function) -> Function:
    """--state, which may be repeated."""
    return click.option(
        "--state",
        "states",
        metavar="STATE",
        type=click.Choice(STATES),
        multiple=True,
        help=f"Only this state, of {', '.join(STATES)}; may be repeated.",
    )(command)


@contextmanager
def desks(choice: Choice, output: Output) -> Iterator[list["Desk"]]:
    """The stores that are meant, open. Raises `TfmqError` for one that was named and is not there."""
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


def none_there(choice: Choice) -> str:
    """What a person reads where there is nothing."""
    return f"none that is asked for is kept at {place_of(choice)}; another place: --store PATH, URL or topic:NAME"


def place_of(choice: Choice) -> str:
    """Where was looked."""
    from tfmq.dead_letters.store import state_folder

    return choice.store or str(state_folder())


def known(desks: Sequence["Desk"], id: str, choice: Choice) -> tuple["Desk", "Letter"]:
    """The one letter whose id begins so, and its store. Raises `TfmqError` where there is none, or more."""
    found = [(desk, letter) for desk in desks for letter in desk.starting_with(id)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise TfmqError(
            f"There is no dead letter {id!r} at {place_of(choice)}; --store names another place.",
            outcome="not done",
        )
    raise TfmqError(f"Several dead letters begin with {id!r}: write more of the id.", outcome="not done")


def row_of(letter: "Letter") -> dict[str, Any]:
    """As JSON has it: everything but body and tracebacks. Times are ISO 8601 in UTC, null for none."""
    from tfmq.dead_letters.model import key_text, moment_text

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


def readable(letter: "Letter") -> dict[str, str]:
    """As a table has it."""
    row = row_of(letter)
    return {
        "id": printable(letter.id),
        "state": letter.state,
        "group": printable(letter.group),
        "broker": printable(letter.broker[:BROKER_CHARACTERS]) or "-",
        "message": f"{printable(letter.topic)}-{letter.partition} {letter.offset}",
        "key": printable(row["key"] or "-"),
        "calls": str(letter.calls),
        "kept": time_text(letter.kept_ms),
        "error": shortened(printable(letter.error)),
    }


def everything(letter: "Letter") -> dict[str, Any]:
    """What `show` prints of it in two columns: all but its body and its failures, with times as people read them."""
    row = {key: printable(each) if isinstance(each, str) else each for key, each in row_of(letter).items()}
    times = ("kept", "changed", "next", "appended")
    return row | {f"{name}_at": time_text(getattr(letter, f"{name}_ms") or None) for name in times}


def shortened(error: str) -> str:
    """As much of it as a table takes, and a sign that there is more."""
    return error if len(error) <= ERROR_CHARACTERS else f"{error[: ERROR_CHARACTERS - 3]}..."


def whole_row(letter: "Letter") -> dict[str, Any]:
    """Everything, with the message as `read --json` has it (so that `send --json` takes it), and the history."""
    from tfmq.dead_letters.model import moment_text

    row = {
        **row_of(letter),
        "failures": [{**each._asdict(), "at": moment_text(each.at_ms)} for each in letter.failures],
    }
    for failure in row["failures"]:
        del failure["at_ms"]
    if letter.body is None:  # it was too large for its store, and is gone from its topic
        return row
    try:
        message = as_row(letter.message())
    except DecodeFailed:  # its attribute is what was wrong with it
        message = as_row(letter.message()._replace(attribute=None))
        message["attribute_hex"] = ((letter.body and letter.body.attribute) or b"").hex()
    del message["id"]
    return {**row, **message}
