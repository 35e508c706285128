"""`tfmq delay`: list, show, cancel, reschedule and count delayed messages."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from tfmq.cli import main
from tfmq.cli.delay_view import (
    BARE,
    COLUMNS,
    TIME_MAX,
    broker_now,
    check_handle,
    count_between,
    detail_row,
    due_fields,
    json_row,
    print_histogram,
    relative_time,
    round_edges,
    sensible_edges,
    table_row,
    with_topic_hint,
)
from tfmq.cli.delay_view import complete_handles as offered
from tfmq.cli.option_types import Delay, Duration, Moment
from tfmq.cli.output import (
    PAGE_ROWS,
    ROWS_SHOWN,
    Output,
    escape_unprintable,
    iso_text,
    iterate_pages,
    output_options,
    rows_option,
    time_text,
    with_noun,
)
from tfmq.client.send.delivery_time import due_number as checked_due
from tfmq.errors import BadRequest, ConnectionFailed, TfmqError
from tfmq.limits import DELAYED_HISTOGRAM_EDGES

if TYPE_CHECKING:
    from tfmq import aio
    from tfmq.admin import Admin

ChangeDelayed = Callable[["aio.Admin", str], Awaitable[dict[str, Any]]]

CONCURRENT_CHANGES = 200
"""Number of changes that are requested at the same time, so that they share fsyncs of the broker."""
SENTENCES_MAX = 20
"""If a command gets more handles than this, it prints a sentence only for each message that it could not change."""
EXTRA_EDGES = 4
"""Number of edges of a query beyond one for each range: 0, TIME_MAX, and a round time before and after all ranges."""

DELIVERED_BEFORE = "it was delivered already"
UNKNOWN_HANDLE = "the broker knows no message of this handle: see docs/delay.md, “The handle” (tfmq --docs)"


@click.group(epilog="\b\nExample:\n  tfmq send reminders hello --delay 30m && tfmq delay list")
def delay() -> None:
    """Delayed messages: list, show, cancel, reschedule, histogram."""


def message_options(command: Callable[..., Any]) -> Callable[..., Any]:
    to = click.option("--to", "end", type=Moment(), help="Only messages that are due before this time.")
    start = click.option(
        "--from",
        "first",
        type=Moment(),
        help="Only messages that are due from this time on, such as +1h. Without a zone: local time.",
    )
    topic = click.option("--topic", shell_complete=main.complete_topics, help="Only messages for this topic.")
    return topic(start(to(command)))


@delay.command(
    "list",
    epilog="\b\nExamples:\n  tfmq delay list\n  tfmq delay list --topic reminders --key 42\n"
    "  tfmq delay list --from +1h --to 2027-01-01T09:00+01:00\n"
    "  tfmq delay list --json | jq -r .[].handle",
)
@message_options
@click.option("--partition", type=click.IntRange(min=0), help="Only messages for this partition of the topic.")
@click.option("-k", "--key", help="Only messages with this key.")
@click.option("--after", metavar="HANDLE", help="List from the message after this one.")
@rows_option
@output_options
def list_command(
    topic: str | None,
    first: datetime | None,
    end: datetime | None,
    partition: int | None,
    key: str | None,
    after: str | None,
    count: int | None,
    output: Output,
) -> None:
    """List the delayed messages, in the order in which they will be delivered."""
    if partition is not None and topic is None:
        raise click.UsageError("--partition needs --topic")
    check_range(first, end)
    with output.admin() as admin, with_topic_hint(admin, topic):
        find = partial(admin.delayed, topic, partition=partition, key=key, first=first, end=end, limit=PAGE_ROWS)
        start = None if after is None else check_handle(after)
        found = iterate_pages(lambda last: find(after=last), start, "handle")
        if output.json:
            output.print_array(json_row(each) for each in islice(found, count))
            return
        most = count or ROWS_SHOWN
        rows = list(islice(found, most + 1))
        now_ms = broker_now(admin)
    if not rows:
        where = "" if topic is None else f" for {escape_unprintable(topic)}"
        is_filtered = any(each is not None for each in (first, end, partition, key, after))
        output.info(f"no delayed messages{where}{' match the options' if is_filtered else ''}")
    else:
        output.print_rows([table_row(each, now_ms) for each in rows[:most]], COLUMNS, "", BARE)
    if len(rows) > most:
        output.info(f"there are more: the same with --after {rows[most - 1].handle}; how many: tfmq delay histogram")


def check_range(first: datetime | None, end: datetime | None) -> None:
    if first is not None and end is not None and end <= first:
        raise click.UsageError("--to should be later than --from")


@delay.command(epilog="\b\nExample:\n  tfmq delay show dci2fm6e2xtppaaaaaaaakaaaaaaaaam2us3lumaaaaaaaaaaaauz45wyh4")
@click.argument("handle", shell_complete=offered)
@output_options
def show(handle: str, output: Output) -> int:
    """Show the state of a delayed message, its due time, and its partition."""
    with output.admin() as admin:
        found = admin.describe_delayed(check_handle(handle))
        now_ms = broker_now(admin)
    output.print_object(json_row(found) if output.json else detail_row(found, now_ms))
    if found.state == "unknown":
        output.info(UNKNOWN_HANDLE)
        return 1
    return 0


@delay.command(
    short_help="Cancel delayed messages.",
    epilog="\b\nExamples:\n  tfmq delay cancel dci2fm6e2xtppaaaaaaaakaaaaaaaaam2us3lumaaaaaaaaaaaauz45wyh4\n"
    "  tfmq delay list --topic reminders --json | jq -r .[].handle | xargs tfmq delay cancel",
)
@click.argument("handles", metavar="HANDLE...", nargs=-1, required=True, shell_complete=offered)
@output_options
def cancel(handles: tuple[str, ...], output: Output) -> int:
    """Cancel delayed messages: messages that are reported as cancelled will never be delivered.

    The exit code is 1 if any of the messages was delivered before, or is unknown.
    """

    async def take_back(admin: "aio.Admin", handle: str) -> dict[str, Any]:
        return {"handle": handle, "state": await admin.cancel(handle)}

    return asyncio.run(change_all(output, check_handles(handles), take_back, "cancelled"))


@delay.command(
    short_help="Change the due time of delayed messages.",
    epilog="\b\nExamples:\n"
    "  tfmq delay reschedule dci2fm6e2xtppaaaaaaaakaaaaaaaaam2us3lumaaaaaaaaaaaauz45wyh4 --delay 1h\n"
    "  tfmq delay reschedule HANDLE --at 2027-01-01T09:00+01:00",
)
@click.argument("handles", metavar="HANDLE...", nargs=-1, required=True, shell_complete=offered)
@click.option("--delay", "seconds", type=Delay(), help="Deliver after this time from now, as in 30s, 5m, 2h, 7d.")
@click.option("--at", type=Moment(), help="Deliver at this time, as in 2027-01-01T09:00+01:00; without a zone: local.")
@output_options
def reschedule(handles: tuple[str, ...], seconds: float | None, at: datetime | None, output: Output) -> int:
    """Change the due time of delayed messages. Each message gets a new handle, which is printed.

    The exit code is 1 if any of the messages was delivered or cancelled before, or is unknown.
    """
    if (seconds is None) == (at is None):
        raise click.UsageError("give either --delay or --at")

    async def move(admin: "aio.Admin", handle: str) -> dict[str, Any]:
        done = await admin.reschedule(handle, seconds, deliver_at=at)
        return {"handle": done.handle, "state": done.state, "before": handle, **due_fields(done.handle)}

    given = check_handles(handles)
    checked_due(seconds, at)
    return asyncio.run(change_all(output, given, move, "rescheduled"))


def check_handles(handles: Sequence[str]) -> list[str]:
    try:  # before any change is made
        return [check_handle(handle) for handle in handles]
    except BadRequest as error:
        raise (error if len(handles) == 1 else BadRequest(f"{error} The others were not changed.")) from None


async def change_all(output: Output, handles: Sequence[str], change: ChangeDelayed, wanted: str) -> int:
    """Call `change` for all handles, until the connection fails. Return 0 if all got the state `wanted`, else 1."""
    from tfmq import aio

    rows: list[dict[str, Any]] = []
    failed, lost = False, None
    async with aio.Admin(output.existing) as admin:
        for start in range(0, len(handles), CONCURRENT_CHANGES):
            some = handles[start : start + CONCURRENT_CHANGES]
            results = await asyncio.gather(*(change(admin, each) for each in some), return_exceptions=True)
            for handle, result in zip(some, results, strict=True):
                if isinstance(result, dict):
                    rows.append(result)
                    report_change(output, handle, result, len(handles) > SENTENCES_MAX and result["state"] == wanted)
                elif isinstance(result, ConnectionFailed):
                    lost = result
                elif isinstance(result, TfmqError):
                    failed = True
                    click.echo(f"tfmq: {handle}: {result}", err=True)
                else:
                    raise result
            if lost is not None:
                break
    if output.json:
        output.print_array(rows)
    elif len(handles) > 1:
        sums = Counter(row["state"] for row in rows)
        output.info(", ".join(f"{count:,} {state}" for state, count in sums.most_common()) or "nothing was changed")
    if lost is not None:
        raise lost
    return int(failed or any(row["state"] != wanted for row in rows))


def report_change(output: Output, handle: str, row: dict[str, Any], briefly: bool = False) -> None:
    state = row["state"]
    if state == "rescheduled" and not output.json:
        click.echo(row["handle"])  # on standard output, for programs
    if briefly:
        return
    if state == "rescheduled":
        output.info(f"{handle}: due at {time_text(row['due_ms'])}, under the new handle above")
        return
    why = {"delivered": f": {DELIVERED_BEFORE}", "unknown": f": {UNKNOWN_HANDLE}"}.get(state, "")
    output.info(f"{handle}: {state}{why}")


@delay.command(
    short_help="Count delayed messages by due time.",
    epilog="\b\nExamples:\n  tfmq delay histogram\n  tfmq delay histogram --topic reminders --to +1h --every 5m\n"
    "  tfmq delay histogram --json | jq .pending",
)
@message_options
@click.option("--every", type=Duration(), help="Ranges of this length, as in 5m [chosen to fit the messages].")
@output_options
def histogram(
    topic: str | None, first: datetime | None, end: datetime | None, every: float | None, output: Output
) -> None:
    """Count the delayed messages by due time, and print a bar for each range."""
    check_range(first, end)
    if every is not None and every <= 0:
        raise click.UsageError("--every should be more than nothing, as in 5m")
    with output.admin() as admin, with_topic_hint(admin, topic):
        now_ms = broker_now(admin)
        edges = edges_for(admin, topic, now_ms, first, end, every)
        counts, pending = count_between(admin, topic, sorted({0, *edges, TIME_MAX}))
    before, inside = split_counts(counts, edges)
    later = pending - before - sum(inside)
    if output.json:
        ranges = [
            {"first_ms": low, "end_ms": high, "first": iso_text(low), "end": iso_text(high), "count": count}
            for low, high, count in zip(edges, edges[1:], inside, strict=False)
        ]
        output.print_object({"pending": pending, "before": before, "behind": later, "ranges": ranges})
    elif not edges:
        output.info("no delayed messages" + (" in this time" if first or end else ""))
    else:
        if not output.quiet:
            print_histogram(edges, inside, now_ms)
        print_summary(output, before, inside, later, edges, now_ms)


def split_counts(counts: Sequence[int], edges: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Return how many messages are due before the first edge, and how many between each edge and the next."""
    if not edges:
        return sum(counts), ()
    first = int(edges[0] > 0)  # `counts` begins with a range from 0 to the first edge, unless the first edge is 0
    return sum(counts[:first]), counts[first : first + len(edges) - 1]


