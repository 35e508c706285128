"""Dead-letter store of a consumer group, the interface of its backends, and store addresses.

`GroupDeadLetterStore` implements what a consumer needs. It stores the letters in a `LetterStore`, which is a database
or a topic. An address is PATH, a SQLAlchemy URL, or "topic:NAME".
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
from tfmq.client.worker.dead_letter_store import Failure, LeasedLetter
from tfmq.codecs import select_codec
from tfmq.databases import url_without_passwords
from tfmq.dead_letters import model
from tfmq.dead_letters.model import FIRST_PAGE, PAGE_LETTERS, Letter, PagePosition, Selection
from tfmq.dead_letters.retry_loop import retry_delay_ms
from tfmq.errors import BadRequest
from tfmq.message import BORN_MS_MAX

_NODE: Final = re.compile(r"[0-9A-Za-z_-]{0,64}")
TOPIC_PREFIX: Final = "topic:"
FILE_SUFFIX: Final = ".db"
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\+[A-Za-z0-9_]+)?://")


class StoreAddress(NamedTuple):
    """Parsed address of a store. `kind`: "path", "url" or "topic". `value`: the path, URL or topic name."""

    kind: str
    value: str

    def __str__(self) -> str:
        """Return the address for messages and logs: a URL without its password."""
        if self.kind == "topic":
            return f"{TOPIC_PREFIX}{self.value}"
        return url_without_passwords(self.value) if self.kind == "url" else self.value


def parse_address(where: str | os.PathLike[str]) -> StoreAddress:
    """Parse a store address. Raises BadRequest for an invalid one."""
    if isinstance(where, os.PathLike):
        return StoreAddress("path", os.fspath(where))
    if not isinstance(where, str) or not where:
        raise BadRequest(f"dead_letters={where!r} names no store: {ADDRESS_FORMS}.")
    if where.startswith(TOPIC_PREFIX):
        name = where.removeprefix(TOPIC_PREFIX)
        if not limits.is_valid_name(name):
            raise BadRequest(f"{name!r} cannot be a topic: {limits.NAME_RULE}.")
        return StoreAddress("topic", name)
    if _URL.match(where):
        return StoreAddress("url", where)
    return StoreAddress("path", where)


ADDRESS_FORMS: Final = "it takes a path, a SQLAlchemy URL (sqlite:///..., postgresql+psycopg://...) or topic:NAME"


def state_directory() -> Path:
    """Return tfmq's directory for this user's state, in $XDG_STATE_HOME or ~/.local/state."""
    configured = os.environ.get("XDG_STATE_HOME")
    return (Path(configured) if configured else Path.home() / ".local" / "state") / "tfmq"


DEFAULT_STORE: Final = "~/.local/state/tfmq/NODE/GROUP.db"
"""Default of a consumer's `dead_letters`. `existing_or_default_path` returns the path; NODE is the broker's id."""


def default_path(group: str, folder: Path | None = None, broker: str = "") -> str:
    """Return the path of a group's default store: ~/.local/state/tfmq/BROKER/GROUP.db.

    `folder` replaces ~/.local/state/tfmq. Without `broker` the result is ~/.local/state/tfmq/GROUP.db, where earlier
    releases stored the letters of all brokers.
    """
    return str((folder or state_directory()) / broker / f"{group}{FILE_SUFFIX}")


def existing_or_default_path(group: str, broker: str) -> str:
    """Return the path of a group's default store, or the path of earlier releases if only that file exists."""
    found, earlier = default_path(group, broker=broker), default_path(group)
    return earlier if os.path.isfile(earlier) and not os.path.exists(found) else found


def broker_id_text(node: str) -> str:
    """Return a broker's id for letters and paths: the id itself, or its hash if the id is no valid file name."""
    if _NODE.fullmatch(node):
        return node
    return hashlib.sha256(node.encode(errors="replace")).hexdigest()[:32]


log = logging.getLogger("tfmq.dead_letters")

LEASE_SECONDS: Final = 60.0
"""Duration of a lease, after which the letters of a killed consumer are available again."""
LEASE_ATTEMPTS_MAX: Final = 100
"""Maximum letters that one `lease_next` tries to lease. An attempt fails if another consumer is faster."""


