"""Fetches on their way: sent as planned, answered, taken back."""

from typing import Any

from tests.client.scripted import Broker, ScriptedLink
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.fetcher import Fetcher, FetchSession, PartitionFetchState
from tfmq.client.consumer.options import consumer_options
from tfmq.client.consumer.positions import ReadPosition
from tfmq.errors import Busy
from tfmq.offsets.storage import PartitionName
from tfmq.protocol import commands as wire

NAME = PartitionName("orders", 0)


class Desk:
    def __init__(self, **options: Any) -> None:
        self.broker = Broker()
        self.log = self.broker.create("orders")
        self.link = ScriptedLink(self.broker)
        made = consumer_options(topics="orders", **options)
        self.fetcher = Fetcher(tags=made.tags)
        self.arrivals = self.flushes = 0
        self.fetching = FetchSession(made, self.link, self.fetcher, arrived=self._arrived, flush=self._flush)
        incarnation = self.broker.topics["orders"][0]
        self.fetcher.add(
            PartitionFetchState(NAME, incarnation, ReadPosition(0), Decoder("orders", 0, incarnation, None))
        )

    def _arrived(self) -> None:
        self.arrivals += 1

    def _flush(self) -> None:
        self.flushes += 1

    def exchange(self) -> None:
        self.fetching.send_fetches()
        self.link.serve()


def test_what_is_planned_goes_out_and_its_answer_is_there_to_be_taken() -> None:
    desk = Desk()
    desk.log.append(b"one")
    desk.exchange()
    assert (desk.arrivals, desk.flushes) == (1, 1)
    batch = desk.fetcher.next_batch()
    assert batch is not None and [message.payload for message in batch.messages] == [b"one"]


def test_one_fetch_a_partition_is_under_way() -> None:
    desk = Desk()
    desk.exchange(), desk.exchange()
    assert len(desk.broker.sent(wire.Fetch)) == 1


def test_the_hashes_of_tags_go_along() -> None:
    desk = Desk(tags="a || b")
    desk.exchange()
    assert len(desk.broker.sent(wire.Fetch)[0].tags) == 2


def test_what_is_void_is_taken_back_at_the_broker() -> None:
    desk = Desk()
    desk.exchange()
    desk.fetching.cancel(NAME)
    assert len(desk.broker.sent(wire.Cancel)) == 1 and desk.arrivals == 1
    desk.fetching.cancel(NAME)
    assert len(desk.broker.sent(wire.Cancel)) == 1


def test_a_failure_is_tried_again_in_its_time() -> None:
    desk = Desk()
    desk.broker.fail[wire.Fetch] = [Busy()]
    desk.exchange()
    desk.exchange()
    assert len(desk.broker.sent(wire.Fetch)) == 1
    retry = desk.fetcher.next_retry()
    assert retry is not None
    desk.link.time = retry
    desk.exchange()
    assert len(desk.broker.sent(wire.Fetch)) == 2
