"""`tfmq trace`: the life of one message, from its birth to the groups that have passed it and its dead letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tfmq.cli import main
from tfmq.cli.dlq import LetterChoice, json_row, open_stores, store_text
from tfmq.cli.main import NOT_DONE
from tfmq.cli.output import (
    Output,
    age_text,
    escape_unprintable,
    iso_text,
    output_options,
    print_table,
    size_text,
    time_text,
    with_noun,
)
from tfmq.cli.topic import find_topic
from tfmq.hooks import TRACE_PARENT
from tfmq.ids import format_id
from tfmq.protocol.delayed_handle import HANDLE_LENGTH

if TYPE_CHECKING:
    from tfmq.client.admin.trace import GroupProgress, KeySearch, MessageTrace
    from tfmq.dead_letters.admin import Desk
    from tfmq.dead_letters.model import Letter


LETTERS_SEARCHED = 100_000
"""Maximum number of dead letters of a partition that are compared where the time of the message is not known."""

EXAMPLES = """\b
Examples:
  tfmq trace orders/0/1044
  tfmq trace dci2fm6e2xtppaaaaaaaakaaaaaaaaam2us3lumaaaaaaaaaaaauz45wyh4
  tfmq trace orders --key 42
  tfmq trace orders/0/1044 --store topic:dead --json
