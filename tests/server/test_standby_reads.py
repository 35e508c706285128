"""What a standby with `replicate.read` answers from a folder that another server's operations change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.broker.helpers import Answer, Broker, Randomness, Session, config, payloads_of
from tests.server.test_access_control import user
from tfmq.protocol import commands
from tfmq.protocol.commands import BY_LATEST, BY_ORDINAL, BY_TIME_MS, Fetch, Locate, Metadata
from tfmq.server.access_control import AccessControl, Account
from tfmq.server.standby_handler import StandbyHandler
from tfmq.server.standby_reads import OPEN_LOGS_MAX, REFRESH_SECONDS, StandbyReads

MARK_SECONDS = 1.0
"""How long a durable offset may take to get into `log.mark`."""


class Standby:
    """`StandbyReads` on the folder of a broker, in which the broker's changes arrive at once."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.version: int | None = 1
        self.correlation = 0
        self.later: list[Callable[[], None]] = []
        self.reads = StandbyReads(
            config(),
            broker.disk,
            broker.clock,
            broker.do,
            Randomness(),
            lambda seconds, call: self.later.append(call),
            lambda: self.version,
        )

    def ask(self, request: Any, session: Any = None) -> Answer:
        self.correlation += 1
        answer = Answer(self.correlation, commands.BY_REQUEST[type(request)].reply.shape)
        self.reads.handle(request, b"", answer, session or self.broker.session)
        return answer

    def fetch(self, offset: int = 0, topic: str = "orders", partition: int = 0, **fields: Any) -> Answer:
        incarnation = fields.pop("incarnation", None) or self.broker.incarnation(topic)
        return self.ask(Fetch(topic, incarnation, partition, offset, **fields))

    def advance(self, seconds: float = REFRESH_SECONDS) -> None:
        """Time goes on at the primary, and then the standby looks at its folder again."""
        self.broker.advance(seconds)
        later, self.later = self.later, []
        for call in later:
            call()


@pytest.fixture
def standby() -> Standby:
    broker = Broker()
    broker.create(partitions=2)
    return Standby(broker)


def produce(standby: Standby, *payloads: bytes) -> None:
    """Send them, and wait until the standby may have them."""
    broker = standby.broker
    for payload in payloads:
        assert broker.produce(broker.lease(), 0, [payload]).code == "ok"
    broker.advance(MARK_SECONDS)


def test_a_consumer_reads_what_the_primary_has_made_durable(standby: Standby) -> None:
    produce(standby, b"a", b"b")
    (row,) = standby.ask(Metadata(["orders", "unknown"])).topics
    assert row == ("orders", standby.broker.incarnation(), [(0, "open"), (1, "open")], {})
    first, primary = standby.fetch(max_bytes=1), standby.broker.fetch(max_bytes=1)
    assert first.fields == primary.fields and first.body == primary.body
    assert payloads_of(standby.fetch(first.next), first.next) == [b"b"]
    for by, value in ((commands.BY_EARLIEST, 0), (BY_LATEST, 0), (BY_ORDINAL, 1), (BY_TIME_MS, 0)):
        found = standby.ask(Locate("orders", standby.broker.incarnation(), 0, by, value))
        assert found.fields == standby.broker.locate(by, value).fields


def test_nothing_is_read_before_it_is_durable(standby: Standby) -> None:
    broker = standby.broker
    assert broker.produce(broker.lease(), 0, [b"a"], acks=commands.ACKS_WRITTEN).code == "ok"
    assert payloads_of(broker.fetch(read=commands.READ_WRITTEN)) == [b"a"]
    assert standby.fetch(read=commands.READ_WRITTEN).body == b""


def test_who_has_read_more_elsewhere_is_told_to_ask_again(standby: Standby) -> None:
    """A consumer that continued at another offset for this would lose or repeat messages."""
    produce(standby, b"a")
    end = standby.fetch().next
    ahead = standby.fetch(end + 100)
    assert ahead.code == "busy" and f"up to offset {end}" in str(ahead.failure)
    assert standby.broker.fetch(end + 100).code == "offset_out_of_range", "the primary knows the end"
    for by in (commands.BY_OFFSET, BY_ORDINAL):
        locate = Locate("orders", standby.broker.incarnation(), 0, by, end + 100)
        assert standby.ask(locate).code == "busy" and standby.broker.locate(by, end + 100).offset == end


def test_a_fetch_waits_for_the_next_message_and_not_longer_than_it_asked_for(standby: Standby) -> None:
    first, second = standby.fetch(wait_ms=5000), standby.fetch(partition=1, wait_ms=5000)
    standby.advance()
    assert first.code == second.code == "waiting"
    produce(standby, b"a")
    standby.advance()
    assert payloads_of(first) == [b"a"] and second.code == "waiting"
    standby.advance(5)
    assert second.body == b"" and second.code == "ok"
    standby.advance()
    assert standby.later == [], "nothing is looked at when nothing waits"


