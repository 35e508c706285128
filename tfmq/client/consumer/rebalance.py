"""Rebalance of a consumer: how it gives back partitions that the group assigns to another member.

A partition is revoked when the group requests it back. From then on no more of its messages are delivered. The consumer
releases the partition when none of its messages is in progress and the acked offsets are committed. In manual mode it
waits until the user has committed the delivered messages. This wait ends if the user requests more messages when a
session timeout has passed since the revocation. There is no other time limit, because a handler may take minutes.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final

from tfmq.client.connection.connection import ClientConnection
from tfmq.client.consumer.membership import Membership
from tfmq.client.consumer.offset_commit import GroupOffsets
from tfmq.client.consumer.options import ConsumerOptions, PartitionCallback
from tfmq.client.consumer.positions import Positions
from tfmq.client.operation import CallUserCode, Event, Operation, ResultFuture, Wait
from tfmq.errors import NotAllowed, TfmqError
from tfmq.offsets.storage import PartitionName

log = logging.getLogger("tfmq.consumer")

RETRY_SECONDS: Final = 1.0
"""Pause before a failed commit of revoked partitions is repeated."""


StartAwait = Callable[[Awaitable[Any], Callable[[BaseException | None], None]], object]
"""A function (awaitable, done): it starts to await the awaitable; when that has ended, `done` is called with the error
or None. Until then the caller must keep a reference to the object that the function has returned."""


def start_task(awaited: Awaitable[Any], done: Callable[[BaseException | None], None]) -> object:
    import asyncio  # Imported here, so that programs without awaitable callbacks do not load asyncio.

    def on_done(task: asyncio.Future[Any]) -> None:
        done(asyncio.CancelledError() if task.cancelled() else task.exception())

    task = asyncio.ensure_future(awaited)
    task.add_done_callback(on_done)
    return task


def refuse_await(awaited: Awaitable[Any], done: Callable[[BaseException | None], None]) -> object:
    if isinstance(awaited, Coroutine):
        awaited.close()  # Otherwise Python logs a "never awaited" warning later.
    raise NotAllowed(
        f"on_assigned or on_revoked returned a {type(awaited).__name__} to be awaited, and this consumer awaits none:"
        " write plain functions, or use tfmq.aio.Consumer."
    )


def call_user_function(
    function: Callable[[list[PartitionName]], Any],
    names: Iterable[PartitionName],
    start_await: StartAwait,
    on_end: Callable[[], None],
) -> Operation[None]:
    """Call a user callback, which may commit and seek, and await its result if that is awaitable.

    Raises the error of the callback or of its awaited result. `on_end` is called when the callback has ended. If this
    operation is cancelled, the callback may end later than the operation.
    """
    done, called, task = ResultFuture(), False, None

    def call() -> None:
        nonlocal called, task
        called = True
        try:
            found = function(sorted(names))
            if inspect.isawaitable(found):
                task = start_await(found, partial(done.set_outcome, None))
            else:
                done.complete()
        except BaseException:
            done.complete()
            raise

    try:
        yield CallUserCode(call)
        while not done.done:
            yield Wait((done,))
    finally:
        if not called:
            done.complete()
        done.add_done_callback(lambda _: on_end())
    if done.error is not None:
        raise done.error


class Rebalance:
    """Releases revoked partitions, and calls the user's on_assigned and on_revoked.

    `busy(name)`: whether handlers have messages of a partition, so that it cannot be released yet.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        link: ClientConnection,
        positions: Positions,
        membership: Membership,
        offsets: GroupOffsets,
    ) -> None:
        self.membership = membership
        self.offsets = offsets
        self.busy: Callable[[PartitionName], bool] = lambda name: False
        self.start_await: StartAwait = start_task if options.awaits else refuse_await
        self.unannounced: set[PartitionName] = set()
        """Partitions of which nothing is delivered yet, because on_assigned has not returned."""
        self.on_callback_returned: Callable[[], None] = lambda: None
        """Called after on_assigned or on_revoked has returned."""
        self._options = options
        self._link = link
        self._positions = positions
        self._revoked: dict[PartitionName, float] = {}
        self._assigned_pending: set[PartitionName] = set()
        self._revoked_pending: set[PartitionName] = set()
        self._in_callback = False
        self._last_poll_at = 0.0
        self._wake_event = Event()

    # Events

    def assigned(self, names: Iterable[PartitionName]) -> None:
        """Queue a call of on_assigned for partitions that the consumer reads from now on."""
        if self._options.on_assigned is not None:
            self._assigned_pending.update(names)
            self.unannounced |= self._assigned_pending

    def revoke(self, name: PartitionName) -> None:
        self._revoked[name] = self._link.now()
        self._positions.ack_trackers.revoke(name)
        self._queue_revoked(name)
        self.wake()

    def unrevoke(self, name: PartitionName) -> bool:
        """Withdraw the revocation of a partition. Return False if the partition was not revoked."""
        self._revoked_pending.discard(name)
        self._positions.ack_trackers.unrevoke(name)
        return self._revoked.pop(name, None) is not None

    def partition_lost(self, name: PartitionName) -> None:
        if self._revoked.pop(name, None) is None:
            self._queue_revoked(name)
        if self._positions.remove_lost(name):
            log.warning(
                "%s belongs to another member of group %s by now; its uncommitted messages are delivered again there.",
                name,
                self._options.group,
            )

    def poll_called(self) -> None:
        """Record that the user has requested more messages, which acks the messages delivered before."""
        self._last_poll_at = self._link.now()
        self.wake()

    def wake(self) -> None:
        """Wake `run`, because a revoked partition may be ready for release."""
        if self._revoked:
            self._wake_event.complete()

    def _queue_revoked(self, name: PartitionName) -> None:
        """Queue a call of on_revoked. If the call of on_assigned is still queued, only withdraw that call instead."""
        if name in self._assigned_pending:  # on_assigned was not called for it.
            self._assigned_pending.discard(name)
            self.unannounced.discard(name)
        elif self._options.on_revoked is not None:
            self._revoked_pending.add(name)

    # Callbacks

    @property
    def has_pending_callbacks(self) -> bool:
        return bool(self._assigned_pending or self._revoked_pending) and not self._in_callback

    def run_callbacks(self) -> Operation[None]:
        """Run the queued user callbacks, in the thread that requested messages. Raises the errors of the callbacks."""
        while self.has_pending_callbacks:
            if self._revoked_pending:
                revoked = set(self._revoked_pending)
                on_end = partial(self._revoked_pending.difference_update, revoked)
                yield from self._run_callback(self._options.on_revoked, revoked, on_end)
            else:
                assigned = self._assigned_pending & self.membership.assigned.keys()
                self._assigned_pending = set()
                yield from self._run_callback(
                    self._options.on_assigned,
                    assigned,
                    lambda: self.unannounced.intersection_update(self._assigned_pending),
                )

    def _run_callback(
        self, function: PartitionCallback, names: set[PartitionName], on_end: Callable[[], object]
    ) -> Operation[None]:
        """Call `function(names)`, and `on_end` when `function` has ended. If `function` is None or there are no names,
        only call `on_end`."""

        def callback_ended() -> None:
            self._in_callback = False
            on_end()
            self.wake()
            self.on_callback_returned()

        if function is None or not names:
            callback_ended()
            return
        self._in_callback = True
        yield from call_user_function(function, names, self.start_await, callback_ended)

    def run_final_callbacks(self) -> Operation[None]:
        """Run on_revoked for all partitions, because the consumer is closed."""
        if self._options.on_revoked is not None and not self._in_callback:
            self._revoked_pending.update(set(self._positions.names()) - self._assigned_pending)
            self._assigned_pending.clear()
            yield from self.run_callbacks()

    # Release

    def run(self) -> Operation[None]:
        """Release revoked partitions once `_is_releasable` permits. Never ends. Raises permanent errors of commits."""
        while True:
            free = [name for name in self._revoked if self._is_releasable(name)]
            if free:
                yield from self._release(free)
                continue
            self._wake_event = Event()
            yield Wait((self._wake_event,))

    def _is_releasable(self, name: PartitionName) -> bool:
        positions = self._positions
        if positions.is_in_progress(name) or self.busy(name) or name in self._revoked_pending:
            return False
        waited = self._last_poll_at - self._revoked[name]
        return name not in positions.uncommitted or waited >= self._options.session_timeout

    def _release(self, names: list[PartitionName]) -> Operation[None]:
        """Commit and release partitions. After a retriable error, pause and return without releasing them."""
        failure: TfmqError | None = None
        try:
            if self._options.commits != "manual":
                yield from self.offsets.commit_positions(
                    lambda: self._positions.uncommitted_positions(names), self._link.now() + RETRY_SECONDS
                )
        except TfmqError as error:
            if error.retriable:
                log.warning("The offsets of %s were not saved, trying again: %s", _listed(names), error)
                yield Wait((), RETRY_SECONDS)
                return
            failure = error
        # Partitions that are not revoked any more were assigned again, or lost, during the commit.
        released = [name for name in names if name in self._revoked]
        for name in released:
            del self._revoked[name]
            self._positions.remove_lost(name)
        self.membership.release(released)
        if released:
            log.info("Group %s: released %s.", self._options.group, _listed(released))
        if failure is not None:
            raise failure

    def reset_after_fork(self) -> None:
        self._revoked.clear()
        for names in (self._assigned_pending, self._revoked_pending, self.unannounced):
            names.clear()
        self._in_callback = False


def _listed(names: Iterable[PartitionName]) -> str:
    return ", ".join(map(str, sorted(names)))
