"""Dead-letter store of a consumer group, the interface of its backends, and store addresses.

`GroupDeadLetterStore` implements what a consumer needs, over a `LetterStore`: a database or a topic. An
address is PATH, a SQLAlchemy URL, or "topic:NAME".
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from tfmq import limits
from tfmq.client.consumer.message import Codec, ReceivedMessage
from tfmq.client.operation import Operation
from tfmq.client.worker.dead_letter_store import Due, Failure
from tfmq.codecs import codec_of
from tfmq.dead_letters import model
from tfmq.dead_letters.model import (
    DEAD,
    PAGE_LETTERS,
    RETRYING,
    START,
    Event,
    Letter,
    Page,
    Selection,
    letter_of,
)
from tfmq.errors import BadRequest
from tfmq.message import BORN_MS_MAX
from tfmq.offsets.storage import shown_url

_NODE: Final = re.compile(r"[0-9A-Za-z_-]{0,64}")
TOPIC_PREFIX: Final = "topic:"
SUFFIX: Final = ".db"
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\+[A-Za-z0-9_]+)?://")


class Address(NamedTuple):
    """Parsed store address. `kind`: "path", "url" or "topic" · `value`: path, URL or topic name."""

    kind: str
    value: str

    def __str__(self) -> str:
        """Return the address for messages and logs: a URL without its password."""
        if self.kind == "topic":
            return f"{TOPIC_PREFIX}{self.value}"
        return shown_url(self.value) if self.kind == "url" else self.value


def parse_address(where: str | os.PathLike[str]) -> Address:
    """Parse a store address. Raises BadRequest for an invalid one."""
    if isinstance(where, os.PathLike):
        return Address("path", os.fspath(where))
    if not isinstance(where, str) or not where:
        raise BadRequest(f"dead_letters={where!r} names no store: {ALLOWED}.")
    if where.startswith(TOPIC_PREFIX):
        name = where.removeprefix(TOPIC_PREFIX)
        if not limits.valid_name(name):
            raise BadRequest(f"{name!r} is not a topic's name: 1 to 249 of A-Z a-z 0-9 . _ -")
        return Address("topic", name)
    if _URL.match(where):
        return Address("url", where)
    return Address("path", where)


ALLOWED: Final = "it takes a path, a SQLAlchemy URL (sqlite:///..., postgresql+psycopg://...) or topic:NAME"


def state_folder() -> Path:
    """Return tfmq's directory for this user's state, in $XDG_STATE_HOME or ~/.local/state."""
    told = os.environ.get("XDG_STATE_HOME")
    return (Path(told) if told else Path.home() / ".local" / "state") / "tfmq"


OWN_STORE: Final = "~/.local/state/tfmq/NODE/GROUP.db"
"""Default of a consumer's `dead_letters`: the path that `existing_or_default_path` returns."""


def default_path(group: str, folder: Path | None = None, broker: str = "") -> str:
    """Return the path of a group's default store: ~/.local/state/tfmq/BROKER/GROUP.db.

    `folder` replaces ~/.local/state/tfmq. Without `broker` the path is that of earlier releases, which was
    for all brokers: ~/.local/state/tfmq/GROUP.db.
    """
    return str((folder or state_folder()) / broker / f"{group}{SUFFIX}")


def own_path(group: str, broker: str) -> str:
    """Return the default store, or that of an earlier release if only that one exists."""
    found, earlier = default_path(group, broker=broker), default_path(group)
    return earlier if os.path.isfile(earlier) and not os.path.exists(found) else found


def broker_name(node: str) -> str:
    """Return a broker's id for letters and paths; a hash of it if it is no valid file name."""
    if _NODE.fullmatch(node):
        return node
    return hashlib.sha256(node.encode(errors="replace")).hexdigest()[:32]


log = logging.getLogger("tfmq.dead_letters")

LEASE_SECONDS: Final = 60.0
"""Duration of a lease, after which the letters of a killed consumer are available again.

A consumer at work renews the lease three times as often.
"""
TAKES_MAX: Final = 100
"""Maximum letters tried for one lease; other consumers may lease them at the same time."""


