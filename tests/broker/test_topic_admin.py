"""Topics come, grow and go; in the middle of each step the power may go."""

import random
from typing import Any

import pytest

from journal.testing import Moment, crash_states
from tests.broker.helpers import DATA, Broker, config
from tests.scale import SEED, scaled
from tfmq.config import load
from tfmq.protocol.commands import (
    CreateTopic,
    DeleteTopic,
    DescribeTopic,
    GrowTopic,
    Metadata,
    ResumePartition,
    SetTopic,
)


@pytest.mark.parametrize("count, words", [(1, "1 partition"), (3, "3 partitions")])
def test_a_topic_made_on_first_use_is_logged_with_its_partitions(
    caplog: pytest.LogCaptureFixture, count: int, words: str
) -> None:
    caplog.set_level("INFO", "tfmq")
    Broker(topics__partitions=count).ask(Metadata(["orders"], True))
    (line,) = [each.getMessage() for each in caplog.records if "on first use" in each.getMessage()]
    assert line.startswith("create topic orders on first use") and line.endswith(f": done, {words}")


def test_a_topic_is_made_on_first_use_and_never_by_reading() -> None:
    broker = Broker(topics__partitions=3)
    assert broker.ask(Metadata(["orders"], False)).topics == []
    (row,) = broker.ask(Metadata(["orders"], True)).topics
    assert (row[0], len(row[2])) == ("orders", 3)
    assert [tuple(each) for each in row[2]] == [(0, "open"), (1, "open"), (2, "open")]


def test_first_use_can_be_switched_off() -> None:
    broker = Broker(topics__auto_create=False)
    assert broker.ask(Metadata(["orders"], True)).code == "unknown_topic"
    broker.create()
    assert len(broker.ask(Metadata(["orders"], True)).topics) == 1


def test_all_topics_are_listed_by_name() -> None:
    broker = Broker()
    for name in ("b", "a"):
        broker.create(name)
    assert [row[0] for row in broker.ask(Metadata(None, False)).topics] == ["a", "b"]


def test_a_topic_is_made_once() -> None:
    broker = Broker()
    assert broker.create(partitions=2).partitions == 2
    assert broker.create(partitions=2).code == "topic_exists"


def test_two_who_make_the_same_topic_at_once_get_one_topic() -> None:
    broker = Broker(queued=True)
    answers = [broker.ask(Metadata(["orders"], True), turn=False) for _ in range(2)]
    explicit = broker.ask(CreateTopic("orders", 1, {}))
    broker.work()
    assert answers[0].topics == answers[1].topics != []
    assert explicit.code == "topic_exists"


def test_settings_of_its_own_are_checked_and_used() -> None:
    broker = Broker()
    assert broker.create(nonsense__key=1).code == "bad_request"
    assert broker.create(flush__messages="many").code == "bad_request"
    broker.create(flush__messages=7)
    assert broker.log().options.flush_messages == 7
    assert broker.restart().log().options.flush_messages == 7


def test_settings_change_without_a_restart_and_outlive_one() -> None:
    broker = Broker(flush__messages=50)
    broker.create(flush__messages=7)
    log = broker.log()
    answer = broker.ask(SetTopic("orders", 0, {"retention.seconds": "1h", "retention.action": "archive"}, []))
    assert answer.settings == {"flush.messages": 7, "retention.seconds": 3600, "retention.action": "archive"}
    assert (log.options.retention_seconds, log.options.flush_messages) == (3600, 7)
    assert log.options.archive_folder is not None and broker.disk.exists(log.options.archive_folder)
    assert broker.ask(SetTopic("orders", 0, {}, ["flush.messages"])).code == "ok"
    assert log.options.flush_messages == 50
    again = broker.crashed(broker.disk.crash(keep="nothing")).log().options
    assert (again.retention_seconds, again.flush_messages) == (3600, 50)


