"""A reader is given every undamaged message, gets exactly the damaged range, and moved on to the end, wherever one byte
of a log is wrong and however little it fetches at a time.

A read that met damage after the last known block start answered with the damage instead of the sound blocks before it,
and a reader whose last block was damaged never reached the end.
"""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from journal.filenames import segment_name
from journal.record.block_trailer import TRAILER_SIZE
from tests.scale import scaled, seeded
from tfmq.consumer import Consumer
from tfmq.errors import Damaged
from tfmq.testing.broker import SimulatedBroker

COUNT = 60
SEGMENT = f"/data/orders-0/{segment_name(0)}"
FETCH_BYTES = (1, 4_096, 16_384, 32_768, 60_000, 70_000, 1 << 20)
SPOTS = {"header": 2, "payload": 60, "trailer": -TRAILER_SIZE + 40, "trailer header": -TRAILER_SIZE + 9}
"""Where in a block a byte goes bad, from its start, or (negative) from its end."""


@pytest.fixture(scope="module")
def filled() -> Iterator[tuple[SimulatedBroker, list[int]]]:
    """A stopped broker with blocks of one message and about 3 KB, some runs of the index; their edges."""
    with SimulatedBroker() as broker:
        producer = broker.producer()
        offsets = [
            producer.send("orders", payload_of(n), tag="even" if n % 2 == 0 else "odd").result().offset
            for n in range(COUNT)
        ]
        producer.close()
        broker.stop()
        yield broker, [*offsets, broker.disk.size(SEGMENT)]


def payload_of(number: int) -> bytes:
    return b"%03d." % number * (700 + number)


def cases() -> Iterator[tuple[int, str, int, bool, str, str | None]]:
    """A seeded choice among all; the last blocks are always in it."""
    generator = seeded("damage under consumers")
    for n in range(max(24, scaled(2_000))):
        yield (
            COUNT - 1 - n % 8 if n < 16 else generator.randrange(COUNT),
            generator.choice(list(SPOTS)),
            generator.choice(FETCH_BYTES),
            generator.random() < 0.5,
            "skip" if n % 2 == 0 else "stop",
            generator.choice((None, None, "even", "none")),
        )


@pytest.mark.parametrize("read", ["messages", "columns"])
def test_what_is_sound_is_delivered_and_the_damage_named_exactly(
    filled: tuple[SimulatedBroker, list[int]], read: str
) -> None:
    broker, edges = filled
    read_to = {"messages": read_messages_to, "columns": read_columns_to}[read]
    chosen = list(cases())
    # Columns use the same fetch responses; only their decoder is another.
    for number, spot, fetch_bytes, warm, on_damage, given_tag in chosen if read == "messages" else chosen[::3]:
        tag = given_tag if read == "messages" else None
        case = f"block {number}, {spot}, {fetch_bytes=}, {warm=}, {on_damage=}, {tag=}"
        first, next = list(pairwise(edges))[number]
        place = (first if SPOTS[spot] >= 0 else next) + SPOTS[spot]
        sound = broker.disk.read_file(SEGMENT)[place : place + 1]
        wanted = [n for n in range(COUNT) if n != number and (tag is None or (tag == "even" and n % 2 == 0))]
        options = {"topics": "orders", "fetch_bytes": fetch_bytes, "tags": tag}
        broker.start()
        if warm:
            with broker.consumer(**options) as consumer:
                broker.drain(consumer)
        broker.disk.damage(SEGMENT, place, bytes([sound[0] ^ 0x10]))
        try:
            with broker.consumer(on_damage=on_damage, **options) as consumer:
                if on_damage == "skip":
                    assert read_to(consumer, edges[-1]) == wanted, case
                    assert [each[1:3] for each in consumer.stats()["skipped_ranges"]] == [(first, next)], case
                else:
                    found: list[int] = []
                    with pytest.raises(Damaged) as caught:
                        read_to(consumer, edges[-1], found)
                    assert found == [n for n in wanted if n < number], case
                    assert (caught.value.first, caught.value.next) == (first, next), case
        finally:
            broker.disk.damage(SEGMENT, place, sound)
            broker.stop()


def read_messages_to(consumer: Consumer, end: int, found: list[int] | None = None) -> list[int]:
    """The numbers of the messages up to offset `end`; what has not come by then never comes."""
    found = [] if found is None else found
    for _ in range(3 * COUNT):
        if consumer.position("orders", 0) >= end:
            break
        for message in consumer.poll(timeout=0.1, max_messages=7):
            number = int(message.payload[:3])
            assert message.payload == payload_of(number)
            found.append(number)
    else:
        raise AssertionError(f"it stands at {consumer.position('orders', 0)} and never reaches {end}")
    assert consumer.poll(timeout=0.1) == []
    return found


def read_columns_to(consumer: Consumer, end: int, found: list[int] | None = None) -> list[int]:
    """The same by `arrow_batches`."""
    found = [] if found is None else found
    for _ in range(3 * COUNT):
        if consumer.position("orders", 0) >= end:
            return found
        for rows in consumer.arrow_batches(["value"], timeout=0.1):
            for payload in rows.column("value").to_pylist():
                assert payload == payload_of(int(payload[:3]))
                found.append(int(payload[:3]))
    raise AssertionError(f"it stands at {consumer.position('orders', 0)} and never reaches {end}")