OTHERS_SECONDS: Final = 60.0
"""Interval of the check for waiting letters that are not marked as this broker's."""
UNKNOWN_SECONDS: Final = 0.25
"""Interval of the check whether the broker is reached.

Until then the own letters are unknown.
"""


def in_ms(now_ms: int, seconds: float) -> int:
    """Return the time after `seconds`, in ms since 1970, limited to what can be stored."""
    return min(BORN_MS_MAX, now_ms + max(1, round(min(seconds * 1000, BORN_MS_MAX))))


class GroupDeadLetters:
    """Dead-letter store of one group, as its consumers use it; see `DeadLetterStore`.

    `calls_max`: number of handler calls per message before it is dead · `token`: identifies this consumer ·
    `jitter` returns random numbers from 0 to 1 · `broker` returns the id of the broker whose messages are
    handled, None while that is not reached yet; letters of other brokers are not leased · `has_message`
    returns whether the broker has the message of a letter without a broker id; None: unknown at the moment.
    """

    lease_seconds = LEASE_SECONDS

    def __init__(
        self,
        shelf: Shelf,
        group: str,
        calls_max: int,
        *,
        wall_clock: Callable[[], float],
        codec: Codec | Mapping[str, Codec] | None = None,
        jitter: Callable[[], float] = random.random,
        token: str = "",
        broker: Callable[[], str | None] = lambda: "",
        stands_here: Callable[[Letter], Operation[bool | None]] | None = None,
    ) -> None:
        self.shelf = shelf
        self._group = group
        self._calls_max = calls_max
        self._wall_clock = wall_clock
        self._codec = codec
        self._jitter = jitter
        self._token = token or uuid.uuid4().hex
        self._broker = broker
        self._stands_here = stands_here
        self._others_ms: int | None = None
        self._untidy = False
        self._left: frozenset[str] = frozenset()

    @property
    def address(self) -> str:
        """Name of the store for messages and logs, without a password."""
        return self.shelf.name

    def keep(
        self,
        message: ReceivedMessage[Any],
        failures: Sequence[Failure],
        *,
        calls: int | None = None,
        begun: bool = False,
        retry_after: float | None = None,
    ) -> Operation[str]:
        """Store `message` as dead, or to be handled later; see `DeadLetterStore`.

        A postponed one keeps all calls that did not fail.
        """
        count = len(failures) - begun if calls is None else calls
        now_ms = self._now_ms()
        left = 0 if retry_after is None else max(1, self._calls_max - max(0, count - 1))
        letter = replace(self._letter_of(message), calls=count, calls_left=left).with_failures(failures)
        next_ms = 0 if retry_after is None else in_ms(now_ms, retry_after)
        step = (letter.id, model.Keep(now_ms, letter, next_ms, begun))
        (kept,) = yield from self.shelf.apply([step])
        assert kept is not None, "every state can be kept"
        self._tell(kept)
        return kept.state

    def begin(self, message: ReceivedMessage[Any]) -> Operation[str]:
        """Count a handler call before it starts; see `DeadLetterStore`."""
        letter = replace(self._letter_of(message), calls_left=self._calls_max)
        return (yield from self._in_lane(letter.id, model.Begin(self._now_ms(), letter)))

    def note(
        self,
        message: ReceivedMessage[Any],
        failure: Failure,
        *,
        begun: bool = False,
        noted: Callable[[str], object] = lambda state: None,
    ) -> Operation[str]:
        letter = replace(self._letter_of(message), calls_left=self._calls_max).with_failures([failure])
        return (yield from self._in_lane(letter.id, model.Note(self._now_ms(), letter, begun), noted))

    def _in_lane(
        self, id: str, event: model.Event, noted: Callable[[str], object] = lambda state: None
    ) -> Operation[str]:
        (found,) = yield from self.shelf.apply([(id, event)])
        assert found is not None, "every state can be noted"
        noted(found.state)
        self._tell(found)
        return found.state

    def passed(self, message: ReceivedMessage[Any]) -> Operation[None]:
        """Record that a message with recorded failures was handled."""
        id = self._letter_of(message).id
        yield from self.shelf.apply([(id, model.Pass(self._now_ms()))])

    def take(self) -> Operation[Due | None]:
        """Lease the letter that is due longest and return it, or None."""
        broker = self._broker()
        if broker is None:
            return None
        if self._untidy:
            yield from self.tidy()
        yield from self._look_at_others(broker)
        for _ in range(TAKES_MAX):
            now_ms = self._now_ms()
            id = yield from self.shelf.due(self._group, now_ms, broker)
            if id is None:
                return None
            token = f"{self._token}{uuid.uuid4().hex[:8]}"
            take = model.Take(now_ms, token, now_ms + round(self.lease_seconds * 1000))
            (taken,) = yield from self.shelf.apply([(id, take)])
            if taken is None or taken.state != RETRYING:
                continue
            whole = yield from self.shelf.get(id)
            if whole is not None and whole.token == token:
                return Due(
                    id, whole.message(codec_of(self._codec, whole.topic)), taken.calls, taken.put_offs, token
                )
        return None

    def _look_at_others(self, broker: str) -> Operation[None]:
        """Check waiting letters that are not marked as `broker`'s, at most once per interval.

        Letters without a broker id, as earlier releases stored them, are marked as the broker's if it has
        their messages. All others are left to the consumers of their brokers, with a log line.
        """
        now_ms = self._now_ms()
        if self._others_ms is not None and abs(now_ms - self._others_ms) < OTHERS_SECONDS * 1000:
            return
        self._others_ms = now_ms
        adopted, left, page = 0, [], START
        while others := (yield from self.shelf.waiting_for_others(self._group, broker, page)):
            page = Page(others[-1].kept_ms, others[-1].id)
            own = []
            for each in others:
                found: bool | None = False
                if not each.broker and self._stands_here is not None and each.id not in self._left:
                    found = yield from self._stands_here(each)
                if found:
                    own.append((each.id, model.Adopt(now_ms, broker)))
                elif found is not None:
                    left.append(each)
            adopted += sum(each is not None for each in (yield from self.shelf.apply(own)))
        if adopted:
            log.info(
                "%d dead letters in %s had no broker id, and their messages are at this broker (%s): its"
                " consumers handle them.",
                adopted,
                self.address,
                broker,
            )
        if not self._left.issuperset(each.id for each in left):
            log.warning(
                "%d waiting dead letters in %s are not handled here: they belong to the broker %s, and this one is %s."
                " tfmq dlq retry --force has them handled here.",
                len(left),
                self.address,
                ", ".join(sorted({broker_name(each.broker) or "with an unknown id" for each in left})),
                broker,
            )
        self._left = frozenset(each.id for each in left)

    def seconds_until_due(self) -> Operation[float | None]:
        """Return the time until a letter is due: 0 if one is, None if none waits."""
        broker = self._broker()
        if broker is None:
            return UNKNOWN_SECONDS
        due_ms = yield from self.shelf.next_due_ms(self._group, broker)
        return None if due_ms is None else max(0.0, (due_ms - self._now_ms()) / 1000)

    def renew(self, due: Due) -> Operation[bool]:
        """Extend the lease. Return False if it had expired and another consumer has the letter."""
        now_ms = self._now_ms()
        renewal = model.Renew(now_ms, due.token, now_ms + round(self.lease_seconds * 1000))
        return bool((yield from self._settle(due, renewal)))

    def handled(self, due: Due) -> Operation[bool]:
        """Mark the letter as handled. Return False if the lease had expired."""
        return bool((yield from self._settle(due, model.Handled(self._now_ms(), due.token))))

    def failed(self, due: Due, failure: Failure, *, rejected: bool = False) -> Operation[str]:
        """Record a failed call of a leased letter, and return its state.

        "" if the lease had expired.
        """
        now_ms = self._now_ms()
        next_ms = 0 if rejected else now_ms + wait_ms(due.calls, self._jitter())
        return (yield from self._settle(due, model.Failed(now_ms, due.token, failure, next_ms)))

    def put_off(self, due: Due, seconds: float, reason: str = "") -> Operation[str]:
        """Postpone a leased letter by `seconds`, and return its state; "" if the lease had expired."""
        now_ms = self._now_ms()
        failure = Failure(now_ms, f"RetryLater: {reason or f'after {seconds:g} s'}")
        event = model.PutOff(now_ms, due.token, failure, in_ms(now_ms, seconds))
        return (yield from self._settle(due, event))

    def give_back(self, due: Due) -> Operation[bool]:
        """Release a leased letter without a call. Return False if the lease had expired."""
        return bool((yield from self._settle(due, model.GiveBack(self._now_ms(), due.token))))

    def tidy(self) -> Operation[None]:
        """Delete letters that ended long ago; deferred until the broker is reached.

        The default store is not known before that.
        """
        self._untidy = self._broker() is None
        if self._untidy:
            return
        while (yield from self.shelf.prune(self._now_ms())):
            pass

    def close(self) -> None:
        """Close the store."""
        self.shelf.close()

    def _settle(self, due: Due, event: model.Event) -> Operation[str]:
        """Apply an event to a leased letter and return its state.

        "" if another consumer has it by now.
        """
        (found,) = yield from self.shelf.apply([(due.id, event)])
        if found is None:
            log.warning("%s belongs to another consumer by now: its lease had expired.", due.id)
            return ""
        self._tell(found)
        return found.state

    def _tell(self, letter: Letter) -> None:
        """Log a new dead letter, without the text of the error, which may quote the message."""
        if letter.state == DEAD:
            kind = letter.error.partition(":")[0]
            log.warning("%s is dead letter %s (%s) in %s", letter.origin, letter.id, kind, self.address)

    def _letter_of(self, message: ReceivedMessage[Any]) -> Letter:
        """Return the letter for `message`, without a history."""
        return letter_of(message, self._group, self._broker() or "")

    def _now_ms(self) -> int:
        return round(self._wall_clock() * 1000)