def test_settings_are_answered_once_they_are_on_the_disk() -> None:
    broker = Broker(queued=True)
    broker.create()
    answer = broker.ask(SetTopic("orders", broker.incarnation(), {"flush.messages": 3}, []))
    assert not answer.done and broker.log().options.flush_messages == 1000
    broker.work()
    assert answer.code == "ok" and broker.log().options.flush_messages == 3


def test_settings_with_an_archive_hold_when_they_are_answered() -> None:
    broker = Broker(queued=True)
    broker.create()
    answer = broker.ask(SetTopic("orders", 0, {"retention.seconds": 60, "retention.action": "archive"}, []))
    while not answer.done:
        broker.step()
    assert broker.log().options.retention_action == "archive"


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("grows", [False, True])
def test_a_configuration_read_while_a_log_is_made_holds_for_that_log(steps: int, grows: bool) -> None:
    broker = Broker(queued=True)
    if grows:
        broker.create()
    answer = broker.ask(GrowTopic("orders", 2) if grows else CreateTopic("orders", 1, {}))
    for _ in range(steps):
        if broker.jobs:
            broker.step()
    broker.engine.broker.reload(config(flush__messages=7))
    broker.work()
    assert answer.code == "ok"
    assert broker.log("orders", 1 if grows else 0).options.flush_messages == 7


def test_settings_that_cannot_change_are_refused_in_a_sentence() -> None:
    broker = Broker()
    broker.create()
    broker.engine.broker.reload(load(flags={"server.data": DATA}, sets=['topic."orders".flush.messages=1']))
    for settings, unset, code, word in (
        ({"topics.partitions": 3}, [], "bad_request", "tfmq topic grow"),
        ({}, ["flush.mesages"], "bad_request", 'did you mean "flush.messages"'),
        ({"flush.messages": "many"}, [], "bad_request", "must be"),
        ({"flush.messages": 9}, [], "not_allowed", "SIGHUP"),
        ({}, ["flush.messages"], "not_allowed", "--set"),
    ):
        refused = broker.ask(SetTopic("orders", 0, settings, unset))
        assert refused.code == code and word in str(refused.failure)
    assert broker.ask(SetTopic("bills", 0, {}, [])).code == "unknown_topic"
    assert broker.ask(SetTopic("orders", broker.incarnation() + 1, {}, [])).code == "unknown_topic"
    described = broker.ask(DescribeTopic("orders")).description
    assert described["effective"]["flush.messages"] == [1, '--set topic."orders".flush.messages']
    assert described["effective"]["flush.seconds"] == [10.0, "default"]


def test_partitions_grow_and_never_shrink() -> None:
    broker = Broker()
    broker.create(partitions=2)
    producer = broker.lease()
    broker.produce(producer, 0, partition=1)
    assert broker.ask(GrowTopic("orders", 4)).partitions == 4
    assert broker.produce(producer, 0, partition=3).code == "ok"
    assert broker.payloads(partition=1) == [b"hello"]
    assert broker.ask(GrowTopic("orders", 4)).partitions == 4
    assert broker.ask(GrowTopic("orders", 1)).code == "not_allowed"
    assert broker.ask(GrowTopic("missing", 4)).code == "unknown_topic"


@pytest.mark.parametrize(
    "limits, code",
    [({"topics": 1}, "not_allowed"), ({"partitions_per_topic": 2}, "bad_request"), ({"partitions": 3}, "not_allowed")],
)
def test_topics_and_partitions_are_bounded(limits: dict[str, int], code: str) -> None:
    values: dict[str, Any] = {f"limits__{name}": value for name, value in limits.items()}
    broker = Broker(**values)
    broker.create("first", 1)
    assert broker.create("second", 3).code == code


def test_a_deleted_topic_is_gone_and_its_files_too() -> None:
    broker = Broker()
    broker.create(partitions=2)
    broker.produce(broker.lease(), 0)
    assert broker.delete().deleted is True
    assert broker.delete().deleted is False
    assert [name for name in broker.disk.list(DATA) if "orders" in name or "deleted" in name] == []
    assert broker.restart().ask(Metadata(None, False)).topics == []


