"""A producer that had been silent for longer than the broker remembers ids failed its first messages with an unknown
outcome: the ids that it had in hand were as old. And what was refused came back as "not done" although it had been
sent before.
"""

from tests.client.fake_broker import LOSE, FakeBroker
from tests.client.rig import SenderRig
from tfmq.errors import UNKNOWN, UnknownProducer, UnknownTopic
from tfmq.protocol import commands
from tfmq.protocol.commands import LeaseProducerIds, Produce

IDLE_SECONDS = 100


class Forgetful(FakeBroker):
    """Forgets ids that were leased too long ago."""

    def __init__(self, rig_time: list[SenderRig]) -> None:
        super().__init__(limits={"producer_idle_seconds": IDLE_SECONDS})
        self._rig = rig_time
        self._leased: dict[int, float] = {}

    def lease_producer_ids(self, request: LeaseProducerIds) -> commands.LeaseProducerIdsReply:
        reply: commands.LeaseProducerIdsReply = super().lease_producer_ids(request)
        for number in range(reply.first, reply.first + reply.count):
            self._leased[number] = self._rig[0].time
        return reply

    def _check(self, producer_id: int) -> None:
        if self._leased.get(producer_id, self._rig[0].time) + IDLE_SECONDS < self._rig[0].time:
            raise UnknownProducer()

    def produce(self, request: Produce, body: bytes) -> commands.ProduceReply:
        self._check(request.producer_id)
        reply: commands.ProduceReply = super().produce(request, body)
        return reply

    def succeed_producer(self, request: commands.SucceedProducer) -> commands.SucceedProducerReply:
        self._check(request.producer_id)
        reply: commands.SucceedProducerReply = super().succeed_producer(request)
        return reply


def test_a_producer_that_was_silent_for_long_goes_on() -> None:
    place: list[SenderRig] = []
    rig = SenderRig(Forgetful(place), batch_bytes=1)
    place.append(rig)
    rig.settle(rig.send(b"0"))
    rig.time += 2 * IDLE_SECONDS
    rig.settle(later := rig.send(b"1"))
    assert later.error() is None
    rig.settle(elsewhere := rig.send(b"2", topic="elsewhere"))
    assert elsewhere.error() is None
    assert rig.broker.payloads("orders") == [b"0", b"1"]


def test_ids_that_are_older_than_the_client_thinks_are_used_up_without_harm() -> None:
    place: list[SenderRig] = []
    rig = SenderRig(Forgetful(place), batch_bytes=1)
    place.append(rig)
    rig.settle(rig.send(b"0"))
    rig.time += 2 * IDLE_SECONDS
    rig.sender.producer_ids._lease_ends = float("inf")  # as after a suspend, which the clock does not count
    rig.settle(later := rig.send(b"1"))
    assert later.error() is None
    assert rig.broker.payloads("orders") == [b"0", b"1"]


def test_what_may_stand_in_a_deleted_topic_is_not_called_not_done() -> None:
    rig = SenderRig(batch_bytes=1)
    rig.settle(rig.send(b"0"))
    rig.broker.plan(Produce, LOSE, UnknownTopic())
    rig.settle(delivery := rig.send(b"1"))
    error = delivery.error()
    assert isinstance(error, UnknownTopic) and error.outcome == UNKNOWN