ADOPTION_CHECK_SECONDS: Final = 60.0
"""Interval of the check for waiting letters that do not record this broker as their broker."""
BROKER_CHECK_SECONDS: Final = 0.25
"""Interval of the check whether the broker was reached. Until then it is unknown which letters are this broker's."""


def time_after_ms(now_ms: int, seconds: float) -> int:
    """Return the time `seconds` after `now_ms`, in ms since 1970, limited to what can be stored."""
    return min(BORN_MS_MAX, now_ms + max(1, round(min(seconds * 1000, BORN_MS_MAX))))


class GroupDeadLetterStore:
    """Dead-letter store of one group for the group's consumers; implements `DeadLetterStore`.

    `calls_max`: handler calls after which a message is dead · `jitter`: returns random numbers from 0 to 1, which vary
    the delay of retries · `broker`: returns the id of the consumer's broker, None until the broker is reached; letters
    of other brokers are not leased · `has_message`: for a letter that records no broker id, returns whether the broker
    has its message; None if that cannot be found out now · `on_dead`: called for each letter that is logged as dead.
    """

    lease_seconds = LEASE_SECONDS

    def __init__(
        self,
        letters: LetterStore,
        group: str,
        calls_max: int,
        *,
        wall_clock: Callable[[], float],
        codec: Codec | Mapping[str, Codec] | None = None,
        jitter: Callable[[], float] = random.random,
        broker: Callable[[], str | None] = lambda: "",
        has_message: Callable[[Letter], Operation[bool | None]] | None = None,
        on_dead: Callable[[], object] = lambda: None,
    ) -> None:
        self.letters = letters
        self._group = group
        self._calls_max = calls_max
        self._wall_clock = wall_clock
        self._codec = codec
        self._jitter = jitter
        self._token = uuid.uuid4().hex  # identifies this consumer
        self._broker = broker
        self._has_message = has_message
        self._on_dead = on_dead
        self._adoption_checked_ms: int | None = None
        self._expiry_pending = False
        self._foreign_ids: frozenset[str] = frozenset()

    @property
    def address(self) -> str:
        """Name of the store for messages and logs, without a password."""
        return self.letters.name

    def store_letter(
        self,
        message: ReceivedMessage[Any],
        failures: Sequence[Failure],
        *,
        calls: int | None = None,
        begun: bool = False,
        retry_after: float | None = None,
    ) -> Operation[str]:
        count = len(failures) - begun if calls is None else calls
        now_ms = self._now_ms()
        left = 0 if retry_after is None else max(1, self._calls_max - max(0, count - 1))
        letter = replace(self._letter_of(message), calls=count, calls_left=left).with_failures(failures)
        next_ms = 0 if retry_after is None else time_after_ms(now_ms, retry_after)
        return (yield from self._apply_always(letter.id, model.KeepEvent(now_ms, letter, next_ms, begun)))

    def count_call(self, message: ReceivedMessage[Any]) -> Operation[str]:
        letter = replace(self._letter_of(message), calls_left=self._calls_max)
        return (yield from self._apply_always(letter.id, model.BeginEvent(self._now_ms(), letter)))

    def record_failure(
        self,
        message: ReceivedMessage[Any],
        failure: Failure,
        *,
        begun: bool = False,
        noted: Callable[[str], object] = lambda state: None,
    ) -> Operation[str]:
        letter = replace(self._letter_of(message), calls_left=self._calls_max).with_failures([failure])
        return (yield from self._apply_always(letter.id, model.NoteEvent(self._now_ms(), letter, begun), noted))

    def _apply_always(
        self, id: str, event: model.Event, on_stored: Callable[[str], object] = lambda state: None
    ) -> Operation[str]:
        (found,) = yield from self.letters.apply([(id, event)])
        assert found is not None, "every state can be noted"
        on_stored(found.state)
        self._log_if_dead(found)
        return found.state

    def failing_offsets(self, message: ReceivedMessage[Any]) -> Operation[frozenset[int]]:
        letter = self._letter_of(message)
        found = yield from self.letters.failing_offsets(self._group, letter.incarnation, letter.partition)
        return frozenset(found)

    def record_success(self, message: ReceivedMessage[Any]) -> Operation[None]:
        id = self._letter_of(message).id
        yield from self.letters.apply([(id, model.PassEvent(self._now_ms()))])

    def lease_next(self) -> Operation[LeasedLetter | None]:
        broker = self._broker()
        if broker is None:
            return None
        if self._expiry_pending:
            yield from self.delete_expired()
        yield from self._adopt_letters(broker)
        for _ in range(LEASE_ATTEMPTS_MAX):
            now_ms = self._now_ms()
            id = yield from self.letters.next_due_id(self._group, now_ms, broker)
            if id is None:
                return None
            token = f"{self._token}{uuid.uuid4().hex[:8]}"
            take = model.TakeEvent(now_ms, token, now_ms + round(self.lease_seconds * 1000))
            (taken,) = yield from self.letters.apply([(id, take)])
            if taken is None or taken.state != model.RETRYING:
                continue
            whole = yield from self.letters.get(id)
            if whole is not None and whole.token == token:
                return LeasedLetter(
                    id, whole.message(select_codec(self._codec, whole.topic)), taken.calls, taken.put_offs, token
                )
        return None

    def _adopt_letters(self, broker: str) -> Operation[None]:
        """Assign waiting letters without a broker id to this broker if it has their messages.

        Such letters were stored by earlier releases. Letters of other brokers are only logged, since the consumers at
        those brokers handle them. Does nothing if the last check was less than ADOPTION_CHECK_SECONDS ago.
        """
        now_ms = self._now_ms()
        if (
            self._adoption_checked_ms is not None
            and abs(now_ms - self._adoption_checked_ms) < ADOPTION_CHECK_SECONDS * 1000
        ):
            return
        self._adoption_checked_ms = now_ms
        adopted, left, page = 0, [], FIRST_PAGE
        while others := (yield from self.letters.find_foreign_waiting(self._group, broker, page)):
            page = PagePosition(others[-1].kept_ms, others[-1].id)
            own = []
            for each in others:
                found: bool | None = False
                if not each.broker and self._has_message is not None and each.id not in self._foreign_ids:
                    found = yield from self._has_message(each)
                if found:
                    own.append((each.id, model.AdoptEvent(now_ms, broker)))
                elif found is not None:
                    left.append(each)
            adopted += sum(each is not None for each in (yield from self.letters.apply(own)))
        if adopted:
            log.info(
                "%d dead letters in %s had no broker id, and their messages are at this broker (%s): its"
                " consumers handle them.",
                adopted,
                self.address,
                broker,
            )
        if not self._foreign_ids.issuperset(each.id for each in left):
            log.warning(
                "%d waiting dead letters in %s are not handled here: they belong to the broker %s, and this one is %s."
                " tfmq dlq retry --force has them handled here.",
                len(left),
                self.address,
                ", ".join(sorted({broker_id_text(each.broker) or "with an unknown id" for each in left})),
                broker,
            )
        self._foreign_ids = frozenset(each.id for each in left)

    def seconds_until_due(self) -> Operation[float | None]:
        """Return seconds until a letter is due; None: no letter waits; BROKER_CHECK_SECONDS: no broker was reached."""
        broker = self._broker()
        if broker is None:
            return BROKER_CHECK_SECONDS
        due_ms = yield from self.letters.next_due_ms(self._group, broker)
        return None if due_ms is None else max(0.0, (due_ms - self._now_ms()) / 1000)

    def renew_lease(self, due: LeasedLetter) -> Operation[bool]:
        now_ms = self._now_ms()
        renewal = model.RenewEvent(now_ms, due.token, now_ms + round(self.lease_seconds * 1000))
        return bool((yield from self._apply_to_leased(due, renewal)))

    def mark_handled(self, due: LeasedLetter) -> Operation[bool]:
        return bool((yield from self._apply_to_leased(due, model.HandledEvent(self._now_ms(), due.token))))

    def mark_failed(self, due: LeasedLetter, failure: Failure, *, rejected: bool = False) -> Operation[str]:
        now_ms = self._now_ms()
        next_ms = 0 if rejected else now_ms + retry_delay_ms(due.calls, self._jitter())
        return (yield from self._apply_to_leased(due, model.FailedEvent(now_ms, due.token, failure, next_ms)))

    def postpone(self, due: LeasedLetter, seconds: float, reason: str = "") -> Operation[str]:
        now_ms = self._now_ms()
        failure = Failure(now_ms, f"RetryLater: {reason or f'after {seconds:g} s'}")
        event = model.PutOffEvent(now_ms, due.token, failure, time_after_ms(now_ms, seconds))
        return (yield from self._apply_to_leased(due, event))

    def release(self, due: LeasedLetter) -> Operation[bool]:
        return bool((yield from self._apply_to_leased(due, model.GiveBackEvent(self._now_ms(), due.token))))

    def delete_expired(self) -> Operation[None]:
        """Delete expired letters; before the broker is reached, let a later `lease_next` do this instead."""
        self._expiry_pending = self._broker() is None
        if self._expiry_pending:
            return
        while (yield from self.letters.delete_expired(self._now_ms())):
            pass

    def close(self) -> None:
        self.letters.close()

    def _apply_to_leased(self, due: LeasedLetter, event: model.Event) -> Operation[str]:
        """Apply `event`; return the letter's state after it, or "" if the lease of `due` has ended."""
        (found,) = yield from self.letters.apply([(due.id, event)])
        if found is None:
            log.warning("%s belongs to another consumer by now: its lease had expired.", due.id)
            return ""
        self._log_if_dead(found)
        return found.state

    def _log_if_dead(self, letter: Letter) -> None:
        """Log a letter that is dead now, without the text of its error, which may quote the message."""
        if letter.state == model.DEAD:
            self._on_dead()
            kind = letter.error.partition(":")[0]
            log.warning("%s is dead letter %s (%s) in %s", letter.origin, letter.id, kind, self.address)

    def _letter_of(self, message: ReceivedMessage[Any]) -> Letter:
        return model.letter_from_message(message, self._group, self._broker() or "")

    def _now_ms(self) -> int:
        return round(self._wall_clock() * 1000)


