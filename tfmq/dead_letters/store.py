"""Where dead letters are kept, as users write it: PATH, a SQLAlchemy URL, or "topic:NAME"."""

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
    """`kind`: "path", "url" or "topic" · `value`: the path, the URL, the topic's name."""

    kind: str
    value: str

    def __str__(self) -> str:
        """As it may be shown and logged: a URL without its password."""
        if self.kind == "topic":
            return f"{TOPIC_PREFIX}{self.value}"
        return shown_url(self.value) if self.kind == "url" else self.value


def parse_address(where: str | os.PathLike[str]) -> Address:
    """What `where` names. Raises `BadRequest` for what names no store."""
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
    """Where programs of this user keep what is theirs: $XDG_STATE_HOME, else ~/.local/state."""
    told = os.environ.get("XDG_STATE_HOME")
    return (Path(told) if told else Path.home() / ".local" / "state") / "tfmq"


OWN_STORE: Final = "~/.local/state/tfmq/NODE/GROUP.db"
"""What a consumer's `dead_letters` says unless it is told: `own_path` of its group and its broker."""


def default_path(group: str, folder: Path | None = None, broker: str = "") -> str:
    """The store of a group of `broker` that was told of none: ~/.local/state/tfmq/NODE/GROUP.db, or one in `folder`;
    without a broker the one that earlier releases used for all brokers, ~/.local/state/tfmq/GROUP.db."""
    return str((folder or state_folder()) / broker / f"{group}{SUFFIX}")


def own_path(group: str, broker: str) -> str:
    """`default_path`; a store that an earlier release made is used further, as long as there is no newer one."""
    found, earlier = default_path(group, broker=broker), default_path(group)
    return earlier if os.path.isfile(earlier) and not os.path.exists(found) else found


def broker_name(node: str) -> str:
    """A broker's id as it stands in letters and paths: as it is, or, where a broker calls itself something that is no
    name of a folder, its hash."""
    if _NODE.fullmatch(node):
        return node
    return hashlib.sha256(node.encode(errors="replace")).hexdigest()[:32]


# The dead letters of one group, as its consumers use them: `tfmq.client.worker.dead_letter_store.DeadLetters` over a
# shelf.

log = logging.getLogger("tfmq.dead_letters")

LEASE_SECONDS: Final = 60.0
"""So long nobody else handles what a killed consumer had taken; one at work renews it three times as often."""
TAKES_MAX: Final = 100
"""So many are looked at in one `take`: others took them first, or their calls were used up."""


OTHERS_SECONDS: Final = 60.0
"""How often is looked for letters that wait and do not say that they are this broker's."""
UNKNOWN_SECONDS: Final = 0.25
"""Between two looks whether the broker was reached: until then nobody knows which letters are its own."""


def in_ms(now_ms: int, seconds: float) -> int:
    """The time in so many seconds, in ms since 1970; none that a calendar or a database has not."""
    return min(BORN_MS_MAX, now_ms + max(1, round(min(seconds * 1000, BORN_MS_MAX))))


