"""Where a partition's reading begins, when several answers would do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pytest

from tests.client.scripted_broker import Broker, Script
from tfmq.client.consumer.assignment import MISSING_SECONDS_MAX, NOTIFIED_REFRESH_SECONDS
from tfmq.errors import BadRequest, Busy, NotSupported
from tfmq.message import Ordinal
from tfmq.offsets.storage import PartitionName, StoredOffset, fenced
from tfmq.protocol import commands as wire


def saved(broker: Broker, partition: int, offset: int, index: int = 0, incarnation: int | None = None) -> None:
    inc = incarnation or broker.topics["orders"][0]
    row = wire.SavedOffset("orders", inc, partition, offset, index, 1, 1)
    broker.offsets.setdefault("g", {})["orders", partition] = row


def two(broker: Broker) -> Any:
    broker.create("orders", 2)
    for log in broker.topics["orders"][1]:
        log.append(b"old")
        log.append(b"new")
    return broker.topics["orders"][1]


def starts(script: Script) -> dict[int, int]:
    script.poll(0.0)
    script.run(script.core._wait_for_partitions(script.link.now() + 10))
    return {
        name.partition: script.core.positions.delivered_position(name).offset for name in script.core.fetcher.partitions
    }


def test_the_groups_offset_comes_first_and_a_partition_it_never_had_is_a_new_one() -> None:
    broker = Broker()
    logs = two(broker)
    saved(broker, 0, logs[0].pieces[1].offset)
    assert starts(Script(broker, group="g", start="latest", refresh_every=1000)) == {0: logs[0].pieces[1].offset, 1: 0}


def test_a_group_without_any_offset_begins_at_the_configured_start() -> None:
    broker = Broker()
    logs = two(broker)
    assert starts(Script(broker, group="g", start="latest")) == {0: logs[0].end, 1: logs[1].end}


@pytest.mark.parametrize("commits", ["auto", "manual", "before"])
def test_what_came_after_latest_is_not_passed_over_where_its_first_member_dies_at_once(commits: str) -> None:
    """The end that the first member saw is saved before it reads anything, whatever is saved later."""
    broker = Broker()
    logs = two(broker)
    first = Script(broker, group="g", start="latest", commits=commits)
    assert starts(first) == {0: logs[0].end, 1: logs[1].end}
    for log in logs:
        log.append(b"news")
    broker.take_over("g")
    broker.thieves.clear()
    assert Script(broker, group="g", start="latest").poll(count=3) == [b"news", b"news"]


def test_latest_is_where_the_ends_were_at_the_first_look_whenever_a_partition_comes() -> None:
    """Neither is passed over what is sent while it has no owner, nor is all read because another partition is saved."""
    broker = Broker()
    logs = two(broker)
    grants = broker._grants
    broker._grants = lambda wishes, generation: grants(wishes, generation)[:1]  # type: ignore[method-assign]
    script = Script(broker, group="g", start="latest", session=9)
    script.poll(0.0)
    script.pass_time(1)
    logs[1].append(b"news")
    broker._grants = grants  # type: ignore[method-assign]
    assert script.poll(20) == [b"news"]


def test_an_end_that_cannot_be_asked_for_now_is_asked_for_again() -> None:
    broker = Broker()
    two(broker)
    broker.fail[wire.Locate] = [Busy("planted")] * 3
    script = Script(broker, group="g", start="latest")
    assert script.poll(0.0) == []
    script.pass_time(5)
    logs = broker.topics["orders"][1]
    assert starts(script) == {0: logs[0].end, 1: logs[1].end}


def test_a_first_place_that_is_refused_is_another_members_to_choose() -> None:
    broker = Broker()
    logs = two(broker)
    broker.stolen.add(("orders", broker.topics["orders"][0], 0))
    script = Script(broker, group="g", start="latest")
    membership = script.core.membership
    assert membership is not None
    with patch.object(membership, "partitions_fenced", wraps=membership.partitions_fenced) as given_up:
        script.poll(1.0)
    assert {name.partition for name in script.core.fetcher.partitions} == {1}
    assert {name.partition for call in given_up.call_args_list for name in call.args[0]} == {0}
    broker.stolen.clear()
    assert starts(script) == {1: logs[1].end}
    script.pass_time(20)
    assert starts(script) == {0: logs[0].end, 1: logs[1].end}


def test_all_places_are_asked_for_at_once() -> None:
    broker = Broker()
    two(broker)
    script = Script(broker, start=Ordinal(1))
    operation = script.core.poll(0.0, 1)
    next(operation)
    script.link.serve()
    script.core.tasks.tick()
    assert len(broker.sent(wire.Locate)) == 2


def test_an_offset_of_another_incarnation_is_of_another_log() -> None:
    broker = Broker()
    two(broker)
    saved(broker, 0, 5, incarnation=99)
    assert starts(Script(broker, group="g")) == {0: 0, 1: 0}


def test_a_place_inside_a_compressed_batch_is_refused() -> None:
    broker = Broker()
    two(broker)
    saved(broker, 0, 0, index=3)
    with pytest.raises(NotSupported, match="compressed"):
        starts(Script(broker, group="g"))


def test_a_missing_topic_is_looked_for_once_a_second_at_the_most() -> None:
    broker = Broker()
    Script(broker).poll(30)
    assert 30 <= len(broker.sent(wire.Metadata)) <= 30 / MISSING_SECONDS_MAX + 6


def test_offsets_in_a_transaction_in_doubt_are_waited_for_however_long(caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker()
    old, _ = two(broker)
    saved(broker, 0, old.pieces[1].offset)
    broker.fail[wire.ReadOffsets] = [Busy("order-42 has them", xid="order-42")] * 50
    script = Script(broker, group="g", start="latest")
    assert script.poll(1.0) == []
    script.pass_time(30)
    assert caplog.text.count("Group g waits for its offsets: order-42 has them") == 1
    assert len(broker.sent(wire.Heartbeat)) >= 2
    script.pass_time(30)
    assert starts(script) == {0: old.pieces[1].offset, 1: 0}
    assert broker.fail[wire.ReadOffsets] == []


def lock(broker: Broker, xid: str, *partitions: int) -> None:
    """A transaction in doubt has the offsets of these partitions, as the broker answers it."""
    really = type(broker).on_readoffsets

    def busy(request: wire.ReadOffsets) -> Any:
        wanted = None if request.partitions is None else {each.partition for each in request.partitions}
        if wanted is None or not wanted.isdisjoint(partitions):
            raise Busy(f"{xid} has them", xid=xid)
        return really(broker, request)

    broker.on_readoffsets = busy  # type: ignore[method-assign]


@pytest.mark.parametrize("start", ["earliest", "latest"])
@pytest.mark.parametrize("locked", range(5))
def test_an_offset_in_doubt_keeps_back_its_own_partition_only(
    start: str, locked: int, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker()
    broker.create("orders", 5)
    for partition, log in enumerate(broker.topics["orders"][1]):
        log.append(b"old")
        log.append(b"new")
        saved(broker, partition, log.pieces[1].offset)
    lock(broker, "order-42", locked)
    script = Script(broker, group="g", start=start)
    assert len(script.poll(1.0)) > 0
    assert {name.partition for name in script.core.fetcher.partitions} == set(range(5)) - {locked}
    script.pass_time(30)
    assert caplog.text.count("Group g waits for its offsets: order-42 has them") == 1
    assert "tfmq.sql" not in caplog.text
    lock(broker, "order-42")
    script.pass_time(5)
    assert {name.partition for name in script.core.fetcher.partitions} == set(range(5))


def test_the_first_transaction_of_a_group_in_doubt_keeps_back_its_own_partition_only() -> None:
    broker = Broker()
    two(broker)
    lock(broker, "order-42", 0)
    script = Script(broker, group="g", start="earliest")
    assert len(script.poll(1.0)) > 0
    assert {name.partition for name in script.core.fetcher.partitions} == {1}


def test_a_group_that_waits_for_a_transaction_of_tfmq_sql_is_notified_what_ends_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = Broker()
    two(broker)
    lock(broker, "tfmq.sql.b48c.3f4c", 0, 1)
    script = Script(broker, group="g")
    assert script.poll(1.0) == []
    assert caplog.text.count("Group g waits for its offsets: tfmq.sql.b48c.3f4c has them") == 1
    assert caplog.text.count("tfmq.sql.check(producer, engine)") == 1


def test_a_question_that_the_broker_refuses_is_reported() -> None:
    broker = Broker()
    two(broker)
    broker.fail[wire.Locate] = [BadRequest("planted"), BadRequest("planted")]
    with pytest.raises(BadRequest, match="planted"):
        Script(broker).poll()


def test_a_topic_that_goes_between_two_questions_is_waited_for() -> None:
    broker = Broker()
    two(broker)
    script = Script(broker, partitions=[("orders", 0)])
    rows = broker.on_metadata(wire.Metadata(None))
    del broker.topics["orders"]
    broker.on_metadata = lambda request: rows  # type: ignore[method-assign]
    assert script.poll(1) == []
    assert PartitionName("orders", 0) not in script.core.fetcher.partitions


def test_what_was_asked_about_a_partition_that_went_meanwhile_begins_nothing() -> None:
    broker = Broker()
    two(broker)
    script = Script(broker, group="g")
    answer, grants, membership = broker.on_readoffsets, broker._grants, script.core.membership
    assert membership is not None

    def gone_by_then(request: wire.ReadOffsets) -> Any:
        broker._grants = lambda *asked: grants(*asked)[1:]  # type: ignore[method-assign]
        membership.partitions_fenced([PartitionName("orders", 0)])
        return answer(request)

    broker.on_readoffsets = gone_by_then  # type: ignore[method-assign]
    script.poll(0.0)
    script.pass_time(3)
    assert [name.partition for name in script.core.fetcher.partitions] == [1]
    assert PartitionName("orders", 0) not in script.core.positions


class Claimed:
    """A storage that says what it was asked, and knows later owners of `later`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.later: set[PartitionName] = set()

    def read(self, group: str, partitions: Sequence[PartitionName]) -> Mapping[PartitionName, StoredOffset]:
        self.asked.append("read")
        return {}

    def claim(
        self, group: str, generation: int, partitions: Sequence[PartitionName]
    ) -> Mapping[PartitionName, StoredOffset]:
        self.asked.append("claim")
        if refused := self.later.intersection(partitions):
            raise fenced("storage", group, dict.fromkeys(refused, 9))
        return {}

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        self.asked.append("save")

    def close(self) -> None:
        self.asked.append("close")