Step = tuple[str, model.Event]
"""Letter id, and the event to apply to it."""


class LetterStore(Protocol):
    """Backend of a dead-letter store: a database or a topic.

    A method raises StoreFailed if the store fails; a method of a topic also raises the errors of the broker. Letters
    are returned without their bodies, except by `get` and by `find` with `whole`.
    """

    @property
    def name(self) -> str:
        """Address of the store for messages and logs, without a password."""

    def apply(self, steps: Sequence[Step]) -> Operation[list[Letter | None]]:
        """Apply each event to its letter, and commit.

        Return for each event the letter after it, or None if the event has no effect (`state_machine.apply_event`). If
        all are `KeepEvent`s, a store in a topic does not read the topic, and returns each letter as if it were new.
        """

    def find(
        self, selection: Selection, after: PagePosition = FIRST_PAGE, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> Operation[list[Letter]]:
        """Return at most `count` letters that match `selection` and follow `after`, oldest first; [] at the end.

        `whole`: with bodies, and only as many letters as `fit_page` permits, to limit memory. A letter whose body is
        lost is returned without the body.
        """

    def next_due_id(self, group: str, now_ms: int, broker: str = "") -> Operation[str | None]:
        """Return the id of a due letter of this group and broker, or of one whose lease ended; None if none exists."""

    def next_due_ms(self, group: str, broker: str = "") -> Operation[int | None]:
        """Return when (ms) the next letter of this group and broker is due or its lease ends; None: no letter waits."""

    def find_foreign_waiting(
        self, group: str, broker: str, after: PagePosition = FIRST_PAGE
    ) -> Operation[list[Letter]]:
        """Return up to PAGE_LETTERS waiting and leased letters of the group whose recorded broker is not `broker`.

        A store in a topic leaves out letters without a broker id: such letters belong to the broker of that topic.
        """

    def failing_offsets(self, group: str, incarnation: int, partition: int) -> Operation[list[int]]:
        """Return the message offsets of the group's letters in state "failing", in one partition."""

    def get(self, id: str) -> Operation[Letter | None]:
        """Return the letter with this id, with its body and all tracebacks; None if it does not exist."""

    def count_by_state(self) -> Operation[dict[tuple[str, str], int]]:
        """Return (group, state) -> number of letters, without letters that never failed."""

    def delete_expired(self, now_ms: int) -> Operation[int]:
        """Delete up to a page of expired letters; return their number. Call this again until it returns 0."""

    def close(self) -> None:
        """Close the store."""
