"""One run with one accident in it: that it happens at its step, once, and what the program sees of it."""

import asyncio

import pytest

import tfmq
import tfmq.aio
from tfmq.testing.broker import SimulatedBroker
from tfmq.testing.fault_runs import KINDS, FaultRun, InjectedFault, Step


def program(broker: SimulatedBroker) -> list[str]:
    """Sends three, takes them in a group; the texts in the order of handling."""
    producer = broker.producer()
    for number in range(3):
        producer.send("orders", str(number)).result()
    handled: list[str] = []
    with broker.consumer("orders", group="billing") as consumer:
        broker.drain(consumer, lambda message: handled.append(message.text))
    return handled


def undergone(accident: InjectedFault | None = None) -> tuple[FaultRun, list[str], int]:
    """The trial, what was handled, how many messages the topic has in the end."""
    trial = FaultRun(accident)
    with SimulatedBroker() as broker:
        broker.attach_fault_run(trial)
        handled = program(broker)
        return trial, handled, len(broker.sent("orders"))


def test_a_run_without_an_accident_notes_what_could_happen() -> None:
    trial, handled, count = undergone()
    assert (handled, count, trial.happened) == (["0", "1", "2"], 3, False)
    names = [step.name for step in trial.requests]
    assert [step.request for step in trial.requests] == list(range(1, len(names) + 1))
    assert names.count("PRODUCE") == 3 and {"JOIN_GROUP", "FETCH", "COMMIT_OFFSETS"} <= set(names)
    assert not trial.requests[names.index("PRODUCE")].members
    assert trial.requests[names.index("FETCH")].members
    assert len(trial.possible_faults(["crash"])) == len(names)
    assert 0 < len(trial.possible_faults(["rebalance"])) < len(names)
    assert trial.possible_faults(["duplicate"])


def test_what_a_test_arranges_is_no_step_and_meets_no_accident() -> None:
    trial = FaultRun(InjectedFault("crash", Step(1, "PRODUCE", False)))
    with SimulatedBroker() as broker:
        broker.attach_fault_run(trial)
        with broker.admin() as admin:
            admin.create_topic("orders")
            assert admin.group("billing").generation == 0
        noted = [step.name for step in trial.requests]
        assert not trial.happened and not {"CREATE_TOPIC", "DESCRIBE_GROUP"} & set(noted), noted


def test_two_runs_have_the_same_steps() -> None:
    assert undergone()[0].possible_faults(KINDS) == undergone()[0].possible_faults(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_accident_happens_at_every_step_and_nothing_is_lost(kind: str) -> None:
    doubled = []
    for accident in undergone()[0].possible_faults([kind]):
        trial, handled, count = undergone(accident)
        assert trial.happened and trial.requests[accident.step.request - 1].name == accident.step.name
        assert (set(handled), count) == ({"0", "1", "2"}, 3), str(accident)
        if len(handled) > 3:
            doubled.append(accident)
    assert bool(doubled) is (kind in ("duplicate", "rebalance"))


def test_a_crash_takes_the_request_with_it_and_a_lost_reply_does_not() -> None:
    for kind, goes_on in (("crash", False), ("lost_reply", True)):
        trial = FaultRun(InjectedFault(kind, Step(1, "PRODUCE", False)))
        with SimulatedBroker() as broker:
            broker.producer().send("orders", "x").result()
            broker.attach_fault_run(trial)
            before = broker._server.engine
            delivery = broker._producers[0].send("orders", "y")
            assert trial.happened and trial.requests[0].name == "PRODUCE"
            assert (broker._server.engine is before) is goes_on
            delivery.result()
            assert [message.text for message in broker.sent("orders")] == ["x", "y"]
            served = [step.name for step in trial.requests].count("PRODUCE")
            assert served == 2, "the client sends it again, and the broker knows it where it was done"


def test_asyncio_programs_have_steps_and_accidents_too() -> None:
    async def main() -> list[str]:
        async with tfmq.aio.Producer() as producer, tfmq.aio.Consumer(topics="orders", group="g") as consumer:
            await producer.send("orders", "1")
            found = [message.text for message in await consumer.poll(timeout=60)]
            return found + [message.text for message in await consumer.poll(timeout=60)]

    def handled(accident: InjectedFault | None) -> tuple[FaultRun, list[str]]:
        trial = FaultRun(accident)
        with SimulatedBroker() as broker, pytest.MonkeyPatch.context() as patch:
            patch.setenv("TFMQ_SERVERS", broker.servers)
            broker.attach_fault_run(trial)
            return trial, asyncio.run(main())

    plain, found = handled(None)
    assert found == ["1"]
    accidents = plain.possible_faults(["duplicate"])
    runs = [handled(accident) for accident in accidents]
    assert all(trial.happened for trial, _ in runs)
    assert ["1", "1"] in [texts for _, texts in runs]