def test_a_storage_takes_nothing_of_the_former_owner_before_anything_is_read() -> None:
    broker, storage = Broker(), Claimed()
    two(broker)
    assert starts(Script(broker, group="g", offsets=storage)).keys() == {0, 1}
    assert storage.asked[0] == "claim"


def test_a_partition_of_which_the_storage_knows_a_later_owner_is_not_read_until_it_does_not() -> None:
    broker, storage = Broker(), Claimed()
    two(broker)
    storage.later.add(PartitionName("orders", 1))
    script = Script(broker, group="g", offsets=storage)
    assert starts(script).keys() == {0}
    storage.later.clear()
    script.pass_time(5)
    assert starts(script).keys() == {0, 1}


# When a consumer looks for topics: seldom where it is notified of changes, often where it is not.

SECONDS = 100


def looks(broker: Broker, script: Script, seconds: float = SECONDS) -> int:
    """How often it asks for the topics while it waits so long for messages, once it reads."""
    script.poll(0.0)
    before = len(broker.sent(wire.Metadata))
    assert script.poll(seconds) == []
    return len(broker.sent(wire.Metadata)) - before


@pytest.mark.parametrize("arguments", [{}, {"group": "g"}, {"topics": None, "partitions": [("orders", 0)]}])
def test_who_waits_for_messages_does_not_ask_what_there_is(arguments: dict[str, Any]) -> None:
    broker = Broker()
    broker.create("orders", 2)
    script = Script(broker, **arguments)
    assert looks(broker, script) == 0
    fetches = NOTIFIED_REFRESH_SECONDS / 30
    assert 1 <= looks(broker, script, NOTIFIED_REFRESH_SECONDS) <= fetches, "at the end of a fetch it cannot know"