def test_a_waiting_fetch_can_be_cancelled(standby: Standby) -> None:
    waiting = standby.fetch(wait_ms=5000)
    assert standby.ask(commands.Cancel(waiting.correlation)).fields[0] is True
    assert waiting.code == "ok" and waiting.body == b""


def test_a_topic_that_was_deleted_and_made_again_is_another_one(standby: Standby) -> None:
    produce(standby, b"old")
    incarnation = standby.broker.incarnation()
    assert payloads_of(standby.fetch()) == [b"old"]
    waiting = standby.fetch(standby.fetch().next, wait_ms=5000)
    standby.broker.delete()
    assert standby.fetch(incarnation=incarnation).code == "unknown_topic"
    standby.broker.create()
    produce(standby, b"new")
    (row,) = standby.ask(Metadata(None)).topics
    assert row[:2] == ("orders", standby.broker.incarnation()) and row[1] != incarnation
    assert waiting.code == "unknown_topic"
    assert payloads_of(standby.fetch()) == [b"new"]
    assert standby.fetch(incarnation=incarnation).code == "unknown_topic"
    assert standby.fetch(partition=1).code == "unknown_partition"


def test_while_the_folder_is_made_again_requests_are_told_to_wait_and_then_nothing_old_is_served(
    standby: Standby,
) -> None:
    produce(standby, b"a")
    assert payloads_of(standby.fetch()) == [b"a"]
    waiting = standby.fetch(partition=1, wait_ms=60_000)
    standby.version = None
    assert standby.fetch().code == standby.ask(Metadata(None)).code == "busy"
    standby.advance()
    assert waiting.code == "busy"
    other = Broker()
    other.create()
    assert other.produce(other.lease(), 0, [b"other"]).code == "ok"
    other.advance(MARK_SECONDS)
    disk = standby.broker.disk
    for name in disk.list("/data/orders-0"):
        path = f"/data/orders-0/{name}"
        disk.unlink(path)
        with_bytes = other.disk.read_file(path)
        disk.create(path).close()
        disk.write_file(path, with_bytes)
    standby.version = 2
    assert payloads_of(standby.fetch()) == [b"other"]


def test_more_logs_than_may_have_open_files_are_read(standby: Standby) -> None:
    broker = standby.broker
    count = OPEN_LOGS_MAX + 6
    broker.create("many", count)
    for number in range(count):
        assert broker.produce(broker.lease(), 0, [b"%d" % number], topic="many", partition=number).code == "ok"
    broker.advance(MARK_SECONDS)
    for _ in range(2):
        for number in range(count):
            assert payloads_of(standby.fetch(topic="many", partition=number)) == [b"%d" % number]
    opened = [each for each in standby.reads.topics.partitions() if each.log._log and each.log._log._open_files]
    assert len(opened) == OPEN_LOGS_MAX


def test_users_see_and_read_only_what_they_may(standby: Standby) -> None:
    standby.broker.create("secret")
    produce(standby, b"a")
    access = AccessControl("", standby.reads.handle, lambda: standby.reads, standby.broker.clock, Randomness())  # type: ignore[arg-type,return-value]
    handler = StandbyHandler(lambda: "", lambda done: None, lambda: 0, access, standby.reads)
    session: Any = Session()
    session.account = Account(user("reader", "read:orders"), lambda: 0.0)

    def ask(request: Any) -> Answer:
        answer = Answer(1, commands.BY_REQUEST[type(request)].reply.shape)
        handler.handle(request, b"", answer, session)
        return answer

    assert [row[0] for row in ask(Metadata(None)).topics] == ["orders"]
    assert payloads_of(ask(Fetch("orders", standby.broker.incarnation(), 0, 0))) == [b"a"]
    assert ask(Fetch("secret", standby.broker.incarnation("secret"), 0, 0)).code == "forbidden"


def test_damage_of_one_topic_is_logged_once_and_the_others_are_read(
    standby: Standby, caplog: pytest.LogCaptureFixture
) -> None:
    standby.broker.create("bills")
    path = "/data/bills-0/log.mark"
    standby.broker.disk.write_file(path, b"x" * len(standby.broker.disk.read_file(path)))
    produce(standby, b"a")
    for _ in range(2):
        assert [row[0] for row in standby.ask(Metadata(None)).topics] == ["orders"]
        standby.advance(2)
    assert payloads_of(standby.fetch()) == [b"a"]
    assert [record.getMessage() for record in caplog.records if "cannot read bills-0" in record.getMessage()] != []
    assert len(caplog.records) == 1
