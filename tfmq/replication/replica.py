"""A server's part in the replication: it finds out what it is, follows the primary, and becomes primary.

start -> (no primary has ever begun)  -> claim, begin, BASE -> primary
      -> (its own term is the newest) -> claim, seal, begin, BASE unless it was closed cleanly -> primary
      -> else                         -> materialize -> standby -> (lease over, or hand-over) -> claim, seal,
                                         apply what counts, begin -> primary
primary -> deposed: the process starts again
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, Protocol

from journal.clock import Clock
from journal.disk import Disk, File, Lock, read_file
from journal.filenames import join
from tfmq.data_dir import META_NAME, VERSION_NAME, decode_version
from tfmq.errors import NotAllowed
from tfmq.replication.chain import read_chain, read_entries
from tfmq.replication.entries import (
    IDENTITY_KEY,
    EntryKind,
    Fence,
    HandOver,
    Identity,
    Position,
    Term,
    decode_entry,
    entry_key,
    handover_key,
)
from tfmq.replication.entry_writer import EntryWriter
from tfmq.replication.errors import (
    Deposed,
    InvalidObject,
    NewerObject,
    NoReplica,
    ReplicationError,
    SnapshotLost,
    SnapshotTooSlow,
    StoreRefused,
    StoreUnavailable,
)
from tfmq.replication.follower import Follower, Poll
from tfmq.replication.liveness import StandbyLease
from tfmq.replication.local_state import DEPOSED, STATE_NAME, LocalState, LocalStateFile, Role
from tfmq.replication.materialize import Materialized, apply_entry, find_start, is_incomplete, materialize
from tfmq.replication.operations import LOCAL_FOLDER, OperationApplier, is_replicated
from tfmq.replication.primary import Primary, Settings, read_handover
from tfmq.replication.recording_disk import RecordingDisk
from tfmq.replication.store import Store
from tfmq.replication.task import CallLater, Pause, Run, Steps, Task, Wait
from tfmq.replication.terms import (
    Begun,
    Sealed,
    begin,
    claim,
    has_only_begun,
    newest_begun,
    newest_term,
    next_begun,
    run_steps,
    seal,
)
from tfmq.replication.terms import Steps as StoreSteps

logger = logging.getLogger("tfmq.replication")

FIRST_PAUSE_SECONDS: Final = 0.05
PAUSE_SECONDS_MAX: Final = 2.0
"""First and longest pause before a call of the store that failed is repeated."""
OLD_COPY_HEARTBEATS: Final = 10
"""The state of a primary is written at each heartbeat. An older one is that of an older folder."""
HAND_OVER_SECONDS: Final = 60.0
"""A request for a hand-over that its primary finds later than this is void."""
HAND_OVER_ATTEMPTS: Final = 3
FENCE_PAUSE_SECONDS: Final = 0.05
"""Pause between two looks for the term after one that has ended."""
STOP_PAUSE_SECONDS: Final = 0.005
RETRY_SECONDS: Final = 5.0
"""Pause before a standby that could not go on begins again."""
DAMAGE_SECONDS_MAX: Final = 300.0
"""The longest such pause, after several that damage in the store has made necessary."""


class Host(Protocol):
    """The server around a `Replica`. All methods are called in the owner's thread."""

    def following(self) -> None:
        """The server is a standby from here on. Called once at most before `promoted`."""

    def promoted(self, primary: Primary) -> None:
        """Start the broker on `primary.disk`, then call `Primary.start`."""

    def stalled(self, reason: str) -> None:
        """Refuse requests for this reason; with "", accept them again."""

    def hand_over(self) -> None:
        """Stop the broker cleanly, then call `Replica.seal_own_term`."""

    def deposed(self, error: Deposed) -> None:
        """End the process, or let it start again: another server is primary."""

    def failed(self, error: BaseException) -> None:
        """End the process: the server can neither follow nor serve."""