def edges_for(
    admin: "Admin", topic: str | None, now_ms: int, first: datetime | None, end: datetime | None, every: float | None
) -> list[int]:
    """Return the edges (ms since 1970) of the ranges in which messages are counted; [] if there are no messages.
    `every`: the length of a range in seconds; None: `sensible_edges` selects the lengths."""
    low = 0 if first is None else milliseconds(first)
    high = TIME_MAX if end is None else milliseconds(end)

    def ask(edges: Sequence[int]) -> Sequence[int]:
        return count_between(admin, topic, edges)[0]

    found = sensible_edges(ask, now_ms, low, high)
    if every is None or not found:
        return found
    step = max(1, round(every * 1_000))
    low, high = (low or found[0]), (found[-1] if end is None else high)
    if (high - low) // step > DELAYED_HISTOGRAM_EDGES - 2 * EXTRA_EDGES:
        raise click.UsageError(
            f"from {time_text(low)} to {time_text(high)} that would be more than {DELAYED_HISTOGRAM_EDGES:,} ranges:"
            " say longer ones, or --from and --to"
        )
    return round_edges(low, high, step, low if first else 0, high if end else TIME_MAX)


def milliseconds(time: datetime) -> int:
    return max(0, round(time.timestamp() * 1_000))


def print_summary(
    output: Output, before: int, inside: Sequence[int], later: int, edges: Sequence[int], now_ms: int
) -> None:
    last = f"{time_text(edges[-1])} ({relative_time(edges[-1] - now_ms)})"
    output.info(f"{with_noun(sum(inside), 'message')} in these ranges; end of the last: {last}")
    if before:
        output.info(f"{with_noun(before, 'message')} earlier")
    if later:
        output.info(f"{with_noun(later, 'message')} later")
