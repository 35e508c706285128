"""The room that is kept on a disk for changes that make room: given piece by piece, made again when there is space."""

import errno
import zlib

import pytest

from journal.errors import Full
from journal.log.log import Log
from tests.broker.helpers import DATA, Broker
from tfmq.broker import reserve as module
from tfmq.broker.catalog_state import DELETE, GENERATION
from tfmq.broker.reserve import FREE_BYTES_MIN, PIECE_BYTES, PIECE_COUNT, RECOVERED_SECONDS, SIZE_BYTES

PATH = f"{DATA}/meta/reserve"


def filled(count: int = 1) -> Broker:
    """A broker with `count` topics on a disk without a free byte."""
    broker = Broker()
    for number in range(count):
        broker.create(f"topic{number}")
    broker.disk.space_bytes = broker.disk.used_bytes()
    return broker


def topics(broker: Broker) -> list[str]:
    return [topic.name for topic in broker.engine.broker.topics.values()]


def size(broker: Broker) -> int:
    return broker.disk.size(PATH)


def test_a_topic_is_deleted_on_a_disk_without_a_free_byte() -> None:
    broker = filled()
    assert broker.create("more").code == "disk_full"
    assert size(broker) == SIZE_BYTES, "only what makes room takes of it"
    assert broker.delete("topic0").code == "ok"
    assert topics(broker) == []
    assert size(broker) < SIZE_BYTES


def test_the_deletion_lasts_and_the_room_is_made_again_at_the_next_start() -> None:
    broker = filled()
    assert broker.delete("topic0").code == "ok"
    again = Broker(broker.disk.crash(keep="nothing"))
    assert topics(again) == []
    assert size(again) == SIZE_BYTES


def test_the_room_is_made_again_while_the_broker_runs() -> None:
    broker = filled()
    assert broker.delete("topic0").code == "ok"
    broker.disk.space_bytes = None
    assert broker.create("one").code == "ok"
    assert size(broker) < SIZE_BYTES, "not at once: the disk was full a moment ago"
    broker.clock.advance(module.RETRY_SECONDS)
    assert broker.create("two").code == "ok"
    assert size(broker) == SIZE_BYTES


def test_other_writes_of_that_turn_get_the_error_of_the_full_disk() -> None:
    broker = filled()
    found: list[BaseException | None] = []
    catalog = broker.engine.broker.catalog
    incarnation = broker.incarnation("topic0")
    catalog.submit((GENERATION, "group", 1, "m"), found.append)
    catalog.submit((DELETE, incarnation), found.append)
    broker.engine.broker.end_turn()
    assert [getattr(error, "code", None) for error in found] == ["disk_full", None]
    assert not catalog._queue


def test_a_reserve_that_is_used_up_leaves_deletions_refused_and_nothing_done() -> None:
    broker = filled()
    broker.engine.broker.catalog.reserve.release_piece()
    for _ in range(PIECE_COUNT):
        broker.engine.broker.catalog.reserve.release_piece()
    broker.disk.space_bytes = broker.disk.used_bytes()
    assert size(broker) == 0
    assert not broker.engine.broker.catalog.reserve.release_piece()
    assert broker.delete("topic0").code == "disk_full"
    assert topics(broker) == ["topic0"]


def test_a_piece_is_what_one_give_frees() -> None:
    broker = filled()
    assert broker.engine.broker.catalog.reserve.release_piece()
    assert size(broker) == SIZE_BYTES - PIECE_BYTES
    assert broker.disk.free_space(DATA) == PIECE_BYTES


def test_it_takes_its_room_on_a_file_system_that_compresses_too() -> None:
    content = Broker().disk.read_file(PATH)
    assert len(content) == SIZE_BYTES < len(zlib.compress(content))


def test_a_small_disk_keeps_its_last_room_for_messages() -> None:
    broker = Broker()
    broker.disk.unlink(PATH)
    disk = broker.disk.crash(keep="all")
    disk.space_bytes = disk.used_bytes() + FREE_BYTES_MIN - 1
    again = Broker(disk)
    assert not again.disk.exists(PATH)


def test_room_that_cannot_be_made_whole_again_is_kept_as_it_is() -> None:
    """A quota, for example: the file system says that there is room, and gives none."""
    broker = filled()
    assert broker.delete("topic0").code == "ok"
    left = size(broker)
    broker.disk.space_bytes = None
    broker.clock.advance(module.RETRY_SECONDS)
    broker.disk.faults.fail("write", error=errno.EDQUOT, path=PATH)
    assert broker.create("one").code == "ok"
    assert size(broker) == left
    broker.disk.space_bytes = broker.disk.used_bytes()
    assert broker.delete("one").code == "ok"


