"""The whole broker on servers that share a store, with faults at random: what was answered holds."""

from __future__ import annotations

from typing import Any

import pytest

import tfmq.replication.primary as primary_module
from tests.broker.helpers import Answer, Session, at, batch, handles
from tests.replication.replicated_broker import Course, Replied
from tests.scale import scaled
from tfmq.protocol import commands
from tfmq.protocol.commands import ACKS_SYNCED, ACKS_WRITTEN, GroupOffset


@pytest.mark.parametrize("seed", range(scaled(2_000, 18)))
def test_random_courses_of_a_broker_lose_double_and_tear_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    is_swept = seed % 3 == 0
    if is_swept:
        monkeypatch.setattr(primary_module, "SNAPSHOT_BYTES", 60_000)
        monkeypatch.setattr(primary_module, "SWEEP_SECONDS", 10.0)
    course = Course(seed, history_seconds=30.0 if is_swept else 7 * 86_400.0)
    course.play(course.world.generator.randint(3, 15))


def test_no_answer_about_a_change_is_given_before_the_change_is_in_the_store() -> None:
    course = Course(1)
    world = course.world
    (whole,) = [each.whole for each in course.servers if each.whole is not None and each.whole.is_serving]
    session = Session()

    def ask(request: Any, body: bytes = b"") -> Answer:
        answer = Replied(commands.BY_REQUEST[type(request)].reply.shape, lambda answer: None)
        whole.engine.handle(request, memoryview(body), answer, session)
        whole.server.end_turn()
        return answer

    def produce(producer: int, sequence: int, payload: bytes = b"a", acks: int = ACKS_SYNCED, **more: Any) -> Answer:
        request = commands.Produce("own", own.incarnation, 0, producer, sequence, 1, acks, [], **more)
        return ask(request, batch(producer, sequence, [payload]))

    own, lease = ask(commands.CreateTopic("own", 1, {})), ask(commands.LeaseProducerIds(3))
    world.run(2)
    producer = lease.first
    delayed = produce(producer, 0, due=at(world.clock.wall_ms() + 60_000))
    gone = ask(commands.CreateTopic("gone", 1, {}))
    begun = ask(commands.BeginTransaction(producer + 1, 1, "x", None, ""))
    for sequence in range(10):
        large = produce(producer + 2, sequence, bytes(9_000))
    world.run(2)
    held = produce(producer + 1, 0, acks=ACKS_WRITTEN, transaction=begun.epoch)
    world.run(2)
    assert delayed.code == gone.code == begun.code == large.code == held.code == "ok"
    world.is_down = True
    answers = [
        produce(producer + 2, 10),
        produce(producer, 1, due=at(world.clock.wall_ms() + 60_000)),
        ask(commands.CancelDelayed(handles(delayed)[0])),
        ask(commands.CreateTopic("new", 1, {})),
        ask(commands.DeleteTopic("gone")),
        ask(commands.GrowTopic("own", 2)),
        ask(commands.ResetGroup("g", [GroupOffset("own", own.incarnation, 0, 0, 0, 0)])),
        ask(commands.AddSchedule("s", "0 9 * * *", "UTC", "own")),
        ask(commands.Truncate("own", own.incarnation, 0, large.positions[0][1])),
        ask(commands.LeaseProducerIds(100_000)),
        ask(commands.PrepareTransaction("x", begun.epoch, None, [])),
    ]
    world.run(world.settings.lease_seconds / 3)
    assert [each.code for each in answers] == ["waiting"] * len(answers)
    world.is_down = False
    world.run(5)
    assert [each.code for each in answers] == ["ok"] * len(answers)


def test_a_replaced_primary_does_not_say_that_there_is_nothing_to_do() -> None:
    """Such as to delete a topic that it does not have, because it was created at the next primary."""
    course = Course(1)
    world = course.world
    (whole,) = [each.whole for each in course.servers if each.whole is not None and each.whole.is_serving]
    whole.server.is_cut_off = True
    world.run(world.settings.lease_seconds)
    answers: list[Answer] = []
    # Programs decide by what these answer, too: a transaction that is not known here may be prepared there.
    questions = (
        commands.ReadOffsets("new", None),
        commands.DescribeTransaction("new", 0, 0),
        commands.ListTransactions(None),
        commands.DescribeDelayed("new"),
        commands.ListCommitGroups(),
    )
    changes = (commands.DeleteTopic("new"), commands.DeleteGroup("new"), commands.RollbackTransaction("new", 1))
    for request in (*changes, *questions):
        whole.handle(request, b"", Session(), answers.append)
        whole.server.end_turn()
    world.run(0.1)
    assert [each.code for each in answers] == ["busy"] * 8
