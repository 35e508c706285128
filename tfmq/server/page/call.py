"""One call of the JSON API: what its view gets, and the names that its user may see."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from tfmq.client.admin.admin import AdminCore
from tfmq.client.connection.connection import PendingRequest
from tfmq.client.connection.requests import wait_for_reply
from tfmq.client.operation import Operation
from tfmq.errors import TfmqError
from tfmq.protocol import commands
from tfmq.server.local_connection import LocalConnection
from tfmq.server.page.arguments import Arguments

REQUEST_SECONDS: Final = 20.0
"""Timeout of one request of a view."""

Row = TypeVar("Row")


class Source(NamedTuple):
    """What a call reads without a command, because a command for it would cost too much at each refresh of the page.

    `topics`, `groups`: return the names of all, in any order. A page of a long list asks only about the names on it; a
    command that lists all takes milliseconds for each thousand. `counters`: returns numbers that only grow, for rates.
    `dead_letters`: returns group -> dead letters that its members have reported since the start.
    """

    topics: Callable[[], Iterable[str]]
    groups: Callable[[], Iterable[str]]
    counters: Callable[[], dict[str, int]]
    dead_letters: Callable[[], Mapping[str, int]]


class Call:
    """One call: its arguments, the connection with the rights of its user, and the operations of `Admin` over it."""

    def __init__(self, link: LocalConnection, arguments: Arguments, source: Source, now_ms: Callable[[], int]) -> None:
        self.link, self.arguments, self.source = link, arguments, source
        self.admin = AdminCore(link, REQUEST_SECONDS)
        self.now_ms = now_ms

    def visible_topics(self) -> Iterator[str]:
        """Yield the names of all topics that the user may see."""
        return self._visible(self.source.topics(), commands.DescribeTopic)

    def visible_groups(self) -> Iterator[str]:
        return self._visible(self.source.groups(), commands.DescribeGroup)

    def _visible(self, names: Iterable[str], describe: Callable[[str], Any]) -> Iterator[str]:
        if self.link.may(commands.Status()):  # with that right all can be seen, and nothing has to be asked for each
            return iter(names)
        return (name for name in names if self.link.may(describe(name)))

    def request(self, message: Any) -> Operation[Any]:
        """Execute one command and return its reply."""
        pending = self.link.send_request(message, seconds=REQUEST_SECONDS)
        yield from wait_for_reply(self.link, pending)
        return pending.result()

    def request_each(self, messages: Iterable[Any]) -> Operation[list[Any | TfmqError]]:
        """Execute commands at the same time, and return for each its reply or error, in the same order."""
        pending = [self.link.send_request(each, seconds=REQUEST_SECONDS) for each in messages]
        yield from wait_for_reply(self.link, *pending)
        return [_outcome(each) for each in pending]


def _outcome(pending: PendingRequest) -> Any | TfmqError:
    try:
        return pending.result()
    except TfmqError as error:
        return error


View = Callable[[Call], Operation[dict[str, Any]]]


def page_of_names(names: Iterable[str], after: str, contains: str, limit: int) -> tuple[list[str], bool]:
    """Return the first `limit` names after `after` that have `contains` in them, sorted, and whether more follow."""
    found = heapq.nsmallest(limit + 1, _matching(names, after, contains.casefold()))
    return found[:limit], len(found) > limit


def _matching(names: Iterable[str], after: str, contains: str) -> Iterator[str]:
    return (name for name in names if name > after and (not contains or contains in name.casefold()))
