"""A program that leaves transactions in doubt on a real server, in plain frames: for tests of those who find them."""

from __future__ import annotations

from tests.server.wire import Wire, batch
from tfmq.protocol import commands

Member = tuple[str, int, str]


class Owner:
    """A program that prepares transactions and is gone before it decides them."""

    def __init__(self, address: str, topic: str) -> None:
        host, _, port = address.rpartition(":")
        self.wire = Wire((host, int(port)))
        self.name = topic
        self.incarnation = self.wire.ask(commands.Metadata([topic], True))[0][0][1]
        self.producer_id = self.wire.ask(commands.LeaseProducerIds(1))[0]
        self.number = self.sequence = 0

    def begin(self, xid: str, *messages: bytes, group: str = "", member: Member | None = None) -> int:
        self.number += 1
        place = None if member is None else commands.CommitMember(*member)
        begin = commands.BeginTransaction(self.producer_id, self.number, xid, None, group, place)
        epoch: int = self.wire.ask(begin)[0]
        if messages:
            request, body = batch(self.name, self.incarnation, self.producer_id, self.sequence, list(messages))
            self.wire.ask(request._replace(transaction=epoch), body)
            self.sequence += len(messages)
        return epoch

    def prepare(self, xid: str, *messages: bytes, group: str = "", member: Member | None = None) -> int:
        epoch = self.begin(xid, *messages, group=group, member=member)
        assert self.wire.ask(commands.PrepareTransaction(xid, epoch, None, []))[0] == "prepared"
        return epoch

    def refusal(self, request: object) -> tuple[str, str, dict[str, object]]:
        """The error that answers it: code, outcome, details."""
        self.wire.send(request)
        number, _, code, outcome, _, details = self.wire.receive().header
        assert number < 0
        return code, outcome, details
