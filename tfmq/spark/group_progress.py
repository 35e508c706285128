"""A query's progress, written into a group of the broker, so that `tfmq group` shows its lag.

Only shown: the checkpoint decides where a query goes on. So what keeps the progress from being written is said in the
log, and the query goes on; but a query does not begin with a group whose members read for themselves.
"""

from __future__ import annotations

import logging
from typing import Any

from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.link import Link
from tfmq.client.operations import settled
from tfmq.client.reach import reach
from tfmq.client.waiting import Operation
from tfmq.errors import NotAllowed, TfmqError
from tfmq.protocol.commands import BY_OFFSET, DescribeGroup, GroupOffset, Locate, ResetGroup
from tfmq.spark.logs import Address
from tfmq.spark.offsets import Offsets

log = logging.getLogger("tfmq.spark")


class GroupProgress:
    """Of one group, over a connection of its own."""

    def __init__(self, address: Address, group: str) -> None:
        self._group, self._timeout = group, address.timeout
        self._link, self._driver, _ = reach(address.servers, BlockingDriver)
        self._saved: Offsets | None = None

    def save(self, processed: Offsets) -> None:
        """All before these offsets was processed. Raises NotAllowed if the group has a live member when the query
        begins, ConnectionFailed if no broker is there then.
        """
        if processed == self._saved:
            return
        try:
            if self._saved is None:
                self._driver.run(self._refuse_live())
            self._driver.run(self._reset(processed))
        except TfmqError as error:
            if self._saved is None:
                raise
            log.warning(
                "The progress of the query could not be saved for the group %s: %s", self._group, error
            )
            return
        self._saved = processed

    def _refuse_live(self) -> Operation[None]:
        reply = yield from self._ask(DescribeGroup(self._group))
        members = [each["member"] for each in reply.description.get("members", ()) if each.get("live")]
        if members:
            raise NotAllowed(
                f"groupId: the group {self._group} has a live member, {members[0]}, which has its own progress. Stop"
                " its members, or give the query a group of its own."
            )

    def _reset(self, processed: Offsets) -> Operation[None]:
        located = {}
        for (topic, partition), each in processed.items():
            message = Locate(topic, each.incarnation, partition, BY_OFFSET, each.offset)
            located[topic, partition] = self._link.call(message, seconds=self._timeout)
        rows = []
        for (topic, partition), call in located.items():
            yield from settled(self._link, call)
            incarnation, offset = processed[topic, partition]
            rows.append(GroupOffset(topic, incarnation, partition, offset, 0, call.result().epoch))
        if rows:
            yield from self._ask(ResetGroup(self._group, rows))

    def _ask(self, message: Any) -> Operation[Any]:
        call = self._link.call(message, seconds=self._timeout)
        yield from settled(self._link, call)
        return call.result()

    @property
    def link(self) -> Link:
        return self._link

    def close(self) -> None:
        """Let go of the connection."""
        self._driver.close()
