"""Rebalance of a consumer: revoked partitions are drained, committed and released.

Callbacks are run. From the revocation on nothing more of a partition is delivered. The partition is released
when none of its messages is in progress: a loop requested the next message, a polled batch was followed by
the next `poll`, and `busy` is False. In manual mode also the delivered messages must be committed, or more
requested a session timeout later without a commit. There is no other limit, because a handler may take
minutes. Acked offsets are committed before the release.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from tfmq.client.connection.connection import Link
from tfmq.client.consumer.membership import Membership
from tfmq.client.consumer.offset_commit import Saving
from tfmq.client.consumer.options import ConsumerOptions, Told
from tfmq.client.consumer.positions import Positions
from tfmq.client.operation import Flag, Operation, Wait, Waitable
from tfmq.errors import NotAllowed, TfmqError
from tfmq.offsets.storage import PartitionName

log = logging.getLogger("tfmq.consumer")

RETRY_SECONDS: Final = 1.0
"""Pause before a failed commit of revoked partitions is repeated."""


Begin = Callable[[Awaitable[Any], Callable[[BaseException | None], None]], object]
"""Starts to await an object and calls back with its exception or None.

The result must be kept alive until then.
"""


def begin_task(awaited: Awaitable[Any], done: Callable[[BaseException | None], None]) -> object:
    """Await in the running event loop."""
    import asyncio  # not loaded where nothing is awaited

    def over(task: asyncio.Future[Any]) -> None:
        done(asyncio.CancelledError() if task.cancelled() else task.exception())

    task = asyncio.ensure_future(awaited)
    task.add_done_callback(over)
    return task


def refuse(awaited: Awaitable[Any], done: Callable[[BaseException | None], None]) -> object:
    """Raise NotAllowed, in a consumer that cannot await."""
    if isinstance(awaited, Coroutine):
        awaited.close()  # else Python logs a "never awaited" warning elsewhere
    raise NotAllowed(
        f"on_assigned or on_revoked returned a {type(awaited).__name__} to be awaited, and this consumer awaits none:"
        " write plain functions, or use tfmq.aio.Consumer."
    )


class Telling:
    """Effect that calls a user callback, in the thread and outside of the lock of the driver.

    So the callback may commit and seek. An awaitable result is awaited.
    """

    def __init__(
        self,
        told: Callable[[list[PartitionName]], Any],
        names: Iterable[PartitionName],
        begin: Begin = begin_task,
    ) -> None:
        self._told = told
        self._begin = begin
        self._names = sorted(names)
        self._done = Flag()
        self._begun = False
        self._task: object = None
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[Waitable]:
        """Call the callback when the driver iterates over what the operation waits for."""
        self._begun = True
        try:
            found = self._told(self._names)
            if inspect.isawaitable(found):
                self._task = self._begin(found, self._over)
            else:
                self._done.settle()
        except BaseException:
            self._done.settle()
            raise
        return iter((self._done,))

    def _over(self, error: BaseException | None) -> None:
        """Record the end of the awaited result."""
        self._error = error
        self._done.settle()

    def run(self, over: Callable[[], None]) -> Operation[None]:
        """Run the callback and wait for its result. Raises what it raises.

        `over` is called when the callback has returned; that is after this operation if the operation is
        cancelled.
        """
        try:
            yield Wait(self)
            while not self._done.done:
                yield Wait((self._done,))
        finally:
            if not self._begun:
                self._done.settle()
            self._done.when_done(lambda _: over())
        if self._error is not None:
            raise self._error


class Handover:
    """Revocations, assignments and user callbacks of one consumer.

    `busy(name)` returns whether messages of a partition are in progress outside of `Positions`.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        link: Link,
        positions: Positions,
        saving: Saving,
        membership: Membership,
    ) -> None:
        self.busy: Callable[[PartitionName], bool] = lambda name: False
        self.begin: Begin = begin_task if options.awaits else refuse
        self.untold: set[PartitionName] = set()
        """Partitions withheld from delivery because on_assigned has not returned yet."""
        self.told: Callable[[], None] = lambda: None
        """Called after a callback returned."""
        self._options = options
        self._link = link
        self._positions = positions
        self._saving = saving
        self._membership = membership
        self._revoked: dict[PartitionName, float] = {}
        self._came: set[PartitionName] = set()
        self._going: set[PartitionName] = set()
        self._telling = False
        self._asked_at = 0.0
        self._look = Flag()

    # Events

    def came(self, names: Iterable[PartitionName]) -> None:
        """Queue on_assigned for partitions that are read from now on."""
        if self._options.on_assigned is not None:
            self._came.update(names)
            self.untold |= self._came

    def revoke(self, name: PartitionName) -> None:
        """Start to revoke a partition."""
        self._revoked[name] = self._link.now()
        self._positions.ledgers.leave(name)
        self._note_going(name)
        self.look()

    def back(self, name: PartitionName) -> bool:
        """Withdraw the revocation of a partition. Return False if it was not revoked."""
        self._going.discard(name)
        self._positions.ledgers.stay(name)
        return self._revoked.pop(name, None) is not None

    def lost(self, name: PartitionName) -> None:
        """Remove a partition that another member already owns."""
        if self._revoked.pop(name, None) is None:
            self._note_going(name)
        if self._positions.lose(name):
            log.warning(
                "%s belongs to another member of group %s by now; its uncommitted messages are delivered again there.",
                name,
                self._options.group,
            )

    def asked(self) -> None:
        """Record that the user requested more messages, which acks the former ones."""
        self._asked_at = self._link.now()
        self.look()

    def look(self) -> None:
        """Wake `run`, because a revoked partition may be ready for release."""
        if self._revoked:
            self._look.settle()

    def _note_going(self, name: PartitionName) -> None:
        """Queue on_revoked, or withdraw a queued on_assigned."""
        if name in self._came:  # the user was never notified of it
            self._came.discard(name)
            self.untold.discard(name)
        elif self._options.on_revoked is not None:
            self._going.add(name)

    # Callbacks

    @property
    def has_news(self) -> bool:
        """Whether callbacks are due."""
        return bool(self._came or self._going) and not self._telling

    def tell(self) -> Operation[None]:
        """Run the due user callbacks, in the thread that requested messages. Raises what they raise."""
        while self.has_news:
            if self._going:
                going = set(self._going)
                over = partial(self._over, partial(self._going.difference_update, going))
                yield from self._call(self._options.on_revoked, going, over)
            else:
                came, self._came = self._came & self._membership.share.keys(), set()
                over = partial(self._over, lambda: self.untold.intersection_update(self._came))
                yield from self._call(self._options.on_assigned, came, over)

    def _call(self, told: Told, names: set[PartitionName], over: Callable[[], None]) -> Operation[None]:
        """Run one callback; without one or without partitions only call `over`."""
        if told is None or not names:
            over()
            return
        self._telling = True
        yield from Telling(told, names, self.begin).run(over)

    def _over(self, note: Callable[[], object]) -> None:
        """Finish a callback and resume what waited for it."""
        self._telling = False
        note()
        self.look()
        self.told()

    def tell_the_end(self) -> Operation[None]:
        """Run on_revoked for all partitions, because the consumer is closed."""
        if self._options.on_revoked is not None and not self._telling:
            self._going.update(set(self._positions.names()) - self._came)
            self._came.clear()
            yield from self.tell()

    # Release

    def watch(self) -> Operation[None]:
        """Release revoked partitions when they are ready, for ever.

        Raises errors of a commit that are not retriable.
        """
        while True:
            free = [name for name in self._revoked if self._is_free(name)]
            if free:
                yield from self._release(free)
                continue
            self._look = Flag()
            yield Wait((self._look,))

    def _is_free(self, name: PartitionName) -> bool:
        """Return whether a revoked partition may be released."""
        positions = self._positions
        if positions.in_work(name) or self.busy(name) or name in self._going:
            return False
        waited = self._asked_at - self._revoked[name]
        return not positions.uncommitted(name) or waited >= self._options.session

    def _release(self, names: list[PartitionName]) -> Operation[None]:
        """Commit and release partitions; on a retriable error pause and return."""
        failure: TfmqError | None = None
        try:
            if self._options.commits != "manual":
                yield from self._saving.save(lambda: self._unsaved(names), self._link.now() + RETRY_SECONDS)
        except TfmqError as error:
            if error.retriable:
                log.warning("The offsets of %s were not saved, trying again: %s", _listed(names), error)
                yield Wait((), RETRY_SECONDS)
                return
            failure = error
        # others were assigned again, or lost, meanwhile
        going = [name for name in names if name in self._revoked]
        for name in going:
            del self._revoked[name]
            self._positions.lose(name)
        self._membership.release(going)
        if going:
            log.info("Group %s: released %s.", self._options.group, _listed(going))
        if failure is not None:
            raise failure

    def _unsaved(self, names: Iterable[PartitionName]) -> Mapping[PartitionName, Any]:
        """Return the uncommitted positions of these partitions."""
        unsaved = self._positions.unsaved()
        return {name: unsaved[name] for name in names if name in unsaved}

    def renew(self) -> None:
        """Reset the state in a forked child: no revocation or callback is pending."""
        self._revoked.clear()
        for names in (self._came, self._going, self.untold):
            names.clear()
        self._telling = False


def _listed(names: Iterable[PartitionName]) -> str:
    """Return the partitions as text, sorted."""
    return ", ".join(map(str, sorted(names)))
