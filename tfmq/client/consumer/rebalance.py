"""How partitions come and go: one that is to go is finished, saved, told and released; one that came is told of.

From the moment in which a partition is revoked nothing more of it is handed out. It is released when nothing of it is
in work: a loop asked for the next message, a polled batch was followed by the next poll, `busy` says that no lane has
one; and, where only `commit` saves, when what was handed out is committed, or more was asked for a session's time later
without a commit. There is no other limit: a handler may take minutes. What is to be saved is saved first.
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
"""Between two tries to save what is to be released."""


Begin = Callable[[Awaitable[Any], Callable[[BaseException | None], None]], object]
"""Begins to wait for something in a face's own way, and tells at the end what it raised; what it gives is held."""


def begin_task(awaited: Awaitable[Any], done: Callable[[BaseException | None], None]) -> object:
    """`Begin` in the running event loop."""
    import asyncio  # where nothing is awaited no event loop is loaded

    def over(task: asyncio.Future[Any]) -> None:
        done(asyncio.CancelledError() if task.cancelled() else task.exception())

    task = asyncio.ensure_future(awaited)
    task.add_done_callback(over)
    return task


def refuse(awaited: Awaitable[Any], done: Callable[[BaseException | None], None]) -> object:
    """`Begin` where nothing can be awaited. Raises NotAllowed."""
    if isinstance(awaited, Coroutine):
        awaited.close()  # else Python warns of it, somewhere else
    raise NotAllowed(
        f"on_assigned or on_revoked returned a {type(awaited).__name__} to be awaited, and this consumer awaits none:"
        " write plain functions, or take tfmq.aio.Consumer."
    )


class Telling:
    """Calls `told(names)` when a driver goes through what is waited for: outside of its lock, so it may commit and
    seek. What it returns is awaited, where that can be."""

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
        self._error = error
        self._done.settle()

    def run(self, over: Callable[[], None]) -> Operation[None]:
        """Until it returned. Raises what it raises. `over` is called when it has returned: where nobody waits for that
        any more (a task was cancelled), later."""
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
    """The comings and goings of one consumer's partitions. `busy(name)`: something of it is in work elsewhere."""

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
        """What came, and of which on_assigned has not returned yet: nothing of it is handed out."""
        self.told: Callable[[], None] = lambda: None
        """Called when something of that was told."""
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

    # What happens

    def came(self, names: Iterable[PartitionName]) -> None:
        """These are read from now on."""
        if self._options.on_assigned is not None:
            self._came.update(names)
            self.untold |= self._came

    def revoke(self, name: PartitionName) -> None:
        """It is to go to another member."""
        self._revoked[name] = self._link.now()
        self._positions.ledgers.leave(name)
        self._note_going(name)
        self.look()

    def back(self, name: PartitionName) -> bool:
        """It was to go, and stays after all; whether it was."""
        self._going.discard(name)
        self._positions.ledgers.stay(name)
        return self._revoked.pop(name, None) is not None

    def lost(self, name: PartitionName) -> None:
        """It is another's already."""
        if self._revoked.pop(name, None) is None:
            self._note_going(name)
        if self._positions.lose(name):
            log.warning(
                "%s is another member's of group %s by now; what was handed out of it and not saved comes again there.",
                name,
                self._options.group,
            )

    def asked(self) -> None:
        """The user asked for more: what he had is done."""
        self._asked_at = self._link.now()
        self.look()

    def look(self) -> None:
        """Something may have become free."""
        if self._revoked:
            self._look.settle()

    def _note_going(self, name: PartitionName) -> None:
        if name in self._came:  # nobody was told of it
            self._came.discard(name)
            self.untold.discard(name)
        elif self._options.on_revoked is not None:
            self._going.add(name)

    # Telling the user

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._came or self._going) and not self._telling

    def tell(self) -> Operation[None]:
        """Calls the user's functions, in the thread that asked for messages. Raises what they raise."""
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
        if told is None or not names:
            over()
            return
        self._telling = True
        yield from Telling(told, names, self.begin).run(over)

    def _over(self, note: Callable[[], object]) -> None:
        """What was told is done with, and what waited for that goes on."""
        self._telling = False
        note()
        self.look()
        self.told()

    def tell_the_end(self) -> Operation[None]:
        """All of them go: the consumer is closed."""
        if self._options.on_revoked is not None and not self._telling:
            self._going.update(set(self._positions.names()) - self._came)
            self._came.clear()
            yield from self.tell()

    # Releasing

    def watch(self) -> Operation[None]:
        """Never ends: releases what is free. Raises what is no passing failure of a save."""
        while True:
            free = [name for name in self._revoked if self._is_free(name)]
            if free:
                yield from self._release(free)
                continue
            self._look = Flag()
            yield Wait((self._look,))

    def _is_free(self, name: PartitionName) -> bool:
        positions = self._positions
        if positions.in_work(name) or self.busy(name) or name in self._going:
            return False
        waited = self._asked_at - self._revoked[name]
        return not positions.uncommitted(name) or waited >= self._options.session

    def _release(self, names: list[PartitionName]) -> Operation[None]:
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
        going = [name for name in names if name in self._revoked]  # others came back, or were lost, meanwhile
        for name in going:
            del self._revoked[name]
            self._positions.lose(name)
        self._membership.release(going)
        if going:
            log.info("Group %s: gave up %s.", self._options.group, _listed(going))
        if failure is not None:
            raise failure

    def _unsaved(self, names: Iterable[PartitionName]) -> Mapping[PartitionName, Any]:
        unsaved = self._positions.unsaved()
        return {name: unsaved[name] for name in names if name in unsaved}

    def renew(self) -> None:
        """In a forked child: nothing is under way."""
        self._revoked.clear()
        for names in (self._came, self._going, self.untold):
            names.clear()
        self._telling = False


def _listed(names: Iterable[PartitionName]) -> str:
    return ", ".join(map(str, sorted(names)))
