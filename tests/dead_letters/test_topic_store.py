"""Letters out of a topic's events, in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import paths
from tests.dead_letters.helpers import Process, failure, group_of, message
from tests.dead_letters.test_store import keeping
from tests.scale import scaled, seeded
from tfmq.bounded_msgpack import pack, unpack
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import Operation
from tfmq.client.send.idempotent_send import ProducerPartition
from tfmq.dead_letters import model
from tfmq.dead_letters.model import (
    DEAD,
    DROPPED,
    FIRST_PAGE,
    RETRYING,
    WAITING,
    Letter,
    LetterBody,
    RedrivePosition,
    Selection,
    iso_time,
    letter_from_message,
)
from tfmq.dead_letters.sql_store import TABLE
from tfmq.dead_letters.topic_store import (
    EVENT_KINDS,
    HISTORY_BYTES,
    VERSION,
    LetterIndex,
    TopicLetterStore,
    decode_event,
    encode_event,
    load_full_letter,
    without_body,
)
from tfmq.errors import ConnectionFailed, StoreFailed, TfmqError, TimedOut, UnknownTopic
from tfmq.message import BORN_MS_MAX
from tfmq.protocol.commands import Fetch
from tfmq.testing.broker import SimulatedBroker

LETTER = replace(letter_from_message(message(1, b"large"), "billing"), calls_left=3, failures=(failure(),))


def at(offset: int, event: model.Event) -> ReceivedMessage[object]:
    content = encode_event(LETTER.id, event, 1 << 23)
    return message(offset, content.payload, topic="dead", attribute=content.attribute)


def test_events_add_up_and_their_places_are_known() -> None:
    fold = LetterIndex()
    assert fold.apply(at(1, model.TakeEvent(5, "early", 9))) is None
    kept = fold.apply(at(2, model.KeepEvent(10, LETTER, 20)))
    assert kept is not None and kept.body == LETTER.body
    assert fold.apply(at(3, model.TakeEvent(20, "me", 80))) is not None
    assert fold.apply(at(4, model.TakeEvent(21, "you", 81))) is None
    assert fold.letters[LETTER.id].token == "me"
    assert fold.event_offsets[LETTER.id] == [200, 300]


def test_what_is_in_memory_is_small() -> None:
    fold = LetterIndex()
    fold.apply(at(1, model.KeepEvent(10, LETTER, 20)))
    held = fold.letters[LETTER.id]
    assert held.body is None and held.failures[0].traceback == "" and held.error == LETTER.error
    assert without_body(held) == held


def test_who_waits_is_known_without_a_look_at_all() -> None:
    fold = LetterIndex()
    fold.apply(at(1, model.KeepEvent(10, LETTER, 20)))
    assert (fold.next_due_id("billing", 19), fold.next_due_id("billing", 20), fold.next_due_id("shipping", 20)) == (
        None,
        LETTER.id,
        None,
    )
    fold.apply(at(2, model.TakeEvent(20, "me", 80)))
    assert (fold.letters[LETTER.id].state, fold.next_due_ms("billing")) == (RETRYING, 80)
    fold.apply(at(3, model.FailedEvent(30, "me", failure(), 0)))
    assert (fold.letters[LETTER.id].state, fold.next_due_ms("billing")) == (DEAD, None)
    assert fold._waiting == {}
    assert [each.id for each in fold.find(Selection(), FIRST_PAGE, 5)] == [LETTER.id]


def test_other_records_of_the_topic_are_passed_over() -> None:
    fold = LetterIndex()
    assert fold.apply(message(1, b"hello", topic="dead")) is None
    assert fold.letters == {} and fold.event_offsets == {}


def test_what_retention_took_is_forgotten_and_what_goes_on_is_not() -> None:
    fold, other = LetterIndex(), "f" * 16
    fold.apply(at(1, model.KeepEvent(10, LETTER, 20)))
    content = encode_event(other, model.KeepEvent(11, LETTER), 1 << 23)
    fold.apply(message(2, content.payload, topic="dead", attribute=content.attribute))
    fold.apply(at(3, model.TakeEvent(20, "me", 80)))
    fold.delete_before(200)
    assert fold.letters.keys() == {LETTER.id, other}
    fold.delete_before(300)
    assert fold.letters.keys() == fold.event_offsets.keys() == {LETTER.id}
    fold.delete_before(301)
    assert not fold.letters and not fold.event_offsets and fold.next_due_ms("billing") is None


# Events as records, and back: every kind, strangers' bytes, a newer release's.

LARGE = 1 << 23
LETTER_TOPIC_EVENTS = replace(
    letter_from_message(message(1, b"\x00x", key=b"\xff", tag="new"), "billing", "node-1"),
    calls=3,
    failures=(failure(),),
)
EVENTS: list[model.Event] = [
    model.KeepEvent(10, LETTER_TOPIC_EVENTS, 50),
    model.KeepEvent(10, LETTER_TOPIC_EVENTS, 50, True),
    model.BeginEvent(10, replace(LETTER_TOPIC_EVENTS, calls_left=3, failures=())),
    model.NoteEvent(10, replace(LETTER_TOPIC_EVENTS, calls_left=3), True),
    model.PassEvent(10),
    model.TakeEvent(11, "me", 60),
    model.RenewEvent(12, "me", 70),
    model.HandledEvent(13, "me"),
    model.FailedEvent(14, "me", failure(1), 80),
    model.PutOffEvent(15, "me", failure(2), 90),
    model.GiveBackEvent(16, "me"),
    model.RetryEvent(17, 6),
    model.DropEvent(18, True),
    model.AdoptEvent(18, "node-1", True),
    model.ClaimEvent(19, "me", True),
    model.DepartEvent(20, "me", RedrivePosition("again", 8, 3, 99, 5, 1 << 40, "node-1")),
    model.ArriveEvent(21, 99, 5, -1),
    model.ReturnEvent(22, "me", 99, 5),
]


def record(payload: bytes | None, attribute: bytes | None = None) -> ReceivedMessage[Any]:
    return message(0, payload, topic="dead", attribute=attribute)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: EVENT_KINDS[type(event)])
def test_an_event_comes_back_as_it_was(event: model.Event) -> None:
    content = encode_event("0123456789abcdef", event, LARGE)
    given = record(content.payload, content.attribute)
    id, found = decode_event(given) or ("", None)
    assert id == given.key == "0123456789abcdef"
    assert given.tag == content.tag == EVENT_KINDS[type(event)]
    if isinstance(event, model.KeepEvent | model.BeginEvent | model.NoteEvent):
        assert type(found) is type(event)
        assert found == event._replace(letter=replace(event.letter, id=id))
    else:
        assert found == event and type(found) is type(event)


def test_every_kind_is_tried() -> None:
    assert {type(each) for each in EVENTS} == set(EVENT_KINDS)


def test_a_body_without_room_stays_where_the_message_stands() -> None:
    body = replace(
        LETTER_TOPIC_EVENTS, body=LETTER_TOPIC_EVENTS.body and LETTER_TOPIC_EVENTS.body._replace(payload=bytes(1000))
    )
    small = encode_event(LETTER_TOPIC_EVENTS.id, model.KeepEvent(10, body), 900 + HISTORY_BYTES)
    assert len(small.payload or b"") < 900
    found = decode_event(record(small.payload))
    assert found is not None and isinstance(found[1], model.KeepEvent)
    assert found[1].letter.body is None and found[1].letter.failures == LETTER_TOPIC_EVENTS.failures
    assert len(encode_event(LETTER_TOPIC_EVENTS.id, model.KeepEvent(10, body), LARGE).payload or b"") > 1000


def test_a_newer_releases_fields_are_passed_over_and_its_kinds_too() -> None:
    content = encode_event(LETTER_TOPIC_EVENTS.id, EVENTS[7], LARGE)
    fields = unpack(content.payload or b"")
    assert decode_event(record(pack([*fields, "more"]))) == (LETTER_TOPIC_EVENTS.id, EVENTS[7])
    assert decode_event(record(pack([VERSION, "sleep", LETTER_TOPIC_EVENTS.id, 10]))) is None
    assert decode_event(record(pack([VERSION + 1, *fields[1:]]))) is None


@pytest.mark.parametrize(
    "payload",
    [
        None,
        b"",
        b"hello",
        b"\xc1",
        pack(7),
        pack([]),
        pack([1, "keep"]),
        pack([1, "keep", "id", 10]),
        pack([1, "keep", "id", 10, 0, [], [], None]),
        pack([1, "failed", "id", 10, "me", 5, 7]),
        pack([1, "depart", "id", 10, "me", [1]]),
        pack([1, ["keep"], "id", 10]),
        pack([1, "take", "id", "soon", "me", 7]),
        pack({"a": 1}),
    ],
)
def test_what_is_no_event_is_none(payload: bytes | None) -> None:
    assert decode_event(record(payload)) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_none(payload: bytes) -> None:
    found = decode_event(record(payload))
    assert found is None or type(found[1]) in EVENT_KINDS


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=12,
)


@given(st.sampled_from(sorted(EVENT_KINDS.values())), st.lists(values, max_size=8))
def test_any_fields_are_an_event_or_none(kind: str, fields: list[Any]) -> None:
    found = decode_event(record(pack([VERSION, kind, "id", 10, *fields])))
    assert found is None or type(found[1]) in EVENT_KINDS


def test_the_dead_letter_of_a_keeping_needs_no_more_than_what_it_says() -> None:
    content = encode_event(LETTER_TOPIC_EVENTS.id, EVENTS[0], LARGE)
    found = decode_event(record(content.payload))
    assert found is not None and isinstance(found[1], model.KeepEvent)
    assert isinstance(found[1].letter, Letter) and found[1].letter.body == LETTER_TOPIC_EVENTS.body


def test_the_example_of_the_page_is_what_is_written() -> None:
    page = (paths.ROOT / "docs" / "dead-letters.md").read_text()
    example = page.split("A `take` of letter `0123456789abcdef`:\n\n")[1].split("\n\n")[0]
    taken = model.TakeEvent(1_763_700_000_000, "me", 1_763_700_060_000)
    assert bytes.fromhex(example) == encode_event("0123456789abcdef", taken, LARGE).payload
    assert decode_event(record(bytes.fromhex(example))) == ("0123456789abcdef", taken)


def test_the_page_has_every_kind_and_every_column() -> None:
    page = (paths.ROOT / "docs" / "dead-letters.md").read_text()
    assert [kind for kind in EVENT_KINDS.values() if f"| `{kind}` |" not in page] == []
    assert [column.name for column in TABLE.c if f"`{column.name}`" not in page] == []


def test_whatever_a_record_contains_stops_no_reader_of_the_topic() -> None:
    """Any client that may send to the topic may have written it."""
    chance = seeded("topic events")
    for _ in range(scaled(30_000)):
        fold = LetterIndex()
        for event in chance.choices(EVENTS, k=4):
            content = encode_event("0123456789abcdef", event, LARGE)
            fields = unpack(content.payload or b"")
            payload = pack(changed(chance, fields) if chance.random() < 0.5 else fields)
            fold.apply(record(payload, content.attribute))
            fold.next_due_id("billing", BORN_MS_MAX)
            fold.next_due_ms("billing")
        for letter in fold.find(Selection(), FIRST_PAGE, 10):
            assert iso_time(letter.next_ms) + iso_time(letter.changed_ms)
            json.dumps([letter.error, letter.state, letter.calls])


def changed(chance: Any, value: Any) -> Any:
    """The same, with something else somewhere."""
    if isinstance(value, list) and value and chance.random() < 0.7:
        number = chance.randrange(len(value))
        return [*value[:number], changed(chance, value[number]), *value[number + 1 :]]
    return chance.choice([None, "x", b"x", -2, 1 << 63, [], {}, 1.5, True, [1], "", 1 << 40])


# Letters in a topic, when things go wrong: lost answers, crashes, a topic that is deleted, cut, or not there.


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker({"topics.partitions": 3}) as made:
        yield made


class Holder:
    """A process with the topic open."""

    def __init__(self, broker: SimulatedBroker, *, create: bool = True) -> None:
        self.process = Process(broker, "unused")
        self.letter_store = TopicLetterStore(self.process.link, "dead", create=create)

    def apply(self, *steps: Any) -> list[Letter | None]:
        found: list[Letter | None] = self.process.run(self.letter_store.apply(steps))
        return found

    def letters(self) -> list[Letter]:
        found: list[Letter] = self.process.run(self.letter_store.find(Selection()))
        return found

    def get(self, id: str) -> Letter | None:
        found: Letter | None = self.process.run(self.letter_store.get(id))
        return found


def test_all_is_in_one_order_whatever_the_topic_has_in_partitions(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    for number in range(6):
        holder.apply(keeping(number))
    assert {each.partition for each in broker.sent("dead")} == {0}
    assert len(Holder(broker).letters()) == 6


@pytest.mark.parametrize("done", [True, False])
def test_a_lost_answer_is_asked_for_again_and_doubles_nothing(broker: SimulatedBroker, done: bool) -> None:
    holder = Holder(broker)
    id = keeping(1)[0]
    for error in (TimedOut, ConnectionFailed):
        broker.fail_next("send", error, times=2, done=done)
        holder.apply(keeping(1))
        broker.fail_next("send", error, done=done)
        (dropped,) = holder.apply((id, model.DropEvent(20)))
        assert dropped is not None and dropped.state == DROPPED
        holder.apply((id, model.RetryEvent(30, 3)))
    assert len(broker.sent("dead")) == 6


def test_what_fails_may_be_done_again(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    holder.apply(keeping(0))
    broker.fail_next("send", TimedOut, times=10_000, done=True)
    with pytest.raises(TimedOut):
        holder.apply(keeping(1))
    broker._faults._planned.clear()
    holder.apply(keeping(1))
    assert [each.state for each in holder.letters()] == [DEAD, DEAD]


def test_a_topic_that_was_deleted_is_begun_anew(broker: SimulatedBroker) -> None:
    holder, other = Holder(broker), Holder(broker)
    holder.apply(keeping(0))
    other.letters()
    broker.admin().delete_topic("dead")
    holder.apply(keeping(1))
    assert [each.id for each in holder.letters()] == [keeping(1)[0]]
    assert [each.id for each in other.letters()] == [keeping(1)[0]]
    assert other.apply((keeping(0)[0], model.DropEvent(20))) == [None]


def test_who_only_looks_makes_no_topic(broker: SimulatedBroker) -> None:
    holder = Holder(broker, create=False)
    assert holder.process.run(holder.letter_store.exists()) is False
    with pytest.raises(UnknownTopic, match="no consumer stored"):
        holder.letters()
    assert broker.admin().topics() == []


def test_a_crash_takes_nothing_that_was_kept(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    for number in range(5):
        holder.apply(keeping(number))
        broker.crash()
    assert len(holder.letters()) == 5


def test_an_idle_store_goes_on_when_the_broker_forgot_it(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    holder.apply(keeping(0))
    broker.clock.advance(days=9)
    broker.restart()
    holder.apply(keeping(1))
    assert len(holder.letters()) == 2


def test_what_is_too_large_is_read_where_it_stands() -> None:
    with SimulatedBroker({"limits.message_bytes": 300_000}) as broker:
        broker.producer().send("orders", b"x" * 250_000, key="42", tag="new").result()
        (given,) = broker.sent("orders")
        holder = Holder(broker)
        letter = replace(letter_from_message(given, "billing"), failures=(failure(),))
        holder.apply((letter.id, model.KeepEvent(10, letter)))
        assert len(broker.sent("dead")[0].payload or b"") < 5_000
        found = Holder(broker).get(letter.id)
        assert found is not None and found.body == letter.body
        broker.admin().delete_topic("orders")
        with pytest.raises(StoreFailed, match="too large to be copied"):
            Holder(broker).get(letter.id)


def test_several_at_once_in_one_process_wait_for_each_other(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    operations = [holder.letter_store.apply([keeping(number)]) for number in range(6)]
    operations += [holder.letter_store.find(Selection()) for _ in range(3)]
    interleave(holder.process, operations, seeded("at once"))
    assert len(holder.letters()) == 6


def test_of_two_who_append_at_once_the_log_says_who_was_first(broker: SimulatedBroker) -> None:
    slow, fast = Holder(broker), Holder(broker)
    id = keeping(1)[0]
    slow.apply(keeping(1))
    slow.apply((id, model.RetryEvent(15, 3)))
    taking = slow.letter_store.apply([(id, model.TakeEvent(20, "slow", 90))])
    wait = next(taking)
    assert [type(getattr(each, "request", None)) for each in wait.futures] == [Fetch]
    slow.process.driver.wait(tuple(wait.futures), wait.seconds)
    (taken,) = fast.apply((id, model.TakeEvent(20, "fast", 90)))
    assert taken is not None
    assert slow.process.run(taking) == [None]
    assert [each.token for each in slow.letters()] == ["fast"]


def interleave(process: Process, operations: list[Operation[Any]], chance: Any) -> None:
    """Step operations of one process in a random order until all ended."""
    waits: dict[int, Any] = dict.fromkeys(range(len(operations)))
    while waits:
        number = chance.choice(list(waits))
        wait = waits[number]
        if wait is not None and not any(each.done for each in wait.futures):
            process.driver.wait(tuple(wait.futures), 0.01)
        try:
            waits[number] = next(operations[number])
        except StopIteration:
            del waits[number]


def test_an_operation_that_is_given_up_leaves_the_store_usable(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    holder.apply(keeping(0))
    given_up = holder.letter_store.apply([keeping(1)])
    next(given_up)
    given_up.close()
    holder.apply(keeping(2))
    assert {each.ordinal for each in holder.letters()} >= {0, 2}


def test_random_trouble_over_two_processes_leaves_one_truth() -> None:
    for run in range(scaled(200)):
        chance = seeded("topic", run)
        with SimulatedBroker(seed=run) as broker:
            holders = [Holder(broker), Holder(broker)]
            ids = [keeping(number)[0] for number in range(4)]
            for step in range(30):
                holder = chance.choice(holders)
                trouble(broker, chance)
                number = chance.randrange(4)
                token = chance.choice("ab")
                event: model.Event = chance.choice(
                    [
                        keeping(number, at_ms=step, next_ms=step + 1)[1],
                        model.TakeEvent(step, token, step + 3),
                        model.HandledEvent(step, token),
                        model.DropEvent(step),
                        model.ClaimEvent(step, token),
                        model.ReturnEvent(step, token),
                    ]
                )
                holder.apply((ids[number], event))
            truth = Holder(broker).letters()
            assert [each.letters() for each in holders] == [truth, truth], f"run {run}"


def trouble(broker: SimulatedBroker, chance: Any) -> None:
    kind = chance.randrange(8)
    if kind == 0:
        broker.fail_next("send", chance.choice([TimedOut, ConnectionFailed]), done=chance.random() < 0.5)
    elif kind == 1:
        broker.crash(chance.choice(["nothing", "some", "everything"]))
    elif kind == 2:
        broker.disconnect()


def test_a_member_of_the_group_handles_what_another_one_kept(broker: SimulatedBroker) -> None:
    first, second = Holder(broker), Holder(broker)
    group_store = group_of(first.letter_store, first.process.wall_clock)
    first.process.run(group_store.store_letter(message(1, b"later"), [failure()], retry_after=5))
    assert [each.state for each in second.letters()] == [WAITING]
    broker.clock.advance(5)
    taker = group_of(second.letter_store, second.process.wall_clock)
    due = second.process.run(taker.lease_next())
    assert due.message.payload == b"later"
    assert first.process.run(group_store.lease_next()) is None
    assert second.process.run(taker.mark_handled(due)) is True


def test_without_a_broker_it_says_so(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    broker.stop()
    with pytest.raises(TfmqError) as failed:
        holder.apply(keeping(1))
    assert failed.value.retriable


def test_what_retention_took_is_not_kept_in_memory() -> None:
    with SimulatedBroker({"log.segment_bytes": 65536, "retention.bytes": 65536}) as broker:
        holder = Holder(broker)
        for number in range(4):
            id, event = keeping(number)
            assert isinstance(event, model.KeepEvent)
            body = LetterBody(b"x" * 60_000, None)
            holder.apply((id, event._replace(letter=replace(event.letter, body=body))))
        assert len(holder.letters()) == 4
        broker.clock.advance(hours=1)
        left = len(Holder(broker).letters())
        assert left < 4, "retention took the first ones"
        assert holder.process.run(holder.letter_store.delete_expired(0)) == 0
        assert len(holder.letters()) == left


# A letter of a topic read again from its events.


def test_it_is_what_its_events_add_up_to_and_other_records_are_none_of_them() -> None:
    with SimulatedBroker() as broker:
        process = Process(broker, "dead")
        first, second = keeping(1), keeping(2)
        for step in (first, second, (first[0], model.RetryEvent(20, 3)), (first[0], model.TakeEvent(20, "me", 30))):
            process.run(process.letter_store.apply([step]))
        assert isinstance(process.letter_store, TopicLetterStore)
        stream = ProducerPartition("dead", broker.admin().topic("dead").incarnation, 0, 0)
        places = [each.offset for each in broker.sent("dead")]

        def read(places: list[int]) -> object:
            return process.run(load_full_letter(process.link, stream, first[0], places, process.link.now() + 5))

        letter = read(places)
        assert letter is not None and letter == process.run(process.letter_store.get(first[0]))
        assert getattr(letter, "token", "") == "me"
        assert getattr(read(places[:1]), "state", "") == DEAD
        assert read(places[1:2]) is None
        assert read([10**9]) is None