Step = tuple[str, Event]
"""Letter id, and the event to apply to it."""


class Shelf(Protocol):
    """Backend of a dead-letter store: a database or a topic. All methods raise StoreFailed.

    Letters are returned without their bodies unless `whole` is set.
    """

    @property
    def name(self) -> str:
        """Address of the store for messages and logs, without a password."""
        ...

    def apply(self, steps: Sequence[Step]) -> Operation[list[Letter | None]]:
        """Apply each event to its letter, and commit.

        Return the new letters; None where nothing changed. `state_machine.apply_event` defines what an event
        changes.
        """
        ...

    def find(
        self, selection: Selection, after: Page = START, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> Operation[list[Letter]]:
        """Return at most `count` letters after `after`, in the order of their first storing.

        [] at the end. `whole`: with bodies, and only as many as fit in memory (see `fit_page`). A letter
        whose body is lost is returned without it.
        """
        ...

    def due(self, group: str, now_ms: int, broker: str = "") -> Operation[str | None]:
        """Return the id of the letter of `broker` that is due longest, or None."""
        ...

    def next_due_ms(self, group: str, broker: str = "") -> Operation[int | None]:
        """Return when the next letter of `broker` is due, in ms since 1970; None if none waits."""
        ...

    def waiting_for_others(self, group: str, broker: str, after: Page = START) -> Operation[list[Letter]]:
        """Return waiting letters of the group that are not marked as `broker`'s.

        At most a page, as `find`.
        """
        ...

    def get(self, id: str) -> Operation[Letter | None]:
        """Return a letter with its body and all tracebacks, or None."""
        ...

    def counts(self) -> Operation[dict[tuple[str, str], int]]:
        """Return the number of letters by (group, state)."""
        ...

    def prune(self, now_ms: int) -> Operation[int]:
        """Delete some letters that ended long ago. Return how many; 0: none are left."""
        ...

    def close(self) -> None:
        """Close the store."""
        ...


FIRST_MS: Final = 1_000
"""First delay; the quick retries were made before the message was stored."""
MAX_MS: Final = 3_600_000
"""Maximum delay, for a cause that a person has repaired.

`tfmq dlq retry` does not wait at all.
"""
DOUBLINGS_MAX: Final = 20
JITTER: Final = 0.2
"""Maximum random addition to a delay, so that messages which failed together are spread."""


def wait_ms(calls: int, chance: float) -> int:
    """Return the delay after the `calls`-th call: doubled each time; `chance` is from 0 to 1."""
    wait = min(MAX_MS, FIRST_MS << min(DOUBLINGS_MAX, max(0, calls - 1)))
    return round(wait * (1 + JITTER * chance))
