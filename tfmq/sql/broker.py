"""What tfmq.sql asks of a producer, of either face, beside what it has for everybody."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy.engine import URL

from tfmq.client.administration import Administration
from tfmq.errors import NotAllowed
from tfmq.sql.database import group_name

_named: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Producers that had no group, and the one of a database that they got here."""


def join_group(producer: Any, url: URL) -> None:
    """Let a producer without a group belong to the one of this database: it is asked about their transactions.

    Raises `NotAllowed` for a second database: the broker would ask producers that cannot look into the right one.
    """
    core, name = producer._core, group_name(url)
    if core.group is None:
        core.group = _named[producer] = name
    elif _named.get(producer, name) != name:
        raise NotAllowed(
            "A producer without a group of its own shares transactions with one database only: use one for each, or"
            " give it a group, Producer(group=...), whose members all use the same databases."
        )


def node_of(producer: Any) -> str:
    """The id of the broker that it speaks with, or spoke with last; "" before it did."""
    hello = producer._core.link.hello
    return "" if hello is None else str(hello.node)


def is_closed(producer: Any) -> bool:
    """Whether nothing can be asked of it any more."""
    return bool(producer._core.closed)


def describe(producer: Any, xid: str) -> Any:
    """The broker's `TransactionDescription` of `xid`, of state "unknown" where it knows none; or something to await.

    Not by `resume`: that would take the transaction up, and this one is somebody else's.
    """
    core = producer._core
    return producer._driver.run(Administration(core.link, core.options.timeout).transaction(xid, 0))
