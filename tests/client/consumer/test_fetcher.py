"""What is fetched, in which turn it is handed out, and what a bad answer does to its partition alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.blocks import INCARNATION, Bytes
from tests.client.scripted_broker import Broker, Script, ScriptedLink, consumer_options
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.fetcher import (
    FETCH_BYTES_LARGE,
    FETCH_BYTES_MIN,
    FETCHES_MAX,
    RETRY_SECONDS_MAX,
    TURN_WAIT_MS,
    WAIT_MS,
    Fetcher,
    FetchPlan,
    FetchResponse,
    FetchSession,
    PartitionFetchState,
    filter_batch,
)
from tfmq.client.consumer.message import Batch, ReadPosition, ReceivedMessage
from tfmq.client.consumer.options import FETCH_BYTES
from tfmq.errors import (
    BadRequest,
    Busy,
    ConnectionFailed,
    Damaged,
    DecodeFailed,
    LogTruncated,
    OffsetOutOfRange,
    ServerError,
    TfmqError,
    UnknownTopic,
)
from tfmq.offsets.storage import PartitionName
from tfmq.protocol import commands as wire


class Reader:
    """A fetcher with its partitions' bytes at hand: plays the broker."""

    def __init__(self, partitions: int = 1, **options: Any) -> None:
        self.fetcher = Fetcher(consumer_options(topics="t")._replace(**options))
        self.logs: dict[PartitionName, Bytes] = {}
        for number in range(partitions):
            self.add(number)

    def add(self, number: int) -> PartitionName:
        name = PartitionName("t", number)
        self.logs[name] = Bytes(number)
        self.fetcher.add(PartitionFetchState(name, INCARNATION, ReadPosition(0), Decoder("t", number, INCARNATION)))
        return name

    def log(self, number: int = 0) -> Bytes:
        return self.logs[PartitionName("t", number)]

    def answer(self, plan: FetchPlan, body: bytes | None = None, **changes: int) -> None:
        start, following, read = self.logs[plan.name].read(plan.offset, plan.max_bytes)
        chunk = FetchResponse(read if body is None else body, start, plan.offset, following, 1, plan.filtered)
        self.fetcher.add_response(plan, chunk._replace(**changes))  # type: ignore[arg-type]

    def fetch(self) -> int:
        """Answers what is asked for; how many answers brought something."""
        plans = self.fetcher.plan_fetches(0.0)
        for plan in plans:
            self.answer(plan)
        return len(plans)

    def take(self) -> list[ReceivedMessage] | None:
        batch = self.fetcher.next_batch()
        return None if batch is None else batch.messages

    def payloads(self) -> list[bytes | None]:
        """Everything that is there now."""
        found: list[bytes | None] = []
        while True:
            self.fetch()
            messages = self.take()
            if messages is None:
                return found
            found += [message.payload for message in messages]


NAME = PartitionName("t", 0)


def test_messages_come_once_and_in_order_over_many_fetches() -> None:
    reader = Reader(fetch_bytes=FETCH_BYTES_MIN)
    expected = [b"%d" % n + b"x" * 900 for n in range(200)]
    for payload in expected:
        reader.log().append(payload)
    assert reader.payloads() == expected
    assert reader.fetcher.fetch_count > 10


def test_one_fetch_a_partition_is_under_way_and_it_waits_at_the_broker() -> None:
    reader = Reader(3)
    plans = reader.fetcher.plan_fetches(0.0)
    assert [(plan.name.partition, plan.wait_ms, plan.max_bytes) for plan in plans] == [
        (n, WAIT_MS, FETCH_BYTES) for n in range(3)
    ]
    assert reader.fetcher.plan_fetches(0.0) == []


def test_an_empty_answer_is_followed_by_the_next_fetch() -> None:
    reader = Reader()
    reader.fetch()
    assert reader.take() is None
    assert [plan.offset for plan in reader.fetcher.plan_fetches(0.0)] == [0]


def test_the_next_chunk_is_fetched_before_the_last_is_handed_out() -> None:
    reader = Reader()
    first = reader.log().append(b"a")
    reader.fetch()
    assert [plan.offset for plan in reader.fetcher.plan_fetches(0.0)] == [first.offset + len(first.data)]