@pytest.mark.parametrize("arguments", [{"topics": re.compile("ord.*")}, {"topics": re.compile("ord.*"), "group": "g"}])
def test_topics_of_a_pattern_are_looked_for_in_time(arguments: dict[str, Any]) -> None:
    broker = Broker()
    broker.create("orders")
    assert SECONDS / 5 - 2 <= looks(broker, Script(broker, **arguments)) <= SECONDS / 5 + 2


def test_who_asks_the_broker_for_nothing_looks_in_time() -> None:
    """A partition that is paused brings no replies that could name new ones."""
    broker = Broker()
    broker.create("orders").append(b"x")
    script = Script(broker, fetch_bytes=1, prefetch_bytes=1)
    script.poll(1)
    script.run(script.core.pause("orders", 0))
    broker.topics["orders"][1][0].append(b"y")
    script.pass_time(40)
    assert SECONDS / 5 - 2 <= looks(broker, script) <= SECONDS / 5 + 2


@pytest.mark.parametrize("group", [None, "g"])
def test_a_partition_that_appears_is_read_at_once(group: str | None) -> None:
    broker = Broker()
    broker.create("orders").append(b"old")
    script = Script(broker, group=group)
    assert script.poll() == [b"old"]
    script.pass_time(7)
    broker.grow("orders").append(b"new")
    assert script.poll(20 if group else 1) == [b"new"]


def test_answers_that_are_never_what_is_found_do_not_make_it_look_again_and_again() -> None:
    broker = Broker()
    broker.create("orders").append(b"x")
    script = Script(broker)
    script.poll()
    for count in (3, 3, 3):
        script.core.assignment.partition_count_seen("orders", count)
        script.pass_time(1)
    assert len(broker.sent(wire.Metadata)) == 2


def test_a_member_that_names_a_partition_is_given_it_when_it_appears() -> None:
    broker = Broker()
    broker.create("orders")
    script = Script(broker, group="g", partitions=[0, 1], topics="orders")
    script.poll(0.0)
    broker.grow("orders").append(b"new")
    broker.grow("orders").append(b"not asked for")
    assert script.poll(20) == [b"new"]
    assert script.poll(20) == []