class GroupDeadLetters:
    """See the protocol. `calls_max`: how often a handler is called with one message before it is dead; `token` names
    this consumer; `jitter` gives numbers from 0 to 1. `broker`: the id of the broker whose messages are handled, None
    while it was not reached yet; letters of others are not taken. `stands_here`: whether the broker has the message of
    a letter that does not say of which broker it is; None: that cannot be told now.
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
        """One that is put off has all the calls left that did not fail."""
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
        id = self._letter_of(message).id
        yield from self.shelf.apply([(id, model.Pass(self._now_ms()))])

    def take(self) -> Operation[Due | None]:
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
        """Letters that wait and do not name `broker`. Those that name none, as an earlier release kept
        them, are its own if it has their messages; the others are left to the consumers of theirs."""
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
                "%d dead letters in %s did not say of which broker they are, and have their messages at this one"
                " (%s): its consumers handle them.",
                adopted,
                self.address,
                broker,
            )
        if not self._left.issuperset(each.id for each in left):
            log.warning(
                "%d waiting dead letters in %s are not handled here: they are of the broker %s, and this one is %s."
                " tfmq dlq retry --force has them handled here.",
                len(left),
                self.address,
                ", ".join(sorted({broker_name(each.broker) or "of an unknown id" for each in left})),
                broker,
            )
        self._left = frozenset(each.id for each in left)

    def seconds_until_due(self) -> Operation[float | None]:
        broker = self._broker()
        if broker is None:
            return UNKNOWN_SECONDS
        due_ms = yield from self.shelf.next_due_ms(self._group, broker)
        return None if due_ms is None else max(0.0, (due_ms - self._now_ms()) / 1000)

    def renew(self, due: Due) -> Operation[bool]:
        now_ms = self._now_ms()
        renewal = model.Renew(now_ms, due.token, now_ms + round(self.lease_seconds * 1000))
        return bool((yield from self._settle(due, renewal)))

    def handled(self, due: Due) -> Operation[bool]:
        return bool((yield from self._settle(due, model.Handled(self._now_ms(), due.token))))

    def failed(self, due: Due, failure: Failure, *, rejected: bool = False) -> Operation[str]:
        now_ms = self._now_ms()
        next_ms = 0 if rejected else now_ms + wait_ms(due.calls, self._jitter())
        return (yield from self._settle(due, model.Failed(now_ms, due.token, failure, next_ms)))

    def put_off(self, due: Due, seconds: float, reason: str = "") -> Operation[str]:
        now_ms = self._now_ms()
        failure = Failure(now_ms, f"RetryLater: {reason or f'after {seconds:g} s'}")
        event = model.PutOff(now_ms, due.token, failure, in_ms(now_ms, seconds))
        return (yield from self._settle(due, event))

    def give_back(self, due: Due) -> Operation[bool]:
        return bool((yield from self._settle(due, model.GiveBack(self._now_ms(), due.token))))

    def tidy(self) -> Operation[None]:
        """Before the broker is reached it is not known which store that is: it is done when it is."""
        self._untidy = self._broker() is None
        if self._untidy:
            return
        while (yield from self.shelf.prune(self._now_ms())):
            pass

    def close(self) -> None:
        self.shelf.close()

    def _settle(self, due: Due, event: model.Event) -> Operation[str]:
        """The state behind `event`; "" where the letter is another's by now."""
        (found,) = yield from self.shelf.apply([(due.id, event)])
        if found is None:
            log.warning("%s is in other hands: the lease was over.", due.id)
            return ""
        self._tell(found)
        return found.state

    def _tell(self, letter: Letter) -> None:
        """In the log, without the error's words: they may hold what the message holds."""
        if letter.state == DEAD:
            kind = letter.error.partition(":")[0]
            log.warning("%s is dead letter %s (%s) in %s", letter.origin, letter.id, kind, self.address)

    def _letter_of(self, message: ReceivedMessage[Any]) -> Letter:
        return letter_of(message, self._group, self._broker() or "")

    def _now_ms(self) -> int:
        return round(self._wall_clock() * 1000)


# Where letters lie: what the two stores, a database and a topic, have in common. Operations, as a driver runs them.

Step = tuple[str, Event]
"""A letter's id, and what happens to it."""


class Shelf(Protocol):
    """All verbs raise `StoreFailed`. Letters come without their bodies unless `whole` asks for them."""

    @property
    def name(self) -> str:
        """As a person writes it, without a password."""
        ...

    def apply(self, steps: Sequence[Step]) -> Operation[list[Letter | None]]:
        """Each event happens to its letter, as `course` says, and is committed when this ends. The letter behind it, or
        None where it did nothing."""
        ...

    def find(
        self, selection: Selection, after: Page = START, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> Operation[list[Letter]]:
        """At most `count` letters in the order in which they were first kept, from behind `after` on; [] where there
        is none. Whole ones are as many as memory has room for (see `fitting`); one whose body is gone for good comes
        without it."""
        ...

    def due(self, group: str, now_ms: int, broker: str = "") -> Operation[str | None]:
        """The id of the one of `broker` that should have been handled longest ago; None: none is due."""
        ...

    def next_due_ms(self, group: str, broker: str = "") -> Operation[int | None]:
        """When the next one of `broker` is due, in ms since 1970; None: nothing waits."""
        ...

    def waiting_for_others(self, group: str, broker: str, after: Page = START) -> Operation[list[Letter]]:
        """Letters of the group that wait, and do not say that they are of `broker`: at most a page, as `find`."""
        ...

    def get(self, id: str) -> Operation[Letter | None]:
        """The whole letter, with its body and all tracebacks."""
        ...

    def counts(self) -> Operation[dict[tuple[str, str], int]]:
        """How many letters there are: (group, state) -> number."""
        ...

    def prune(self, now_ms: int) -> Operation[int]:
        """Forget some of what ended long ago, where it takes room; how many, 0: all are gone."""
        ...

    def close(self) -> None: ...


# How long a kept message waits before it is handled again behind a failure. Pure.

FIRST_MS: Final = 1_000
"""The quick retries were made before it was kept: what failed then needs longer."""
MAX_MS: Final = 3_600_000
"""A person who mended the cause does not wait longer than an hour; `tfmq dlq retry` does not wait at all."""
DOUBLINGS_MAX: Final = 20
JITTER: Final = 0.2
"""Up to so much of a wait is added, so that what failed together does not come back together."""


def wait_ms(calls: int, chance: float) -> int:
    """The wait behind the `calls`-th call: doubled each time; `chance` is from 0 to 1."""
    wait = min(MAX_MS, FIRST_MS << min(DOUBLINGS_MAX, max(0, calls - 1)))
    return round(wait * (1 + JITTER * chance))