class Replica:
    """One server of those that share a store. All methods are called in the owner's thread.

    `folder` must exist, and its lock must be held. `address`: where clients reach this server. `run` executes calls of
    the store and file work in workers; `executor` is for chunks.
    """

    def __init__(
        self,
        store: Store,
        disk: Disk,
        folder: str,
        address: str,
        settings: Settings,
        host: Host,
        run: Run,
        executor: Executor,
        clock: Clock,
        call_later: CallLater,
        random_bytes: Callable[[int], bytes],
        pause: Callable[[float], None],
        jitter: Callable[[], float],
        wake: Callable[[], None],
        lock: Lock,
        create: Callable[[Disk, str], None],
    ) -> None:
        """`jitter` returns a random number from 0 to 1. `wake` is called in any thread when operations were cut.
        `create(disk, node)` makes the data folder of a new broker, with its version file."""
        self._store, self._disk, self._folder, self._address = store, disk, folder, address
        self._settings, self._host, self._run, self._executor = settings, host, run, executor
        self._clock, self._call_later, self._random_bytes, self._pause = clock, call_later, random_bytes, pause
        self._jitter, self._wake, self._lock, self._create = jitter, wake, lock, create
        self._state_file = LocalStateFile(disk, folder)
        self._state = LocalState("")
        self._task: Task | None = None
        self._follower: Follower | None = None
        self._lease: StandbyLease | None = None
        self._since_ms = clock.wall_ms()
        """When `role` changed last, ms since 1970."""
        self._folder_version = 0
        self._materialized_count = 0
        """Entries after the snapshot from which this server made its folder."""
        self._successor = ""
        self._primary_member = ""
        self._anchor: File | None = None
        """Of the file system of the data folder; opened before the first write as primary."""
        self._note: Wait | None = None
        """What waits until the position of a primary is noted in its state; None if that is not under way."""
        self._damage_count = 0
        """How often this standby has met damage since it had applied the newest entry."""
        self._newest_claim = 0
        """The highest term that this standby has seen claimed and waited for."""
        self.primary: Primary | None = None
        self.trouble = ""
        """Why the server does not go on; "" if it does."""
        self.role = "starting"
        self.primary_address = ""
        """Where clients reach the primary, as far as it is known."""

    def start(self) -> None:
        """Find out what this server is, and go on with that. Call `check_identity` before."""
        self._task = Task(self._live(), self._run, self._call_later, self._host.failed)
        self._task.start()

    def stop(self, done: Callable[[], None]) -> None:
        """Stop following, or if this server is primary and its broker is closed, end its term; then call `done()`."""
        task = Task(self._stop(done), self._run, self._call_later, self._host.failed)
        task.start()

    def check_identity(self) -> None:
        """Compare the store with the data folder, in this thread. Raises InvalidObject, StoreRefused,
        StoreUnavailable, OSError."""
        self._state = self._state_file.read(self._random_bytes)
        stored = self._store.get(IDENTITY_KEY)
        if stored is None:
            return
        local, node = read_node(self._disk, self._folder), self._decode_identity(stored).node
        if local not in (None, node):
            raise InvalidObject(
                f"{self._store.name} has the replica of another broker (node {node}), and"
                f" {self._folder} is the data folder of node {local}: use another prefix, or an empty data folder"
            )

    def _decode_identity(self, data: bytes) -> Identity:
        try:
            return Identity.decode(data)
        except NewerObject:
            raise
        except InvalidObject as error:
            raise InvalidObject(
                f"the object {error} in {self._store.name}: restore it from a back-up, or use an empty prefix, where"
                " the primary then stores its folder"
            ) from error

    def status(self, mode: str) -> dict[str, Any]:
        """Return the map `replication` of the reply to STATUS; docs/protocol.md describes its keys."""
        position, stored, behind_bytes, behind_seconds = self._state.position, 0, 0, 0.0
        trouble = self.trouble
        if self.primary is not None:
            writer = self.primary.writer
            position, stored = writer.position, writer.stored_slot
            behind_bytes = self.primary.unstored_bytes
            behind_seconds = self._clock.monotonic() - writer.stored_at if behind_bytes else 0.0
            trouble = writer.trouble or self.primary.trouble
        elif self._follower is not None:
            position = self._follower.position
            stored = position.slot
            behind_seconds = self._follower.behind_seconds
            trouble = trouble or self._follower.trouble
        return {
            "role": self.role,
            "mode": mode,
            "term": position.term if position is not None else 0,
            "slot": position.slot if position is not None else 0,
            "stored_slot": stored,
            "behind_seconds": behind_seconds,
            "behind_bytes": behind_bytes,
            "since_ms": self._since_ms,
            "store": self._store.name,
            "primary": self.primary_address,
            "trouble": trouble,
        }

    @property
    def folder_version(self) -> int | None:
        """A number that changes when a standby makes its folder from the store again; None while it does not follow."""
        return None if self._follower is None else self._folder_version

    def request_hand_over(self, done: Callable[[BaseException | None], None]) -> None:
        """Ask the primary to hand over to this standby. `done(error)` is called when the request is stored; with
        NotAllowed if another standby has asked in this term, or if this one is far behind.

        The request is void after HAND_OVER_SECONDS: `done` gets StoreUnavailable if the store took longer.
        """
        began, member = self._clock.monotonic(), self._state.member
        heard_ms = self._clock.wall_ms()
        if self._follower is not None:
            behind = self._follower.behind_seconds
            if behind > HAND_OVER_SECONDS / 2:
                done(NotAllowed(f"This standby is {behind:.0f} s behind: repeat this when it is not."))
                return
            heard_ms = self._follower.time_ms or heard_ms
        until_ms = heard_ms + round((HAND_OVER_SECONDS + 2 * self._settings.heartbeat_seconds) * 1000)

        def check_time() -> None:
            if self._clock.monotonic() - began > HAND_OVER_SECONDS:
                raise StoreUnavailable(
                    f"{self._store.name} did not answer within {HAND_OVER_SECONDS:g} s: the request is void, repeat it"
                )

        def request() -> None:
            begun = run_steps(newest_begun(), self._store, lambda: None)
            if begun is None:
                raise NoReplica("no primary has begun yet")
            if begun.term.member == member:
                raise NotAllowed("This server is about to serve as primary: it needs no hand-over.")
            number = begun.term.number
            key, data = handover_key(number), HandOver(member, until_ms).encode()
            for _ in range(HAND_OVER_ATTEMPTS):
                check_time()
                if self._store.put_new(key, data):
                    break
                first = read_handover(self._store, number)
                if first is not None and first.member != member:
                    raise NotAllowed(
                        f"Member {first.member} has asked for the hand-over of term {number} before: wait until another"
                        " term has begun, or a minute, then repeat this."
                    )
                if first is not None:  # an earlier request of this standby
                    if first.until_ms - heard_ms > HAND_OVER_SECONDS * 1000 / 2:
                        return
                    self._store.delete(key)
            else:
                raise StoreUnavailable("another server has become primary just now")
            try:
                check_time()
            except StoreUnavailable:
                if self._store.get(key) == data:  # and not one of another standby, after the primary has removed this
                    self._store.delete(key)
                raise

        self._run(request, lambda _, error: done(error))

    # The life of a server

    def _live(self) -> Steps:
        position = yield from self._find_place()
        while self.primary is None:
            try:
                if position is None:
                    found: Materialized | None = yield from self._materialize()
                    if found is None:
                        return
                    position, time_ms = found.position, found.time_ms
                else:
                    time_ms = self._state.time_ms
                position = yield from self._follow(position, time_ms)
                self.trouble = ""
            except (ReplicationError, OSError) as error:
                if isinstance(error, OSError) or self.primary is not None:
                    raise
                if str(error) != self.trouble:
                    logger.error("this standby cannot go on, and tries again: %s", error)
                self.trouble = str(error)
                position = None
                pause = RETRY_SECONDS
                if isinstance(error, InvalidObject):
                    # The whole folder is compared again each time, and damage lasts.
                    pause = min(DAMAGE_SECONDS_MAX, RETRY_SECONDS * 2 ** min(self._damage_count, 10))
                    self._damage_count += 1
                yield Pause(pause)

    def _find_place(self) -> Steps:
        """Become primary if this server was the last primary, or if there was none yet.

        Return the position to follow from, or None.
        """
        begun = yield from self._on_store(newest_begun())
        state = self._state
        if begun is None:
            newest = yield from self._on_store(newest_term())
            if newest is None and not self._hindrance() and (yield from self._begin_first_term(known=0)):
                return None
        elif (
            state.role == "primary"
            and state.position is not None
            and (begun.term.number, begun.term.member) == (state.position.term, state.member)
            and (yield from self._resume_own_term(state))
        ):
            return None
        if state.is_clean and not is_incomplete(self._disk, self._folder) and (yield from self._is_in_store(state)):
            return state.position
        return None

    def _is_in_store(self, state: LocalState) -> Steps:
        """Return whether the last entry of the folder is there, so that all after it are. It is not if it was swept, or
        if this is another store than before: that has other entries at the same positions."""
        if state.position is None:
            return False
        data = yield from self._repeated(partial(self._store.get, entry_key(state.position)))
        if data is None:
            return False
        # In slot 0 the time of the entry before is noted.
        is_known = state.time_ms and state.position.slot
        try:
            return not is_known or decode_entry(data, state.position).time_ms == state.time_ms
        except InvalidObject:
            return False

    def _hindrance(self) -> str:
        """Return why this server must not be the first primary of a store, whose folder the others take; "" if it may.
        Its folder may be older than that of the primary before, or a part of one; and a store that is empty where it
        was not may be another one: a file system that is not mounted."""
        if is_incomplete(self._disk, self._folder):
            return f"{self._store.name} has no replica, and {self._folder} is incomplete: start the primary first"
        was_standby = self._state.role == "standby" or (
            # It was one, and ran as a broker without replication since.
            self._state.role == "" and self._state.position is not None and self._state.store == self._store.name
        )
        if was_standby:
            return (
                f"{self._store.name} has no replica, and this server was a standby: start the primary first, or, if its"
                f" folder is lost, remove {join(self._folder, LOCAL_FOLDER)}/{STATE_NAME} of this server and start it"
                " again"
            )
        if self._state.role == "primary" and self._state.store == self._store.name:
            return (
                f"{self._store.name} has no replica, and this server has stored one there: restore the store, such as"
                " by mounting its file system; if it is lost, and no other server has become primary since, remove"
                f" {join(self._folder, LOCAL_FOLDER)}/{STATE_NAME} of this server and start it again"
            )
        return ""

    def _begin_first_term(self, known: int) -> Steps:
        """Become primary with the local folder, as no server has served yet. Return whether that is so. `known`: the
        highest term that was claimed."""
        node = read_node(self._disk, self._folder) or self._random_bytes(16).hex()
        identity = Identity(node)
        if not (yield from self._repeated(partial(self._store.put_new, IDENTITY_KEY, identity.encode()))):
            stored = yield from self._repeated(partial(self._store.get, IDENTITY_KEY))
            identity = Identity.decode(stored)
            if read_node(self._disk, self._folder) not in (None, identity.node):
                raise InvalidObject(f"{self._store.name} has become the replica of another broker just now")
        nonce = self._random_bytes(8).hex()
        term = yield from self._on_store(claim(self._state.member, self._address, nonce, known))
        if term is None:
            return False
        try:
            sealed = yield from self._on_store(seal(term, self._clock.wall_ms()))
            if sealed.parent is not None and not (yield from self._has_only_begun()):
                return False
            yield partial(self._create, self._disk, identity.node)
            yield from self._serve(term, sealed, needs_base=True)
        except Deposed as error:
            logger.info("another server is the first primary: %s", error)
            return False
        return True

    def _has_only_begun(self) -> Steps:
        """Return whether terms have begun and ended, and no server has ever served."""
        begun = yield from self._on_store(newest_begun())
        return begun is not None and (yield from self._on_store(has_only_begun(begun)))

    def _resume_own_term(self, state: LocalState) -> Steps:
        """Go on as primary with the local folder, which may have more than the store. Return whether that is so."""
        term = yield from self._on_store(claim(state.member, self._address, self._random_bytes(8).hex()))
        if term is None:
            return False
        try:
            sealed = yield from self._on_store(seal(term, self._clock.wall_ms(), state.position))
            assert state.position is not None
            if sealed.parent is None or sealed.parent.term != state.position.term:
                return False  # another one has begun and ended meanwhile
            if not state.is_clean and (yield from self._is_old_copy(state, sealed.parent)):
                return False
            # In another store that had this server before, the same position may be that of an older folder.
            is_stored = state.is_clean and sealed.parent == state.position and state.store == self._store.name
            yield from self._serve(term, sealed, needs_base=not is_stored)
        except Deposed as error:
            logger.info("another server has become primary meanwhile: %s", error)
            return False
        return True

    def _is_old_copy(self, state: LocalState, newest: Position) -> Steps:
        """Return whether the folder is older than what this server has stored, as a back-up that was copied back is."""
        data = yield from self._repeated(partial(self._store.get, entry_key(newest)))
        if data is None:
            return False
        behind_ms = decode_entry(data, newest).time_ms - state.time_ms
        if behind_ms <= 1000 * OLD_COPY_HEARTBEATS * self._settings.heartbeat_seconds:
            return False
        logger.warning(
            "the data folder is %.0f s older than what its server has stored: it is made from the store again",
            behind_ms / 1000,
        )
        return True

    def _serve(self, term: Term, sealed: Sealed, *, needs_base: bool, time_ms: int = 0, entry_count: int = 0) -> Steps:
        """Begin the term, and be primary. `time_ms`: the time of the last entry that was applied, if it is known.
        `entry_count`: as for `Primary`."""
        now_ms = max(self._clock.wall_ms(), time_ms)
        began = self._clock.monotonic()
        yield from self._on_store(begin(term, sealed, now_ms))
        # From here on, STATUS has the new term. The address that is known is that of the primary before.
        self.primary_address = ""
        yield from self._write_state("primary", Position(term.number, 0), is_clean=False, time_ms=now_ms)
        self._anchor = self._disk.open_anchor(self._folder)
        disk = RecordingDisk(self._disk, self._folder, wake=self._wake, held=self._lock)
        writer = EntryWriter(
            self._store,
            disk,
            self._run,
            self._clock,
            self._call_later,
            next_position=Position(term.number, 1),
            time_ms=max(sealed.time_ms, now_ms),
            stored_at=began,
            heartbeat_seconds=self._settings.heartbeat_seconds,
            deposed=self._deposed,
        )
        primary = Primary(
            self._store, disk, writer, self._settings, self._run, self._executor, self._clock, self._call_later,
            self._random_bytes, self._pause, stalled=self._host.stalled, handed_over=self._handed_over,
            entry_count=entry_count,
        )  # fmt: skip
        writer.start()
        while needs_base:
            try:
                yield from primary.store_base()
                needs_base = False
            except (StoreUnavailable, StoreRefused, SnapshotLost, SnapshotTooSlow) as error:
                self.trouble = str(error)
                logger.error("the snapshot of the data folder could not be stored, and is tried again: %s", error)
                yield Pause(RETRY_SECONDS)
        self.primary, self.role, self.primary_address = primary, "primary", self._address
        self._since_ms = self._clock.wall_ms()
        self._note_position()
        logger.info("this server is primary, term %d of %s", term.number, self._store.name)
        self._host.promoted(primary)

    def _note_position(self) -> None:
        """Write the last entry that is stored into the state, now and then: a restart reads only those after it."""
        primary = self.primary
        if primary is None or primary.is_ended:
            return

        def noted(_: Any, error: BaseException | None) -> None:
            self._note = None
            note.wake()
            if error is not None:
                logger.warning("the state of this replica could not be written: %s", error)
            self._call_later(self._settings.heartbeat_seconds, self._note_position)

        position = primary.writer.position
        if position == self._state.position:
            self._call_later(self._settings.heartbeat_seconds, self._note_position)
        else:
            self._state = self._state._replace(position=position, time_ms=primary.writer.stored_time_ms)
            note = self._note = Wait()
            self._run(partial(self._state_file.write, self._state), noted)

    def _deposed(self, error: Deposed) -> None:
        if self._task is not None:
            self._task.cancel()
        if self.primary is not None:
            self.primary.end()
        self._host.deposed(error)

    # A standby

    def _materialize(self) -> Steps:
        """Make the folder equal to the newest entry. Return what was found; None if this server is primary now."""
        self._folder_version += 1
        self._become_standby()
        was_primary = self._state.role != "standby"
        aside = None
        if was_primary and has_replicated(self._disk, self._folder):
            term = self._state.position.term if self._state.position is not None else 0
            # Inside of the folder, which may be a file system of its own.
            aside = free_name(self._disk, join(self._folder, f"{LOCAL_FOLDER}/{DEPOSED}{term}"))

        def record(found: Materialized) -> None:
            self._state = LocalState(
                self._state.member, "standby", found.position, is_clean=True, store=self._store.name
            )
            self._state_file.write(self._state)

        def work() -> Materialized:
            start = find_start(self._store)
            return materialize(self._store, self._disk, self._folder, self._executor, start, aside=aside, record=record)

        while True:
            try:
                found = yield work
                break
            except NoReplica as error:
                hindrance = self._hindrance()
                if hindrance and hindrance != self.trouble:
                    logger.error("this server waits: %s", hindrance)
                self.trouble = hindrance or str(error)
                yield Pause(PAUSE_SECONDS_MAX)
                if hindrance:
                    continue
                newest = yield from self._on_store(newest_term())
                # The server that was to store the first snapshot may be gone. It has not served yet.
                is_free = (yield from self._on_store(newest_begun())) is None or (yield from self._has_only_begun())
                if is_free and (yield from self._begin_first_term(0 if newest is None else newest.number)):
                    return None
        self.trouble = found.damage
        self._materialized_count = found.entry_count
        if found.moved:
            logger.warning("%d files that no primary has continued from were moved to %s", found.moved, aside)
        return found

    def _follow(self, position: Position, time_ms: int) -> Steps:
        """Follow from `position`. Return None when this server is primary, or when it has to materialize again."""
        self._become_standby()
        yield from self._write_state("standby", position, is_clean=False)
        events: list[Any] = []
        event = Wait()

        def add(what: Any) -> None:
            events.append(what)
            event.wake()

        self._lease = StandbyLease(self._settings.lease_seconds, self._draw_jitter(), self._clock.monotonic())
        follower = self._follower = Follower(
            self._store, self._disk, self._folder, self._run, self._clock, self._call_later,
            position=position,
            time_ms=time_ms,
            polled=lambda poll: self._polled(poll, add),
            ended=lambda at, fence: add((at, fence)),
            rebased=add,
            failed=add,
        )  # fmt: skip
        yield from self._learn_primary()
        follower.start()
        try:
            while True:
                while not events:
                    event = Wait()
                    yield event
                what = events.pop(0)
                if isinstance(what, BaseException):
                    raise what
                if what is CLAIM:
                    if (yield from self._try_promotion(follower)):
                        return None
                elif isinstance(what, Position) or not (yield from self._pass_fence(follower, *what)):
                    self._follower = None  # from here on, its position says nothing of the folder
                    yield from self._end_follower(follower)
                    return None
        finally:
            self._follower = None
            follower.stop(lambda: None)

    def _end_follower(self, follower: Follower) -> Steps:
        """Wait for the work in progress, and close the files durably."""
        idle = Wait()
        follower.stop(idle.wake)
        yield idle
        yield follower.close

    def _polled(self, poll: Poll, add: Callable[[Any], None]) -> None:
        assert self._lease is not None
        if poll.found:
            self._lease.entry_found(poll.answered)
        else:
            self._damage_count = 0
            self._lease.nothing_found(poll.asked, poll.answered)
            if self._lease.may_claim(poll.answered):
                self._lease.restart(poll.answered, self._draw_jitter())
                add(CLAIM)

    def _draw_jitter(self) -> float:
        return self._settings.heartbeat_seconds * self._jitter()

    def _try_promotion(self, follower: Follower) -> Steps:
        """Claim the next term and become primary. Return False if another server was faster: this one follows on."""
        assert self._lease is not None
        idle = Wait()
        follower.pause()
        follower.when_idle(idle.wake)
        yield idle
        position = follower.position
        try:
            newest = yield from self._on_store(newest_term())
            is_other = newest is not None and newest.member != self._state.member
            if newest is not None and is_other and newest.number > max(self._newest_claim, position.term):
                # It gets the time of a lease to begin its term.
                self._newest_claim = newest.number
                raise Deposed(f"member {newest.member} has claimed term {newest.number}")
            if (yield from self._repeated(partial(self._store.get, entry_key(position)))) is None:
                # A claim would end the term of a primary that may be well.
                raise InvalidObject(f"{entry_key(position)}, which this server has applied, was swept")
            logger.info("claiming the next term, because term %d has ended or shows no sign of life", position.term)
            term = yield from self._on_store(claim(self._state.member, self._address, self._random_bytes(8).hex()))
            if term is None:
                raise Deposed("another server was faster to claim the next term")
            sealed = yield from self._on_store(seal(term, self._clock.wall_ms(), position))
            if sealed.parent is None:
                raise InvalidObject(f"{self._store.name} has lost the entries that this server has applied")
            self._follower = None  # from here on, its position says nothing of the folder
            if sealed.parent != position:
                yield partial(self._apply_until, follower.applier, position, sealed.parent)
                position = sealed.parent
            # From here on, this server's disk counts, too.
            yield follower.applier.force
            follower.stop(lambda: None)
            yield follower.close
            yield from self._serve(
                term,
                sealed,
                needs_base=False,
                time_ms=follower.time_ms,
                entry_count=self._materialized_count + follower.applied_count,
            )
        except Deposed as error:
            logger.info("this server stays a standby: %s", error)
            if follower.is_stopped:
                raise StoreUnavailable("another server has become primary: the folder is compared again") from None
            self._lease.restart(self._clock.monotonic(), self._draw_jitter())
            yield from self._learn_primary()
            if not follower.is_held:  # else its owner has been told, and continues it
                follower.continue_in(position, follower.time_ms)
            return False
        return True

    def _apply_until(self, applier: OperationApplier, after: Position, until: Position) -> None:
        """Apply the entries after `after` up to `until`, in a worker. Raises InvalidObject."""
        chain = read_chain(self._store)
        if not chain.counts(after):
            raise InvalidObject(f"{entry_key(after)}, which this server has applied, does not count")
        for entry in read_entries(self._store, chain, after, until, self._executor):
            if entry.kind == EntryKind.BASE:
                raise InvalidObject(f"{entry_key(entry.position)} is a snapshot, from which the folder has to be made")
            if entry.kind == EntryKind.OPERATIONS:
                apply_entry(applier, entry)

    def _pass_fence(self, follower: Follower, position: Position, fence: Fence) -> Steps:
        """Wait for the term that follows the one that ended, or claim it. Return False to materialize again."""
        assert self._lease is not None
        last = follower.position
        is_handed_over = fence.successor == self._state.member
        is_left = not is_handed_over and not fence.successor and fence.member == self._primary_member
        began = self._clock.monotonic()
        patience = 0.0 if is_handed_over else self._settings.lease_seconds * (1 + self._jitter())
        if is_left:
            patience = self._settings.heartbeat_seconds * self._jitter()
        while True:
            begun: Begun | None = yield from self._on_store(next_begun(position.term))
            if begun is not None:
                break
            if self._clock.monotonic() - began >= patience:
                if (yield from self._try_promotion(follower)):
                    return True
                began = self._clock.monotonic()
                patience = self._settings.lease_seconds * (1 + self._jitter())
            yield Pause(FENCE_PAUSE_SECONDS)
        if begun.begin is None or begun.begin.parent != last:
            return False
        self._lease.restart(self._clock.monotonic(), self._draw_jitter())
        self._note_primary(begun.term)
        follower.continue_in(Position(begun.term.number, 0), follower.time_ms)
        return True

    def _learn_primary(self) -> Steps:
        begun = yield from self._on_store(newest_begun())
        if begun is not None:
            self._note_primary(begun.term)

    def _note_primary(self, term: Term) -> None:
        if term.address != self.primary_address:
            logger.info("following the primary at %s, term %d of %s", term.address, term.number, self._store.name)
        self.primary_address, self._primary_member = term.address, term.member

    def _become_standby(self) -> None:
        if self.role != "standby":
            self.role = "standby"
            self._since_ms = self._clock.wall_ms()
            self._host.following()

    # The end

    def _handed_over(self, member: str) -> None:
        if member == self._state.member:
            return
        logger.info("handing over to %s, which has asked for it", member)
        self._successor = member
        self._host.hand_over()

    def _stop(self, done: Callable[[], None]) -> Steps:
        if self._task is not None:
            self._task.cancel()
        if self.primary is not None:
            yield from self._end_term(self.primary)
        elif self._follower is not None:
            follower = self._follower
            yield from self._end_follower(follower)
            yield from self._write_state("standby", follower.position, is_clean=True, time_ms=follower.time_ms)
        done()

    def _end_term(self, primary: Primary) -> Steps:
        """Store all that is left, and end the term; or leave it as after a crash, if the store lacks more than that."""
        writer = primary.writer
        primary.disk.cut()
        writer.pump()
        while primary.may_end_cleanly and not writer.is_idle:
            yield Pause(STOP_PAUSE_SECONDS)
        if not primary.may_end_cleanly:
            primary.end()
            return
        position, time_ms = writer.position, writer.stored_time_ms
        writer.put(EntryKind.FENCE, Fence(self._state.member, self._successor).encode())
        while not writer.is_idle:
            yield Pause(STOP_PAUSE_SECONDS)
        primary.end()
        # What the store has must not be lost here by a power failure: nothing would compare the folders.
        assert self._anchor is not None
        yield partial(self._disk.sync_file_system, self._anchor)
        if self._note is not None:
            yield self._note
        # After a hand-over this server must not take its term up again, but follow.
        role: Role = "standby" if self._successor else "primary"
        yield from self._write_state(role, position, is_clean=True, time_ms=time_ms)

    # Helpers

    def _write_state(self, role: Role, position: Position, *, is_clean: bool, time_ms: int = 0) -> Steps:
        """Replace the local state, in a worker. Only one at a time may do so: see `_note`."""
        self._state = LocalState(self._state.member, role, position, is_clean, time_ms, self._store.name)
        yield partial(self._state_file.write, self._state)

    def _repeated(self, call: Callable[[], Any]) -> Steps:
        """Make one call on the store in a worker, again after pauses while the store is unavailable."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return (yield call)
            except StoreUnavailable as error:
                self.trouble = str(error)
                yield Pause(pause)
                pause = min(PAUSE_SECONDS_MAX, 2 * pause)

    def _on_store(self, steps: StoreSteps[Any]) -> Steps:
        """Make the calls of `steps` on the store in workers. A call that fails is repeated after a pause."""
        pause = FIRST_PAUSE_SECONDS
        try:
            call = next(steps)
            while True:
                try:
                    result = yield partial(call, self._store)
                except StoreUnavailable as error:
                    self.trouble = str(error)
                    yield Pause(pause)
                    pause = min(PAUSE_SECONDS_MAX, 2 * pause)
                    call = steps.throw(error)
                else:
                    self.trouble, pause = "", FIRST_PAUSE_SECONDS
                    call = steps.send(result)
        except StopIteration as end:
            return end.value


CLAIM: Final = object()
"""The event that a lease is over."""


def has_replicated(disk: Disk, folder: str) -> bool:
    """Return whether the data folder has anything that is replicated."""
    return any(is_replicated(name) for name in disk.list(folder))


def read_node(disk: Disk, folder: str) -> str | None:
    """Return the node id of a data folder; None if it has none yet. Raises Corrupt, NewerFormat, OSError."""
    path = join(folder, f"{META_NAME}/{VERSION_NAME}")
    return decode_version(read_file(disk, path), path).node if disk.exists(path) else None


def free_name(disk: Disk, path: str) -> str:
    """Return the first of `path`-1, `path`-2, ... that does not exist."""
    return next(name for number in itertools.count(1) if not disk.exists(name := f"{path}-{number}"))