"""


class Place(NamedTuple):
    """A message named by its offset."""

    topic: str
    partition: int
    offset: int


def parse_target(text: str) -> Place | str:
    """Return the place TOPIC/PARTITION/OFFSET, or `text` itself if it is a handle or a topic. Raises UsageError."""
    if "/" not in text:
        return text
    topic, *numbers = text.split("/")
    if len(numbers) != 2 or not all(each.isascii() and each.isdecimal() for each in numbers):
        raise click.UsageError(f"{text!r} is no message: write TOPIC/PARTITION/OFFSET, as in orders/0/1044")
    partition, offset = map(int, numbers)
    if partition >= 1 << 24 or offset >= 1 << 63:
        raise click.UsageError(
            f"{text!r} has a number that is too large: offsets are below 2^63, partitions below 2^24"
        )
    return Place(topic, partition, offset)


@click.command(epilog=EXAMPLES, short_help="Show the life of one message.")
@click.argument("target", metavar="TOPIC/PARTITION/OFFSET|HANDLE|TOPIC", shell_complete=main.complete_topics)
@click.option("-k", "--key", help="With TOPIC alone: the newest message with this key.")
@click.option("--partition", type=click.IntRange(0, (1 << 24) - 1), help="With --key: only in this partition.")
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=100_000,
    show_default=True,
    help="With --key: how many of the newest messages of each partition are searched.",
)
@click.option("--store", metavar="PATH|URL|topic:NAME", help="The dead-letter store [all below ~/.local/state/tfmq].")
@output_options
def trace(target: str, key: str | None, partition: int | None, last: int, store: str | None, output: Output) -> int:
    """Show when one message was sent, appended and made durable, its transaction or delay, which groups have passed it,
    and its dead letters.

    The message is named by TOPIC/PARTITION/OFFSET, by the HANDLE of a delayed message, or by TOPIC and --key. What
    cannot be known any more, or needs a right that the user does not have, is listed as such. Nothing is changed. The
    exit code is 1 if the message was removed, is not known, or was not found.
    """
    named = parse_target(target)
    if key is None and partition is not None:
        raise click.UsageError("--partition needs --key; without it write TOPIC/PARTITION/OFFSET")
    if key is not None and isinstance(named, Place):
        raise click.UsageError("give either TOPIC/PARTITION/OFFSET, or TOPIC and --key")
    if key is None and isinstance(named, str) and len(named) != HANDLE_LENGTH:
        advice = f"write TOPIC/PARTITION/OFFSET, or TOPIC and --key; a handle has {HANDLE_LENGTH} characters"
        raise click.UsageError(f"{target!r} alone names no message: {advice}")
    with output.admin() as admin:
        if isinstance(named, Place):
            find_topic(admin, named.topic)
            found = admin.trace(*named)
        elif key is None:
            found = admin.trace_delayed(named)
        else:
            find_topic(admin, named)
            search = admin.find_key(named, key, partition, messages=last)
            if search.offset is None or search.partition is None:
                report_not_found(output, named, key, search)
                return NOT_DONE
            found = admin.trace(named, search.partition, search.offset)
    choice = LetterChoice(store, None, {})
    with open_stores(choice, output) as stores:
        letters = [letter for desk in stores for letter in letters_of(desk, found)]
    searched = store_text(choice)
    if output.json:
        output.print_object(json_object(found, letters, searched))
    elif not output.quiet:
        print_timeline(found, letters, searched)
    return NOT_DONE if found.state in ("removed", "unknown") else 0


def letters_of(desk: Desk, found: MessageTrace) -> list[Letter]:
    """Return the dead letters of the message in one store, one for each group in which its handling failed."""
    from tfmq.dead_letters.model import Selection, letter_id

    if found.offset is None:
        return []
    if found.appended_ms >= 0:  # then the ids of the letters are known
        place = found.incarnation, found.partition, found.offset, found.appended_ms
        groups = sorted({group for group, _ in desk.counts()})
        letters = (desk.get(letter_id(group, *place)) for group in groups)
        return [letter for letter in letters if letter is not None]
    stored = islice(desk.letters(Selection(topic=found.topic, partition=found.partition)), LETTERS_SEARCHED)
    return [each for each in stored if each.offset == found.offset and each.incarnation == found.incarnation]


def report_not_found(output: Output, topic: str, key: str, search: KeySearch) -> None:
    what = "all" if search.complete else "the newest"
    more = "" if search.complete else "; --last searches more"
    damaged = f", and {with_noun(search.damaged, 'damaged range')} left out" if search.damaged else ""
    searched = f"{what} {with_noun(search.messages, 'message')} searched{damaged}{more}"
    sentence = f"no message of {topic} has the key {escape_unprintable(key)!r}: {searched}"
    row = {"topic": topic, "key": key, "offset": None, "searched": search.messages, "complete": search.complete}
    output.report({**row, "damaged": search.damaged}, sentence)


# The timeline

Event = tuple[int, str, str]
"""Time in ms since 1970 (-1: unknown), what happened, and details."""


def print_timeline(found: MessageTrace, letters: Sequence[Letter], searched: str) -> None:
    click.echo(title(found))
    events = [*events_of(found), *letter_events(letters, searched), *((-1, "not known", why) for why in found.unknown)]
    print_table(
        ("time", "event", ""),
        [(time_text(ms, exact=True) if ms >= 0 else "", event, escape_unprintable(text)) for ms, event, text in events],
        header=False,
    )


def title(found: MessageTrace) -> str:
    if found.offset is None:
        place = f" of {found.topic}-{found.partition}" if found.topic else ""
        return f"delayed message{place}: {found.state}"
    words = [f"{found.topic}-{found.partition}", f"offset {found.offset}"]
    words += [f"ordinal {found.ordinal}"] if found.ordinal is not None else []
    words += [size_text(found.payload_bytes)] if found.payload_bytes is not None and found.payload_bytes >= 0 else []
    words += ["tombstone"] if found.payload_bytes == -1 else []
    return ", ".join(words) + (": removed" if found.state == "removed" else "")


def events_of(found: MessageTrace) -> Iterator[Event]:
    yield from birth(found)
    if found.source == "transaction":
        yield transaction_event(found)
    yield from delay_events(found)
    if found.appended_ms >= 0:
        yield found.appended_ms, "delivered" if found.source == "delay" else "appended", append_text(found)
        yield -1, "synced" if found.durable else "written", durability(found)
    for each in found.groups or ():
        yield -1, f"group {each.group}", group_text(each)
    if found.attempts or found.redrives:
        calls = f"its handling had failed {with_noun(found.attempts, 'time')} before"
        yield -1, "attempts", f"{calls}; sent again as a dead letter {with_noun(found.redrives, 'time')}"
    if found.state in ("stored", "removed") and found.groups == ():
        yield -1, "groups", "no group reads the topic"


def append_text(found: MessageTrace) -> str:
    words = {"transaction": ["by the commit of its transaction"], "schedule": ["by its schedule"]}.get(found.source, [])
    delay = found.delay
    if delay is not None and delay.late_ms >= 0:
        late = f"{duration(delay.late_ms)} late" if delay.late_ms else "on time"
        words.append(late if delay.due_is_exact else f"at least {late}")
    if found.appended_ms >= found.born_ms >= 0:
        words.append(f"{duration(found.appended_ms - found.born_ms)} after it was born")
    return ", ".join(words)


def birth(found: MessageTrace) -> Iterator[Event]:
    words = []
    if found.message_id is not None:
        words.append(f"producer {found.producer_id}, sequence {found.sequence}, id {format_id(found.message_id)}")
    owner = found.transaction.owner if found.transaction is not None else ""
    words += [f"client {owner}"] if owner else []
    key = found.key.decode(errors="backslashreplace") if isinstance(found.key, bytes) else found.key
    words += [f"key {key}"] if key is not None else []
    words += [f"tag {found.tag}"] if found.tag else []
    for name, label in (("schedule", "schedule"), ("scheduled_for", "for"), (TRACE_PARENT, "trace")):
        if name in found.properties and (found.source == "schedule" or name == TRACE_PARENT):
            words.append(f"{label} {found.properties[name]}")
    if words or found.born_ms >= 0:
        yield found.born_ms, "born", ", ".join(words)


def transaction_event(found: MessageTrace) -> Event:
    known = found.transaction
    if known is None or known.state == "unknown":
        return -1, "transaction", f"committed, at LSN {found.commit_lsn} of the transaction journal"
    local = known.details.get("local")
    name = known.xid or (f"commit group {known.commit_group}" if known.commit_group else "no xid")
    words = [f"{name}{', a local one' if local else ''}", f"epoch {known.epoch}" if known.epoch else "", known.state]
    return int(known.details.get("decided_ms") or -1), "transaction", ", ".join(filter(None, words))


def delay_events(found: MessageTrace) -> Iterator[Event]:
    delay = found.delay
    if delay is None:
        return
    handle = f"handle {delay.handle}" if delay.handle else ""
    before = "" if delay.due_is_exact else "or before: the last one of those delivered together was due then"
    if delay.due_ms >= 0:
        yield delay.due_ms, "due", ", ".join(filter(None, (before, handle)))
    if delay.state != "delivered":
        yield -1, delay.state, handle if delay.due_ms < 0 else ""
    elif found.appended_ms < 0:
        late = f"{duration(delay.late_ms)} late" if delay.late_ms >= 0 else ""
        yield delay.delivered_ms, "delivered", late


def durability(found: MessageTrace) -> str:
    if found.durable:
        return f"the durable offset of the partition is {found.durable_offset:,}, and the message ends before"
    return (
        f"not synced: the durable offset of the partition is {found.durable_offset:,}, so a power failure may lose the"
        " message"
    )


def group_text(each: GroupProgress) -> str:
    if each.state == "passed":
        return f"has passed it: its offset is {each.offset:,}"
    if each.state == "none":
        return "reads the topic, and has committed nothing in this partition"
    if each.state == "in_doubt":
        return "a prepared transaction has its offset: tfmq tx list"
    count = "" if each.behind is None else f", {with_noun(each.behind, 'message')} behind"
    return f"has not passed it{count}: its offset is {each.offset:,}"


def letter_events(letters: Sequence[Letter], searched: str) -> Iterator[Event]:
    if not letters:
        yield -1, "dead letter", f"none in {searched}"
    for each in letters:
        last = f", the last failed with {each.error}" if each.error else ""
        calls = f"{with_noun(each.calls, 'call')}{last}"
        yield each.kept_ms, f"dead letter {each.id}", f"{each.state} in group {each.group}: {calls}"
        if each.journey is not None:
            offset = f" at offset {each.sent_offset:,}" if each.sent_offset >= 0 else ""
            yield -1, "sent again", f"to {each.journey.topic}-{each.journey.partition}{offset}"


def duration(ms: int) -> str:
    return f"{ms} ms" if ms < 1_000 else age_text(ms / 1_000)


# JSON


def json_object(found: MessageTrace, letters: Sequence[Letter], searched: str) -> dict[str, Any]:
    """Return the trace as one JSON object: times as ISO 8601 in UTC, and null for what is unknown."""
    row = found._asdict()
    for name in ("born", "appended"):
        row[f"{name}_at"] = iso_text(row.pop(f"{name}_ms"))
    if found.message_id is not None:
        row["message_id"] = format_id(found.message_id)
    for name in ("durable_offset", "first_offset", "end_offset"):
        row[name] = None if row[name] < 0 else row[name]
    row |= {"topic": found.topic or None, "partition": None if found.partition < 0 else found.partition}
    row |= {"producer_id": found.producer_id, "sequence": found.sequence, "properties": dict(found.properties)}
    row["tombstone"] = found.payload_bytes == -1
    row["payload_bytes"] = max(0, found.payload_bytes) if found.payload_bytes is not None else None
    known, delay = found.transaction, found.delay
    if known is not None:
        row["transaction"] = {
            "xid": known.xid or None,
            "epoch": known.epoch or None,
            "state": "committed" if known.state == "unknown" else known.state,
            "owner": known.owner or None,
            "commit_group": known.commit_group or None,
            "committed_at": iso_text(int(known.details.get("decided_ms") or -1)),
        }
    if delay is not None:
        row["delay"] = {
            "state": delay.state,
            "handle": delay.handle or None,
            "due_at": iso_text(delay.due_ms),
            "due_is_exact": delay.due_is_exact,
            "delivered_at": iso_text(delay.delivered_ms),
            "late_ms": None if delay.late_ms < 0 else delay.late_ms,
        }
    row["groups"] = None if found.groups is None else [each._asdict() for each in found.groups]
    row["dead_letters"] = [json_row(each) for each in letters]
    row["dead_letters_searched"] = searched
    return row