def test_only_the_incarnation_that_is_named_is_deleted() -> None:
    broker = Broker()
    incarnation = broker.create().incarnation
    assert broker.delete(incarnation=incarnation + 1).deleted is False
    assert broker.delete(incarnation=incarnation).deleted is True


def test_two_who_delete_the_same_topic_at_once_delete_it_once() -> None:
    broker = Broker(queued=True)
    broker.create(partitions=2)
    broker.work()
    answers = [broker.ask(DeleteTopic("orders", 0), turn=number == 2) for number in range(3)]
    broker.work()
    assert [(answer.deleted, answer.calls) for answer in answers] == [(True, 1), (False, 1), (False, 1)]


def test_a_topic_made_again_is_another_one() -> None:
    broker = Broker()
    first = broker.create().incarnation
    broker.produce(broker.lease(), 0, [b"old"])
    broker.delete()
    assert broker.create().incarnation > first
    late = broker.produce(broker.lease(), 0, incarnation=first)
    assert late.code == "unknown_topic"
    assert broker.fetch(0, incarnation=first).code == "unknown_topic"
    assert broker.payloads() == []


def test_a_request_that_waits_on_a_deleted_topic_gets_the_error() -> None:
    broker = Broker(queued=True)
    broker.create(partitions=2)
    producer = broker.lease()
    broker.produce(producer, 0)
    broker.work()
    waiting = broker.fetch(0, partition=1, wait_ms=60_000)
    unforced = broker.produce(producer, 1)
    delete = broker.ask(DeleteTopic("orders", 0))
    late = broker.produce(producer, 2, turn=False)
    broker.work()
    assert delete.deleted is True
    assert waiting.code == "unknown_topic"
    assert unforced.code in ("ok", "unknown_topic")
    assert late.code in ("ok", "unknown_topic")


def test_a_topic_deleted_while_its_log_rolls_waits_for_the_worker() -> None:
    broker = Broker(queued=True, log__segment_bytes=1 << 16)
    broker.create()
    producer = broker.lease()
    for sequence in range(2):
        broker.produce(producer, sequence, [bytes(25_000)])
        broker.work()
    rolling = broker.produce(producer, 2, [bytes(25_000)])
    delete = broker.ask(DeleteTopic("orders", 0))
    broker.work()
    assert delete.deleted is True
    assert rolling.code in ("ok", "unknown_topic")


def test_a_stop_does_not_wait_for_topics_that_are_still_to_be_made() -> None:
    broker = Broker(queued=True)
    answers = [broker.ask(CreateTopic(name, 100, {})) for name in "abc"]
    stopped: list[bool] = []
    broker.engine.broker.stop(lambda: stopped.append(True))
    broker.work()
    assert stopped == [True]
    assert [(answer.code, answer.failure.outcome) for answer in answers] == [("busy", "not done")] * 3
    assert not any(name.startswith(("a-", "b-", "c-")) for name in broker.disk.list(DATA))
    assert Broker(broker.disk).ask(Metadata(None, False)).topics == []


def test_a_creation_that_fails_is_taken_back() -> None:
    broker = Broker()
    broker.disk.faults.fail("create", path="orders-1")
    failed = broker.create(partitions=3)
    assert failed.failure is not None and failed.failure.outcome == "not done"
    assert [name for name in broker.disk.list(DATA) if name.startswith("orders")] == []
    assert broker.create(partitions=3).code == "ok"


def test_a_growth_that_fails_is_taken_back() -> None:
    broker = Broker()
    broker.create(partitions=1)
    broker.disk.faults.fail("folder", path="orders-2")
    failed = broker.ask(GrowTopic("orders", 4))
    assert failed.failure is not None and failed.failure.outcome == "not done"
    assert [name for name in broker.disk.list(DATA) if name.startswith("orders")] == ["orders-0"]
    assert broker.ask(GrowTopic("orders", 2)).partitions == 2
    again = broker.restart()
    assert again.produce(again.lease(), 0, partition=1).code == "ok"


