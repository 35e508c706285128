"""A query's progress, written into a group of the broker, so that `tfmq group` shows its lag.

Only shown: the checkpoint decides where a query goes on. So what keeps the progress from being written is said in the
log, and the query goes on; but a query does not begin with a group whose members read for themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from tfmq.client.connection.factory import reach
from tfmq.client.connection.requests import ask
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Operation
from tfmq.errors import NotAllowed, TfmqError, UnknownTopic
from tfmq.protocol.commands import BY_OFFSET, DescribeGroup, GroupOffset, Locate, ResetGroup
from tfmq.spark.logs import Address
from tfmq.spark.offsets import Key, Offset, Offsets

log = logging.getLogger("tfmq.spark")

AGAIN_SECONDS: Final = 5.0
"""Between attempts after one that failed: an idle query asks for a save 100 times a second."""


class GroupProgress:
    """Of one group, over a connection of its own; the broker was there before."""

    def __init__(self, address: Address, group: str) -> None:
        self._group, self._timeout = group, address.timeout
        self._link, self._driver, _ = reach(address.servers, BlockingDriver)
        self._link.patience_seconds = max(self._link.patience_seconds, address.timeout)
        self._saved: Offsets | None = None
        self._not_before = 0.0

    def save(self, processed: Offsets) -> None:
        """All before these offsets was processed.

        The first time it raises NotAllowed where the group has a live member, and what keeps it from being written.
        """
        if processed == self._saved or self._link.now() < self._not_before:
            return
        if self._saved is None:
            self._driver.run(self._refuse_live())
            self._driver.run(self._write(processed))
            self._saved = processed
            return
        try:
            self._driver.run(self._write(processed))
        except TfmqError as error:
            self._not_before = self._link.now() + AGAIN_SECONDS
            log.warning("The query's progress could not be written for the group %s: %s", self._group, error)
        else:
            self._saved = processed

    def close(self) -> None:
        """Let go of the connection."""
        self._driver.close()

    def _refuse_live(self) -> Operation[None]:
        reply = yield from self._ask(DescribeGroup(self._group))
        members = [each["member"] for each in reply.description.get("members", ()) if each.get("live")]
        if members:
            raise NotAllowed(
                f"groupId: the group {self._group} has a live member, {members[0]}, with progress of its own. Stop its"
                " members, or give the query a group that nobody else uses."
            )

    def _write(self, processed: Mapping[Key, Offset]) -> Operation[None]:
        rows = []
        for (topic, partition), (incarnation, offset, _) in processed.items():
            message = Locate(topic, incarnation, partition, BY_OFFSET, offset)
            try:
                found = yield from self._ask(message)
            except UnknownTopic:  # deleted by now: nobody asks how far it was read
                continue
            rows.append(GroupOffset(topic, incarnation, partition, offset, 0, found.epoch))
        if rows:
            yield from self._ask(ResetGroup(self._group, rows))

    def _ask(self, message: Any) -> Operation[Any]:
        return (yield from ask(self._link, message, self._link.now() + self._timeout))