def test_a_broker_starts_where_the_room_cannot_be_made() -> None:
    broker = Broker()
    broker.disk.unlink(PATH)
    disk = broker.disk.crash(keep="all")
    disk.faults.fail("create", path=PATH, times=None)
    again = Broker(disk)
    assert again.create("one").code == "ok"


def test_a_deletion_that_a_full_disk_cut_short_is_ended_by_the_next_start() -> None:
    """The decision fits, what says that its files are gone does not: the start must not be refused for that."""
    broker = filled()
    incarnation = broker.incarnation("topic0")
    broker.engine.broker.catalog.reserve.release_piece()
    broker.engine.broker.catalog.append_now((DELETE, incarnation))
    disk = broker.disk.crash(keep="all")
    disk.space_bytes = disk.used_bytes()
    again = Broker(disk)
    assert topics(again) == []


# What the log says of a full disk


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of a full disk, in a word each."""
    texts = [record.getMessage() for record in caplog.records]
    return [
        "full" if "no space is left on the disk" in text else "again"
        for text in texts
        if "no space is left on the disk" in text or "take messages again" in text
    ]


class Sender:
    """Sends single messages to a topic of its own; one that is refused is sent again by the next."""

    def __init__(self, broker: Broker, topic: str) -> None:
        broker.create(topic)
        self.broker, self.topic, self.id, self.sequence = broker, topic, broker.lease(), 0

    def __call__(self, size: int) -> str:
        code = self.broker.produce(self.id, self.sequence, [b"x" * size], topic=self.topic).code
        self.sequence += code == "ok"
        return code


def test_a_full_disk_is_one_line_however_much_is_sent_and_its_end_one_more(caplog: pytest.LogCaptureFixture) -> None:
    """Also where smaller messages, or those of another partition, still find room between the refused ones."""
    caplog.set_level("INFO", logger="tfmq.broker")
    broker = Broker()
    orders, bills = Sender(broker, "orders"), Sender(broker, "bills")
    assert (orders(1), bills(1)) == ("ok", "ok")
    for number in range(50):
        broker.disk.space_bytes = broker.disk.used_bytes() + 1_000
        assert (orders, bills)[number % 2](5_000) == "disk_full"
        assert (bills, orders)[number % 2](1) == "ok"
        broker.advance(0.5)
    assert lines(caplog) == ["full"]
    broker.disk.space_bytes = broker.disk.used_bytes()
    broker.advance(3 * RECOVERED_SECONDS)
    assert lines(caplog) == ["full"], "nothing was sent, so nothing is known"
    broker.disk.space_bytes = None
    assert orders(5_000) == "ok"
    broker.advance(1)
    assert lines(caplog) == ["full", "again"]


def without_descriptors(*_: object, **__: object) -> None:
    """As a log's next segment file is made where the process has no descriptor left."""
    raise Full("/data/orders-0: Too many open files") from OSError(errno.EMFILE, "Too many open files")


def test_a_want_of_descriptors_is_one_line_and_its_end_one_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tfmq.broker")
    broker = Broker()
    orders = Sender(broker, "orders")
    monkeypatch.setattr(Log, "append", without_descriptors)
    for _ in range(20):
        assert orders(100) == "busy"
        broker.advance(0.5)
    monkeypatch.undo()
    assert orders(100) == "ok"
    broker.advance(2 * RECOVERED_SECONDS)
    reported = [
        each.getMessage()
        for each in caplog.records
        if "take messages" in each.getMessage() or "files" in each.getMessage()
    ]
    assert reported[0].startswith("no more files can be opened (ulimit -n): orders-0 takes no messages")
    assert reported[1:] == ["files can be opened: partitions take messages again"]


def test_a_disk_that_flaps_is_reported_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="tfmq.broker")
    broker = Broker()
    orders = Sender(broker, "orders")
    for number in range(400):  # of 0.25 s, 100 in all
        broker.disk.space_bytes = None if number % 48 >= 4 else 1
        orders(1)
        broker.advance(0.25)
    reported = lines(caplog)
    assert reported[:4] == ["full", "again"] * 2
    assert len(reported) <= 2 * 100 / RECOVERED_SECONDS
