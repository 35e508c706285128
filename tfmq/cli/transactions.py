"""Transactions as the command line knows them: found by the name that a person typed, as rows and in a line."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from tfmq.cli import completion
from tfmq.cli.output import age_text, counted, did_you_mean, printable, size_text, time_text, with_times
from tfmq.errors import UnknownTransaction
from tfmq.limits import XID_BYTES

if TYPE_CHECKING:
    from tfmq.admin import Admin
    from tfmq.client.admin.models import TransactionDescription

COLUMNS = ("xid", "epoch", "state", "age", "size", "messages", "topics", "owner", "group")
PAGE = 1000
NAMES_COMPARED = 10_000
"""For "did you mean": looking through 100,000 names would take longer than typing anew."""


def every(
    admin: "Admin", states: Sequence[str] | None, group: str | None, after: int
) -> "Iterator[TransactionDescription]":
    """All of them, a page at a time."""
    while True:
        page = admin.transactions(states, group=group, after=after, limit=PAGE)
        yield from page
        if len(page) < PAGE:
            return
        after = page[-1].epoch


def row_of(found: "TransactionDescription") -> dict[str, Any]:
    """As programs get it."""
    row = found._asdict()
    row |= row.pop("details") | {"topics": list(found.topics)}
    return with_times(row, *(name.removesuffix("_ms") for name in row if name.endswith("_ms")))


def readable(found: "TransactionDescription") -> dict[str, Any]:
    """As a table shows it."""
    return {
        "xid": printable(found.xid),
        "epoch": str(found.epoch),
        "state": state_of(found),
        "age": age_text(found.age_seconds),
        "size": size_text(found.size_bytes),
        "messages": messages_of(found),
        "topics": list(found.topics),
        "owner": printable(found.owner),
        "group": found.group or found.commit_group or None,
    }


def state_of(found: "TransactionDescription") -> str:
    """The state, and whether damage of the broker's transaction journal holds it up."""
    return f"{found.state}, journal damaged" if found.details.get("damage") else found.state


def messages_of(found: "TransactionDescription") -> int | str:
    """How many, and how many of them damage of the broker's transaction journal took."""
    lost = found.details.get("lost")
    return f"{found.messages:,}, {lost:,} lost" if lost else found.messages


def everything(found: "TransactionDescription") -> dict[str, Any]:
    """All that is known of one, as `show` has it: what says nothing is left out."""
    rows = {
        **readable(found),
        "began": time_text(found.began_ms or None),
        "group": found.group or None,
        "prepared": time_text(found.prepared_ms or None),
        "ends_by_itself": time_text(found.expires_ms or None),
        "commit_group": found.commit_group,
        **{key: printable(each) if isinstance(each, str) else each for key, each in found.details.items()},
    }
    for name in [name for name in rows if name.endswith("_ms")]:
        rows[name.removesuffix("_ms")] = time_text(rows.pop(name) or None)
    if not found.began_ms:
        for name in ("age", "size", "messages"):
            del rows[name]
    return {name: value for name, value in rows.items() if value not in NOTHING or name == "messages"}


NOTHING: tuple[Any, ...] = (None, "", "-", 0, -1, False, [], {}, ())


def described(found: "TransactionDescription") -> str:
    """One transaction in a line."""
    parts = [found.state, f"{age_text(found.age_seconds)} old"]
    parts += [f"by {printable(found.owner)}"] if found.owner else []
    lost = found.details.get("lost", 0)
    parts += [f"{counted(lost, 'message')} of it lost with damage"] * bool(lost)
    parts += [f"of the commit group {found.commit_group}, whose members go together"] * bool(
        found.commit_group
    )
    where = f" for {', '.join(found.topics)}" if found.topics else ""
    return f"{printable(found.xid)} ({', '.join(parts)}, {counted(found.messages, 'message')}{where})"


def known_transaction(admin: "Admin", xid: str, epoch: int | None) -> "TransactionDescription":
    """The transaction. Raises UnknownTransaction that names the nearest one that waits for somebody."""
    size = len(xid.encode())
    if not 1 <= size <= XID_BYTES:
        raise click.UsageError(f"An xid has 1 to {XID_BYTES:d} bytes, not {size}.")
    found = admin.transaction(xid, epoch or 0)
    if found.state != "unknown":
        return found
    latest = admin.transaction(xid).epoch if epoch else 0
    if latest:
        raise UnknownTransaction(
            f"There is no transaction {xid!r} of epoch {epoch}: the latest has {latest}."
        )
    names = [each.xid for each in islice(every(admin, None, None, 0), NAMES_COMPARED)]
    hint = did_you_mean(xid, names) or (" `tfmq tx list` has all." if names else " None waits for anybody.")
    raise UnknownTransaction(f"There is no transaction {xid!r}, and no outcome of one is remembered.{hint}")


xids = completion.offered(lambda admin: (each.xid for each in every(admin, None, None, 0)))