def test_what_waits_is_bounded_in_bytes() -> None:
    reader = Reader(4, prefetch_bytes=400_000)
    for number in range(4):
        for _ in range(100):
            reader.log(number).append(b"x" * 9_000)
    while reader.fetch():
        pass
    waiting = sum(feed.buffered_bytes for feed in reader.fetcher.partitions.values())
    assert 100_000 <= waiting <= 400_000
    assert reader.take()
    assert reader.fetch() == 1


@pytest.mark.parametrize(
    ("size", "options", "wanted"),
    [
        (100, {}, FETCH_BYTES),
        (1000, {}, FETCH_BYTES_LARGE),
        (1000, {"fetch_bytes": FETCH_BYTES // 2}, FETCH_BYTES // 2),
        (1000, {"prefetch_bytes": FETCH_BYTES}, FETCH_BYTES // 2),
    ],
)
def test_large_messages_are_fetched_in_larger_pieces_unless_the_user_chose_a_size(
    size: int, options: dict[str, int], wanted: int
) -> None:
    reader = Reader(**options)
    for _ in range(3):
        reader.log().append(b"x" * size)
    reader.fetch()
    assert reader.take()
    (plan,) = reader.fetcher.plan_fetches(0.0)
    assert plan.max_bytes == wanted


def test_a_message_larger_than_a_fetch_does_not_stick() -> None:
    reader = Reader(fetch_bytes=FETCH_BYTES_MIN, prefetch_bytes=FETCH_BYTES_MIN)
    reader.log().append(b"x" * 1_000_000)
    reader.log().append(b"behind")
    assert [len(payload or b"") for payload in reader.payloads()] == [1_000_000, 6]


def test_partitions_take_turns() -> None:
    reader = Reader(3, fetch_bytes=FETCH_BYTES_MIN)
    for number in range(3):
        for _ in range(4):
            reader.log(number).append(b"%d" % number + b"x" * 15_000)
    turns = []
    for _ in range(12):
        reader.fetch()
        messages = reader.take()
        assert messages is not None
        turns.append(messages[0].partition)
    assert turns == [0, 1, 2] * 4


def test_more_partitions_than_fetches_take_turns_at_the_broker_too() -> None:
    reader = Reader(FETCHES_MAX + 5)
    plans = reader.fetcher.plan_fetches(0.0)
    assert len(plans) == FETCHES_MAX
    assert plans[0].wait_ms == TURN_WAIT_MS
    for plan in plans[:5]:
        reader.answer(plan)
    assert [plan.name.partition for plan in reader.fetcher.plan_fetches(0.0)] == [FETCHES_MAX + n for n in range(5)]


def test_a_paused_partition_is_neither_fetched_nor_handed_out_and_loses_nothing() -> None:
    reader = Reader(2)
    reader.log(0).append(b"a")
    reader.log(1).append(b"b")
    reader.fetch()
    reader.fetcher.pause(NAME)
    assert reader.payloads() == [b"b"]
    reader.fetcher.resume(NAME)
    assert reader.payloads() == [b"a"]


def test_a_seek_voids_what_waits_and_what_is_under_way() -> None:
    reader = Reader()
    first, second = reader.log().append(b"a"), reader.log().append(b"b")
    reader.fetch()
    (late,) = reader.fetcher.plan_fetches(0.0)
    reader.fetcher.seek(NAME, ReadPosition(second.offset))
    reader.answer(late)
    assert reader.payloads() == [b"b"]
    reader.fetcher.seek(NAME, ReadPosition(first.offset))
    assert reader.payloads() == [b"a", b"b"]


def test_a_partition_that_is_given_away_brings_nothing_more() -> None:
    reader = Reader()
    reader.log().append(b"a")
    (plan,) = reader.fetcher.plan_fetches(0.0)
    reader.fetcher.remove(NAME)
    reader.answer(plan)
    assert reader.take() is None
    assert reader.fetcher.plan_fetches(0.0) == []


@pytest.mark.parametrize("error", [ConnectionFailed(), Busy()])
def test_a_passing_error_is_tried_again_later_and_not_reported(error: TfmqError) -> None:
    reader = Reader()
    reader.log().append(b"a")
    now = 100.0
    for _ in range(20):
        (plan,) = reader.fetcher.plan_fetches(now)
        reader.fetcher.fetch_failed(plan, error, now)
        assert reader.fetcher.plan_fetches(now) == []
        retry = reader.fetcher.next_retry()
        assert retry is not None and now < retry <= now + RETRY_SECONDS_MAX
        now = retry
    assert reader.fetcher.next_failure() is None
    (plan,) = reader.fetcher.plan_fetches(now)
    reader.answer(plan)
    assert reader.take()
    assert reader.fetcher.next_retry() is None


def stopped(error: TfmqError, **options: Any) -> tuple[Reader, TfmqError | None]:
    """A reader of two partitions; the first one's second fetch brought `error`, after one message."""
    reader = Reader(2, **options)
    reader.log(0).append(b"a")
    reader.log(1).append(b"b")
    reader.fetch()
    first, _ = reader.fetcher.plan_fetches(0.0)
    reader.fetcher.fetch_failed(first, error, 0.0)
    assert reader.fetcher.next_failure() is None, "what came before it has not been handed out"
    assert reader.payloads() == [b"a", b"b"]
    return reader, reader.fetcher.next_failure()


@pytest.mark.parametrize(
    "error", [UnknownTopic(), BadRequest(), Damaged(first=200, next=300), LogTruncated(cut=10), ServerError()]
)
def test_other_errors_stop_their_partition_only_and_are_reported_once(error: TfmqError) -> None:
    reader, reported = stopped(error)
    assert reported is error
    assert "t-0" in str(reported)
    assert reader.fetcher.next_failure() is None
    assert reader.fetcher.next_failure() is None
    reader.log(1).append(b"c")
    (other,) = [feed for feed in reader.fetcher.partitions.values() if feed.failure is None]
    other.fetching = False
    reader.fetcher.seek(other.name, other.position)
    assert reader.payloads() == [b"c"]


def test_a_seek_wakes_a_stopped_partition() -> None:
    reader, _ = stopped(UnknownTopic())
    reader.fetcher.seek(NAME, ReadPosition(0))
    assert reader.payloads() == [b"a"]


def test_when_all_have_stopped_that_is_known() -> None:
    reader = Reader()
    (plan,) = reader.fetcher.plan_fetches(0.0)
    reader.fetcher.fetch_failed(plan, UnknownTopic(), 0.0)
    assert isinstance(reader.fetcher.next_failure(), UnknownTopic)


def test_offsets_that_are_gone_are_named_and_the_partition_stops() -> None:
    reader, reported = stopped(OffsetOutOfRange(first=500, end=900))
    assert isinstance(reported, OffsetOutOfRange)
    lost = reader.log().end
    assert f"offsets {lost} to 500" in str(reported)
    assert (reported.first, reported.end) == (500, 900)


@pytest.mark.parametrize(("reset", "place"), [("earliest", 500), ("latest", 900)])
def test_a_reset_is_done_only_where_it_was_asked_for(reset: str, place: int) -> None:
    reader, reported = stopped(OffsetOutOfRange(first=500, end=900), reset=reset)
    assert reported is None
    assert reader.fetcher.partitions[NAME].fetch_offset == place
    assert reader.fetcher.skipped[0][:3] == (NAME, reader.log().end, place)


def test_after_a_cut_a_reset_goes_on_at_the_cut() -> None:
    reader, reported = stopped(LogTruncated(cut=40), reset="latest")
    assert reported is None
    assert reader.fetcher.skipped[0][:2] == (NAME, 40)


def damaged_reader(**options: Any) -> tuple[Reader, Damaged]:
    """Three blocks, the second of them damaged, and what is wrong with it."""
    reader = Reader(**options)
    log = reader.log()
    log.append(b"a")
    bad = log.append(b"b")
    log.append(b"c")
    log.replace(bad, bad.data[:25] + b"!" + bad.data[26:])
    return reader, Damaged(first=bad.offset, next=bad.offset + len(bad.data))


def test_damage_stops_the_partition_after_what_is_whole() -> None:
    reader, damage = damaged_reader()
    assert reader.payloads() == [b"a"]
    reported = reader.fetcher.next_failure()
    assert isinstance(reported, Damaged)
    assert (reported.first, reported.next) == (damage.first, damage.next)
    assert reader.fetcher.plan_fetches(0.0) == []


def test_damage_is_skipped_where_that_was_asked_for_and_reported() -> None:
    reader, damage = damaged_reader(skip_damage=True)
    assert reader.payloads() == [b"a", b"c"]
    assert reader.fetcher.next_failure() is None
    assert reader.fetcher.skipped[0][:3] == (NAME, damage.first, damage.next)
    assert reader.fetcher.skipped_count == 1


def test_damage_that_the_broker_names_is_skipped_too() -> None:
    reader = Reader(skip_damage=True)
    log = reader.log()
    bad, good = log.append(b"bad"), log.append(b"good")
    (plan,) = reader.fetcher.plan_fetches(0.0)
    reader.fetcher.fetch_failed(plan, Damaged(first=bad.offset, next=good.offset), 0.0)
    assert reader.payloads() == [b"good"]


def test_a_codec_that_is_not_known_stops_even_a_reader_that_skips_damage() -> None:
    reader = Reader(skip_damage=True)
    log = reader.log()
    log.append(b"a")
    log.append_records([log.record(b"b", 0x02)])
    assert reader.payloads() == [b"a"]
    assert isinstance(reader.fetcher.next_failure(), DecodeFailed)


@pytest.mark.parametrize("following", [-1, 0])
def test_an_answer_that_leads_nowhere_is_refused(following: int) -> None:
    reader = Reader()
    reader.log().append(b"a")
    (plan,) = reader.fetcher.plan_fetches(0.0)
    reader.answer(plan, next_offset=following)
    assert isinstance(reader.fetcher.next_failure(), ServerError)


def tagged(tags: list[str | None], wanted: str = "new") -> Reader:
    reader = Reader(tags=frozenset([wanted]))
    for number, tag in enumerate(tags):
        reader.log().append(b"%d" % number, **({"tag": tag} if tag else {}))
    return reader


def test_only_messages_with_the_tag_come() -> None:
    assert tagged(["new", "old", None, "new"]).payloads() == [b"0", b"3"]


def test_item_14_a_filter_that_rejects_all_still_advances() -> None:
    reader = tagged(["old", "old"])
    reader.fetch()
    batch = reader.fetcher.next_batch()
    assert batch is not None
    assert (batch.messages, batch.end_position.offset) == ([], reader.log().end)
    (plan,) = reader.fetcher.plan_fetches(0.0)
    reader.answer(plan, next_offset=reader.log().end + 1000, start=reader.log().end + 1000)
    batch = reader.fetcher.next_batch()
    assert batch is not None
    assert batch.end_position.offset == reader.log().end + 1000


def test_damage_under_a_filter_is_looked_at_without_it() -> None:
    reader, damage = damaged_reader(tags=frozenset(["new"]))
    log = reader.log()
    last = log.append(b"d", tag="new")
    reader.fetcher._skip_damage = True
    found = reader.payloads() + reader.payloads()
    assert found == [b"d"]
    assert reader.fetcher.skipped[0][:3] == (NAME, damage.first, damage.next)
    (plan,) = reader.fetcher.plan_fetches(0.0) or [FetchPlan(NAME, 0, 0, 0, 0, 0, True, 0)]
    assert plan.filtered
    assert last.records == 1


NAME_FETCHING = PartitionName("orders", 0)


class Rig:
    """Fetches on their way: sent as planned, answered, taken back."""

    def __init__(self, **options: Any) -> None:
        self.broker = Broker()
        self.log = self.broker.create("orders")
        self.link = ScriptedLink(self.broker)
        made = consumer_options(topics="orders", **options)
        self.fetcher = Fetcher(made)
        self.arrivals = self.flushes = 0
        self.fetching = FetchSession(made, self.link, self.fetcher, arrived=self._arrived, flush=self._flush)
        incarnation = self.broker.topics["orders"][0]
        self.fetcher.add(
            PartitionFetchState(NAME_FETCHING, incarnation, ReadPosition(0), Decoder("orders", 0, incarnation, None))
        )

    def _arrived(self) -> None:
        self.arrivals += 1

    def _flush(self) -> None:
        self.flushes += 1

    def exchange(self) -> None:
        self.fetching.send_fetches()
        self.link.serve()


def test_what_is_planned_goes_out_and_its_answer_is_there_to_be_taken() -> None:
    rig = Rig()
    rig.log.append(b"one")
    rig.exchange()
    assert (rig.arrivals, rig.flushes) == (1, 1)
    batch = rig.fetcher.next_batch()
    assert batch is not None and [message.payload for message in batch.messages] == [b"one"]


def test_one_fetch_a_partition_is_under_way() -> None:
    rig = Rig()
    rig.exchange(), rig.exchange()
    assert len(rig.broker.sent(wire.Fetch)) == 1


def test_the_hashes_of_tags_go_along() -> None:
    rig = Rig(tags="a || b")
    rig.exchange()
    assert len(rig.broker.sent(wire.Fetch)[0].tags) == 2


def test_what_is_void_is_taken_back_at_the_broker() -> None:
    rig = Rig()
    rig.exchange()
    rig.fetching.cancel(NAME_FETCHING)
    assert len(rig.broker.sent(wire.Cancel)) == 1 and rig.arrivals == 1
    rig.fetching.cancel(NAME_FETCHING)
    assert len(rig.broker.sent(wire.Cancel)) == 1


def test_a_failure_is_tried_again_in_its_time() -> None:
    rig = Rig()
    rig.broker.fail[wire.Fetch] = [Busy()]
    rig.exchange()
    rig.exchange()
    assert len(rig.broker.sent(wire.Fetch)) == 1
    retry = rig.fetcher.next_retry()
    assert retry is not None
    rig.link.time = retry
    rig.exchange()
    assert len(rig.broker.sent(wire.Fetch)) == 2


def test_a_fetch_waits_as_long_as_the_broker_asks_for_and_goes_on() -> None:
    rig = Rig()
    rig.broker.fail[wire.Fetch] = [Busy(wait_ms=3000)]
    rig.exchange()
    begun = rig.link.time
    rig.exchange()
    assert rig.fetcher.next_retry() == begun + 3.0
    rig.link.time = begun + 2.9
    rig.exchange()
    assert len(rig.broker.sent(wire.Fetch)) == 1
    rig.link.time = begun + 3.0
    rig.exchange()
    assert len(rig.broker.sent(wire.Fetch)) == 2


# A user's filter over a batch.

NAME_FILTERING = PartitionName("orders", 0)
END = ReadPosition(9999, 4, 1)


@pytest.fixture
def batch() -> Batch:
    broker = Broker()
    broker.create("orders").append(b"0", b"1", b"2", b"3")
    return Batch(NAME_FILTERING, Script(broker).messages(), END)


def test_what_it_says_yes_to_is_kept_and_the_place_after_it_all_too(batch: Batch) -> None:
    found, again = filter_batch(batch, lambda message: int(message.text) % 2)
    assert ([message.text for message in found.messages], found.end_position, again) == (["1", "3"], END, None)


def test_what_stands_before_a_failure_comes_first(batch: Batch) -> None:
    def where(message: Any) -> bool:
        if message.text == "2":
            raise ValueError("planted")
        return message.text != "0"

    found, again = filter_batch(batch, where)
    assert [message.text for message in found.messages] == ["1"]
    assert again == found.end_position == (batch.messages[2].offset, 2, batch.messages[2].origin.epoch)
    with pytest.raises(ValueError, match="planted"):
        filter_batch(batch._replace(messages=batch.messages[2:]), where)


def test_an_interrupt_is_raised_at_once(batch: Batch) -> None:
    def where(message: Any) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        filter_batch(batch, where)


def test_what_is_to_be_awaited_is_no_yes(batch: Batch) -> None:
    async def wanted(message: Any) -> bool:
        return False

    with pytest.raises(BadRequest, match="but a coroutine"):
        filter_batch(batch, lambda message: wanted(message))
    found, _ = filter_batch(batch, lambda message: [] if message.text == "0" else "yes")
    assert [message.text for message in found.messages] == ["1", "2", "3"], "any yes is one"
