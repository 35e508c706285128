"""Offset commits of a consumer group: in the broker, or in a storage of the user's choice.

If another member owns some of the partitions by now, the commit is refused (fenced) for these partitions and done for
all others. A consumer starts a commit only after its previous commit has ended, and commits the positions of that
moment. So an older commit cannot overtake a newer one, even if requests are repeated after a broken connection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final

from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request_with_retries
from tfmq.client.consumer.membership import Membership
from tfmq.client.consumer.message import ReadPosition, ReceivedMessage
from tfmq.client.consumer.options import ConsumerOptions
from tfmq.client.consumer.positions import Positions
from tfmq.client.operation import Event, Executor, Operation, Wait, run_work
from tfmq.errors import Fenced, TfmqError, TimedOut
from tfmq.offsets.storage import PartitionName, StoredOffset, claim, fenced_partitions
from tfmq.protocol.commands import CommitOffsets, GroupOffset, ReadOffsets
from tfmq.protocol.commands import PartitionName as PartitionRow

log = logging.getLogger("tfmq.consumer")

READ_SECONDS: Final = 30.0
"""How long `read` with `while_busy` waits for the end of a transaction that commits the offsets."""


class GroupOffsets:
    """Reads and commits the offsets of one group member: in the user's storage if there is one, else in the broker."""

    def __init__(
        self,
        options: ConsumerOptions,
        link: ClientConnection,
        positions: Positions,
        membership: Membership,
        run: Executor,
    ) -> None:
        self.commit_count = 0
        self.on_fenced: Callable[[Collection[PartitionName]], None] = lambda names: None
        """Called with the partitions whose commit was fenced."""
        self._options = options
        self._link = link
        self._positions = positions
        self._owner = membership
        self._run = run
        self._storage = options.storage
        self._commit_ended: Event | None = None
        self._last_save_ended: Event | None = None
        """Completed when the last call of the storage's `save` has ended. If the operation that made the call is
        cancelled, the call may end later than the operation."""

    def read(
        self, names: Iterable[PartitionName], while_busy: bool = True, *, others: bool = False
    ) -> Operation[dict[PartitionName, StoredOffset]]:
        """Return the stored offsets of `names`. With `others`, return all offsets of the group from the broker.

        An offset storage ignores `others`; its errors are raised unchanged. The broker rejects the read with Busy while
        a prepared transaction that commits one of these offsets has not ended. With `while_busy` the read is repeated
        for `READ_SECONDS` before Busy is raised; without it, Busy is raised at once.
        """
        wanted, group = list(names), self._owner.group
        if self._storage is not None:
            storage = self._storage
            return dict((yield from run_work(self._run, lambda: storage.read(group, wanted))))
        request = ReadOffsets(group, None if others else [PartitionRow(*name) for name in wanted])
        until = self._link.now() + READ_SECONDS
        reply = yield from request_with_retries(self._link, request, until, while_busy=while_busy)
        return {
            PartitionName(each.topic, each.partition): StoredOffset(
                each.offset, each.index, each.incarnation, each.epoch, each.generation
            )
            for each in reply.offsets
        }

    def claim(
        self, names: Iterable[PartitionName]
    ) -> Operation[tuple[dict[PartitionName, StoredOffset], set[PartitionName]]]:
        """Claim newly assigned partitions in the storage, which from then on refuses commits of former owners.

        Return the stored offsets of the partitions, and the partitions that the storage refused because it has a later
        generation of them. If the broker stores the offsets, both results are empty: the broker knows the owner of each
        partition, so no claim is needed.
        """
        storage, group = self._storage, self._owner.group
        found: dict[PartitionName, StoredOffset] = {}
        refused: set[PartitionName] = set()
        if storage is None:
            return found, refused
        by_generation: dict[int, list[PartitionName]] = {}
        for name in names:
            by_generation.setdefault(self._owner.generation_of(name), []).append(name)
        for generation, remaining in by_generation.items():
            while remaining:
                try:
                    found |= yield from run_work(self._run, partial(claim, storage, group, generation, remaining))
                    break
                except Fenced as fenced:
                    # Claim the other partitions again, because the error does not return their offsets.
                    fenced_names = fenced_partitions(fenced, remaining)
                    refused.update(fenced_names)
                    remaining = [name for name in remaining if name not in fenced_names]
        return found, refused

    def save(self, offsets: Mapping[PartitionName, StoredOffset], until: float) -> Operation[Collection[PartitionName]]:
        """Commit `offsets`, which are durable when this returns. Return the partitions whose commit was fenced."""
        refused: Collection[PartitionName] = ()
        try:
            if self._storage is not None:
                storage, group, generation = self._storage, self._owner.group, self._owner.generation
                yield from self._save_after_former(lambda: storage.save(group, generation, offsets), until)
            else:
                rows = [
                    GroupOffset(n.topic, each.incarnation, n.partition, each.offset, each.index, each.epoch)
                    for n, each in offsets.items()
                ]
                owner = self._owner
                request = CommitOffsets(owner.group, owner.member_id, owner.generation, rows)
                reply = yield from request_with_retries(self._link, request, until, in_background=True)
                refused = {PartitionName(*each) for each in reply.fenced}
        except Fenced as fenced:
            refused = fenced_partitions(fenced, offsets)
        self.commit_count += len(refused) < len(offsets)
        return refused

    def _save_after_former(self, save: Callable[[], None], until: float) -> Operation[None]:
        """Run `save` after the previous save has ended. Raises TimedOut if that has not ended at the time `until`."""
        # The operation that called the previous `save` may be cancelled while the thread that executes it still runs.
        while self._last_save_ended is not None and not self._last_save_ended.done:
            yield self._wait_for_former(self._last_save_ended, until)
        ended = self._last_save_ended = Event()

        def run(call: Callable[[], None], done: Callable[[Any, BaseException | None], None]) -> None:
            def on_done(result: Any, error: BaseException | None) -> None:
                ended.complete()
                done(result, error)

            self._run(call, on_done)

        yield from run_work(run, save)

    def _wait_for_former(self, ended: Event, until: float) -> Wait:
        """Return a `Wait` for the end of the previous commit. Raises TimedOut if the time `until` is reached."""
        if self._link.now() >= until:
            raise TimedOut("An earlier save of offsets has not ended yet.")
        return Wait((ended,), until - self._link.now())

    def commit(self, message: ReceivedMessage | None, until: float) -> Operation[None]:
        """Commit all delivered messages; with `message`, only those of its partition up to and including `message`.

        If another member owns some of the partitions by now, commits the other partitions and raises Fenced. Raises
        TimedOut if the time `until` is reached, and errors of the storage.
        """
        positions = self._positions
        if message is None:
            positions.ack_all()
            names: Iterable[PartitionName] = list(positions.names())
        else:
            names = [positions.ack_through(message)]
        refused = yield from self.commit_positions(lambda: positions.uncommitted_positions(names), until)
        positions.raise_if_lost(refused, message)

    def commit_positions(
        self, choose: Callable[[], Mapping[PartitionName, ReadPosition]], until: float
    ) -> Operation[Collection[PartitionName]]:
        """Wait for the end of a commit in progress, then call `choose` and commit the positions that it returns. Return
        the partitions whose commit was fenced. Raises TimedOut if the time `until` is reached."""
        while self._commit_ended is not None:
            yield self._wait_for_former(self._commit_ended, until)
        positions = choose()
        if not positions:
            return ()
        ended, generation_of = Event(), self._owner.generation_of
        self._commit_ended = ended
        try:
            stored = {
                name: StoredOffset(
                    position.offset, 0, self._positions.incarnations[name], position.epoch, generation_of(name)
                )
                for name, position in positions.items()
            }
            refused = yield from self.save(stored, until)
            self._positions.mark_committed({n: position for n, position in positions.items() if n not in refused})
        finally:
            self._commit_ended = None
            ended.complete()
        lost = [name for name in refused if generation_of(name) == stored[name].generation]
        if lost:
            self.on_fenced(lost)
        return refused

    def commit_periodically(self) -> Operation[None]:
        """Commit acked positions periodically. Never returns. Raises errors that are not retriable."""
        while True:
            yield Wait((), self._options.commit_interval)
            until = self._link.now() + self._options.timeout
            try:
                yield from self.commit_positions(self._positions.uncommitted_positions, until)
            except TfmqError as error:
                if not error.retriable:
                    raise
                log.warning("Offsets of group %s were not saved, trying again: %s", self._owner.group, error)

    def reset_after_fork(self) -> None:
        self._commit_ended = self._last_save_ended = None