def test_a_stopped_partition_is_resumed() -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0)
    broker.disk.faults.fail("force", path="orders-0")
    broker.produce(producer, 1)
    assert broker.produce(producer, 2).code == "storage_stopped"
    assert broker.ask(ResumePartition("orders", 0)).state == "open"
    assert broker.produce(broker.lease(), 0).code == "ok"
    assert broker.ask(ResumePartition("orders", 7)).code == "unknown_partition"


# Crashes


class Story:
    """What was answered so far: topic -> incarnation and partitions, its payloads; and the moments of the
    disk.
    """

    def __init__(self) -> None:
        self.broker = Broker()
        self.there: dict[str, tuple[int, int]] = {}
        self.gone: set[int] = set()
        self.payloads: list[bytes] = []
        self.changing = ""
        self.moments: list[tuple[Moment, dict[str, tuple[int, int]], set[int], list[bytes], str]] = []
        self.broker.disk.after = self._after

    def _after(self, kind: str, path: str) -> None:
        moment = Moment(self.broker.disk)
        self.moments.append((moment, dict(self.there), set(self.gone), list(self.payloads), self.changing))

    def create(self, name: str, partitions: int) -> None:
        self.changing = name
        answer = self.broker.create(name, partitions)
        self.there[name] = (answer.incarnation, partitions)

    def grow(self, name: str, partitions: int) -> None:
        self.changing = name
        assert self.broker.ask(GrowTopic(name, partitions)).partitions == partitions
        self.there[name] = (self.there[name][0], partitions)

    def delete(self, name: str) -> None:
        self.changing = name
        incarnation = self.there[name][0]
        before = self.there.pop(name)
        self.payloads = []
        assert self.broker.delete(name).deleted
        self.gone.add(before[0])
        assert incarnation in self.gone

    def send(self, name: str, payload: bytes) -> None:
        self.changing = ""
        assert self.broker.produce(self.broker.lease(), 0, [payload], topic=name).code == "ok"
        self.payloads.append(payload)


def reported() -> Story:
    story = Story()
    story.create("orders", 2)
    story.send("orders", b"first")
    story.grow("orders", 3)
    story.delete("orders")
    story.create("orders", 1)
    story.send("orders", b"second")
    return story


def test_a_power_cut_at_any_moment_leaves_whole_topics_and_nothing_that_was_deleted() -> None:
    """Seeded by TFMQ_TEST_SEED, which the header of the run prints."""
    states = 0
    for moment, there, gone, payloads, changing in reported().moments:
        for disk in crash_states(moment, scaled(6), random.Random(SEED)):
            states += 1
            broker = Broker(disk)
            rows = {row[0]: row for row in broker.ask(Metadata(None, False)).topics}
            for name, (incarnation, partitions) in there.items():
                assert rows[name][1] == incarnation
                assert len(rows[name][2]) >= partitions
                assert name == changing or len(rows[name][2]) == partitions
            assert not gone & {row[1] for row in rows.values()}
            assert all(state == "open" for row in rows.values() for _, state in row[2])
            if there:
                found = broker.payloads()
                assert found[: len(payloads)] == payloads
                assert set(found[len(payloads) :]) <= {b"first", b"second"}
            assert broker.engine.broker.unknown_folders == []
            assert not [name for name in broker.disk.list(DATA) if name.startswith("deleted")]
            broker.ask(Metadata(["orders"], True))
            last = len(broker.engine.broker.topics.topic("orders").partitions) - 1
            assert broker.produce(broker.lease(), 0, partition=last).code == "ok"
    assert states > 50


def test_a_start_that_is_cut_short_again_and_again_comes_to_the_same() -> None:
    story = reported()
    moment, there, _, payloads, _ = story.moments[len(story.moments) * 3 // 4]
    disk = moment.crash(random.Random(SEED))
    for _ in range(10):
        broker = Broker(disk)
        disk = Moment(broker.disk).crash(random.Random(SEED), keep="some")
    broker = Broker(disk)
    assert set(there) <= {row[0] for row in broker.ask(Metadata(None, False)).topics}
    if there:
        assert broker.payloads()[: len(payloads)] == payloads
