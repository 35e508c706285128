"""Redriving over a real broker in this process: killed at every step, by every kind of store, nothing is doubled.

Held here: after any number of killed redrives and one that comes to its end, every letter is in its topic once, and
the store says so; what was asked for is what is sent.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.dead_letters.helpers import Killed, Mortal, Process, failure, group_of
from tests.scale import scaled, seeded
from tfmq.client.operation import Operation, Wait
from tfmq.dead_letters import model
from tfmq.dead_letters.model import DEAD, DROPPED, REDRIVEN, REDRIVING, Selection
from tfmq.dead_letters.open import ask_broker_id, reached_broker_id
from tfmq.dead_letters.redrive import RedriveOperation, Report, Wish
from tfmq.errors import BadRequest, ConnectionFailed, TfmqError, TimedOut, UnknownTopic
from tfmq.testing.broker import SimulatedBroker

MESSAGES = 4


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker({"topics.partitions": 2}) as made:
        yield made


@pytest.fixture(params=["file", "topic"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    return tmp_path / "dead.db" if request.param == "file" else "dead"


def fill(broker: SimulatedBroker, store: Path | str, count: int = MESSAGES, topic: str = "orders") -> list[str]:
    """Messages that were sent, read, and kept as dead letters; their payloads."""
    producer = broker.producer()
    texts = [f"{topic} {number}" for number in range(count)]
    for number, text in enumerate(texts):
        producer.send(topic, text, key=f"key{3 + number % 2}", tag="new", properties={"n": str(number)}).result()
    process = Process(broker, store)
    kept = group_of(process.letter_store, process.wall_clock)
    for message in broker.sent(topic):
        process.run(kept.store_letter(message, [failure()]))
    process.kill()
    broker.clock.advance(1)
    return texts


def redrive(
    broker: SimulatedBroker, store: Path | str, wish: Wish | None = None, *, killed_at: int = -1
) -> tuple[Report, int]:
    """One process that redrives, and perhaps does not come to its end; the steps that it took."""
    process = Process(broker, store)
    letter_store = Mortal(process.letter_store, killed_at)
    work = RedriveOperation(letter_store, process.link, wish or Wish(), wall_clock=process.wall_clock)
    try:
        process.run(work.run())
    except Killed:
        pass
    finally:
        process.kill()
    return work.report, letter_store.steps


def broker_of(process: Process) -> str:
    """The id of the broker that it reaches."""
    found = reached_broker_id(process.link)
    if found is None:
        found = process.run(ask_broker_id(process.link, process.link.now() + 30))
    return found


def states(broker: SimulatedBroker, store: Path | str) -> Counter[str]:
    process = Process(broker, store)
    found = process.run(process.letter_store.find(Selection()))
    process.kill()
    return Counter(each.state for each in found)


def again(broker: SimulatedBroker, topic: str = "orders") -> list[str]:
    """What came to the topic by redriving."""
    found = broker.sent(topic)
    return sorted(each.text for each in found if each.redrives)


def test_dead_letters_go_to_their_topic_again_as_they_were(broker: SimulatedBroker, store: Path | str) -> None:
    texts = fill(broker, store)
    report, _ = redrive(broker, store)
    assert (report.sent, report.resumed, report.targets) == (MESSAGES, 0, {"orders": MESSAGES})
    assert again(broker) == texts
    assert states(broker, store) == {REDRIVEN: MESSAGES}
    first, second = ({m.text: m for m in broker.sent("orders") if bool(m.redrives) is late} for late in (False, True))
    for text in texts:
        before, after = first[text], second[text]
        assert (before.key, before.tag, before.properties, before.partition, before.born_at) == (
            after.key,
            after.tag,
            after.properties,
            after.partition,
            after.born_at,
        )
        assert (after.attempts, after.redrives) == (1, 1)
    assert redrive(broker, store)[0].sent == 0


@pytest.mark.long
def test_killed_at_every_step_and_done_again_nothing_is_doubled_and_nothing_lost(tmp_path: Path) -> None:
    for kind in ("file", "topic"):
        steps = -1
        for at in range(100):
            with SimulatedBroker({"topics.partitions": 2}) as broker:
                store = tmp_path / f"{at}.db" if kind == "file" else "dead"
                texts = fill(broker, store)
                _, taken = redrive(broker, store, killed_at=at)
                assert redrive(broker, store)[0].unsure == []
                assert again(broker) == texts, f"killed at {at} with {kind}"
                assert states(broker, store) == {REDRIVEN: MESSAGES}
            if taken < at:
                steps = at
                break
        assert steps > 10, "it was never killed"


@pytest.mark.parametrize("done", [True, False], ids=["the answer is lost", "it was not done"])
@pytest.mark.parametrize("error", [TimedOut, ConnectionFailed])
def test_killed_while_the_answer_is_open_nothing_is_doubled(
    broker: SimulatedBroker, store: Path | str, done: bool, error: type[TfmqError]
) -> None:
    texts = fill(broker, store)
    process = Process(broker, store)
    work = RedriveOperation(process.letter_store, process.link, Wish(), wall_clock=process.wall_clock).run()
    with pytest.raises(Killed):
        process.run(killed_at_the_send(broker, process, work, error, done))
    process.kill()
    assert states(broker, store)[REDRIVING] > 0
    report, _ = redrive(broker, store)
    assert report.resumed > 0
    assert again(broker) == texts
    assert states(broker, store) == {REDRIVEN: MESSAGES}


def killed_at_the_send(
    broker: SimulatedBroker, process: Process, work: Operation[Any], error: type[TfmqError], done: bool
) -> Operation[Any]:
    """`work` until letters are under way; then the next send has that fate, and the process ends after it."""
    sends = 0
    while True:
        wait = next(work)
        calls = [each for each in wait.futures if type(getattr(each, "request", None)).__name__ == "Produce"]
        if any(call.request.topic == "orders" for call in calls):
            sends += 1
            if sends == 1:
                broker.fail_next("send", error, done=done)
                yield from (wait,)
                raise Killed
        yield wait


def test_killed_again_and_again_at_random_steps_with_crashes_of_the_broker(tmp_path: Path) -> None:
    for run in range(scaled(200)):
        chance = seeded("redrive", run)
        with SimulatedBroker({"topics.partitions": 2}, seed=run) as broker:
            store = tmp_path / f"{run}.db" if run % 2 else "dead"
            texts = fill(broker, store, 20)
            wish = Wish(rate=chance.choice([None, 50.0]))
            for _ in range(chance.randrange(1, 6)):
                redrive(broker, store, wish, killed_at=chance.randrange(12))
                if chance.random() < 0.4:
                    broker.crash(chance.choice(["nothing", "some", "everything"]))
            redrive(broker, store, wish)
            assert again(broker) == sorted(texts), f"run {run}"
            assert states(broker, store) == {REDRIVEN: 20}, f"run {run}"


def test_two_at_once_send_each_dead_letter_once(broker: SimulatedBroker, store: Path | str) -> None:
    texts = fill(broker, store, 10)
    pair = [Process(broker, store), Process(broker, store)]
    wish = Wish(rate=10.0)
    works = [RedriveOperation(each.letter_store, each.link, wish, wall_clock=each.wall_clock) for each in pair]
    operations = [work.run() for work in works]
    chance = seeded("two at once")
    ended = [False, False]
    while not all(ended):
        number = chance.choice([index for index in (0, 1) if not ended[index]])
        ended[number] = stepped(pair[number], operations[number])
    assert again(broker) == sorted(texts)
    for each in pair:
        each.kill()
    redrive(broker, store)
    assert again(broker) == sorted(texts)
    assert states(broker, store) == {REDRIVEN: 10}


def test_one_whose_claim_was_taken_over_sends_nothing_of_it(broker: SimulatedBroker, store: Path | str) -> None:
    """Between its claim and its places another redrive comes, begins and ends."""
    texts = fill(broker, store)
    process = Process(broker, store)

    class Slow(Mortal):
        """The process sleeps after its first claim."""

        slept = False

        def apply(self, steps: Any) -> Operation[Any]:
            found = yield from super().apply(steps)
            if not self.slept and any(isinstance(event, model.ClaimEvent) for _, event in steps):
                self.slept = True
                yield Wait((), 0.0)
                assert redrive(broker, store)[0].sent == MESSAGES
            return found

    work = RedriveOperation(Slow(process.letter_store, -1), process.link, Wish(), wall_clock=process.wall_clock).run()
    while not stepped(process, work):
        pass
    process.kill()
    assert again(broker) == texts
    assert states(broker, store) == {REDRIVEN: MESSAGES}


def test_a_hole_between_its_places_is_closed_before_anything_is_given_back(
    broker: SimulatedBroker, store: Path | str
) -> None:
    """Of what it has claimed a person drops one; after its places another redrive sends them, and is killed then."""
    texts = fill(broker, store)
    process = Process(broker, store)

    class Unlucky(Mortal):
        """What happens beside each of its steps."""

        def apply(self, steps: Any) -> Operation[Any]:
            found = yield from super().apply(steps)
            kinds = {type(event) for _, event in steps}
            if model.ClaimEvent in kinds and not dropped:
                dropped.append(steps[-1][0])
                yield from process.letter_store.apply([(dropped[0], model.DropEvent(process_ms(process)))])
            if model.DepartEvent in kinds and len(dropped) == 1:
                dropped.append("")
                redrive(broker, store, killed_at=2)
            return found

    dropped: list[str] = []
    work = RedriveOperation(Unlucky(process.letter_store, -1), process.link, Wish(), wall_clock=process.wall_clock)
    process.run(work.run())
    process.kill()
    redrive(broker, store)
    assert len(again(broker)) == len(set(again(broker))) == len(texts) - 1
    assert states(broker, store) == {REDRIVEN: MESSAGES - 1, DROPPED: 1}


def process_ms(process: Process) -> int:
    return round(process.wall_clock() * 1000)


def stepped(process: Process, operation: Operation[Any]) -> bool:
    """One wait of an operation; whether it ended."""
    try:
        wait = next(operation)
    except StopIteration:
        return True
    process.driver.wait(tuple(wait.futures), wait.seconds)
    return False


def test_only_what_is_chosen_is_sent(broker: SimulatedBroker, store: Path | str) -> None:
    fill(broker, store)
    fill(broker, store, 3, "bills")
    report, _ = redrive(broker, store, Wish(Selection(topic="bills")))
    assert report.targets == {"bills": 3}
    report, _ = redrive(broker, store, Wish(Selection(key="key4")))
    assert report.targets == {"orders": 2}
    report, _ = redrive(broker, store, Wish(Selection(error="no such"), limit=1))
    assert report.targets == {"orders": 1}
    report, _ = redrive(broker, store, Wish(Selection(error="another")))
    assert report.targets == {}


def test_a_limit_counts_what_a_given_report_has_of_other_stores(broker: SimulatedBroker, store: Path | str) -> None:
    fill(broker, store)
    process, report = Process(broker, store), Report(resumed=1, targets={"bills": 2})
    work = RedriveOperation(
        process.letter_store, process.link, Wish(limit=2), wall_clock=process.wall_clock, report=report
    )
    process.run(work.run())
    process.kill()
    assert report.targets == {"bills": 2, "orders": 1}


def test_a_dry_run_counts_and_changes_nothing(broker: SimulatedBroker, store: Path | str) -> None:
    fill(broker, store)
    report, steps = redrive(broker, store, Wish(dry=True))
    assert (report.targets, report.sent, steps) == ({"orders": MESSAGES}, 0, 0)
    assert report.unsendable == [], "it reads no bodies, so it does not know which letters have none"
    assert states(broker, store) == {DEAD: MESSAGES}
    assert again(broker) == []
    redrive(broker, store, killed_at=3)
    before = states(broker, store), again(broker)
    assert before[0][REDRIVING] > 0, "some are under way"
    assert redrive(broker, store, Wish(dry=True))[1] == 0
    assert (states(broker, store), again(broker)) == before


def test_the_rate_is_kept(broker: SimulatedBroker, store: Path | str) -> None:
    fill(broker, store, 8)
    before = broker.clock.monotonic()
    redrive(broker, store, Wish(rate=2.0))
    assert 3.0 < broker.clock.monotonic() - before < 4.0
    with pytest.raises(BadRequest):
        redrive(broker, store, Wish(rate=0.0))


def test_another_topic_gets_them_by_key(broker: SimulatedBroker, store: Path | str) -> None:
    texts = fill(broker, store)
    with pytest.raises(UnknownTopic):
        redrive(broker, store, Wish(to_topic="elsewhere"))
    broker.admin().create_topic("elsewhere", partitions=5)
    redrive(broker, store, Wish(to_topic="elsewhere"))
    found = broker.sent("elsewhere")
    assert sorted(each.text for each in found) == texts
    assert {each.key: each.partition for each in found} == {
        key: zlib.crc32(key.encode()) % 5 for key in ("key3", "key4")
    }


def test_a_key_that_is_no_text_has_its_partition_elsewhere_too(broker: SimulatedBroker, store: Path | str) -> None:
    keys: list[bytes | str] = ["a\0b", *(bytes([0xFF, number]) for number in range(8))]
    for key in keys:
        broker.producer().send("orders", b"x", key=key).result()
    process = Process(broker, store)
    kept = group_of(process.letter_store, process.wall_clock)
    for message in broker.sent("orders"):
        process.run(kept.store_letter(message, [failure()]))
    process.kill()
    broker.clock.advance(1)
    broker.admin().create_topic("elsewhere", partitions=5)
    assert redrive(broker, store, Wish(to_topic="elsewhere"))[0].sent == len(keys)
    assert {each.key: each.partition for each in broker.sent("elsewhere")} == {
        key: zlib.crc32(key.encode() if isinstance(key, str) else key) % 5 for key in keys
    }


def test_a_dead_letter_whose_body_is_gone_stops_no_other() -> None:
    with SimulatedBroker({"limits.message_bytes": 300_000}) as broker:
        broker.producer().send("gone", b"x" * 250_000).result()
        process = Process(broker, "dead")
        kept = group_of(process.letter_store, process.wall_clock)
        process.run(kept.store_letter(broker.sent("gone")[0], [failure()]))
        process.kill()
        broker.clock.advance(1)
        texts = fill(broker, "dead")
        broker.admin().delete_topic("gone")
        broker.admin().create_topic("gone")
        report, _ = redrive(broker, "dead")
        assert report.sent == MESSAGES and again(broker) == texts
        assert len(report.unsendable) == 1 and "too large to be copied" in report.unsendable[0]
        assert states(broker, "dead") == {REDRIVEN: MESSAGES, DEAD: 1}


@pytest.mark.parametrize("arrived", [True, False])
def test_what_is_under_way_and_has_lost_its_body_is_settled_by_what_its_topic_has(arrived: bool) -> None:
    with SimulatedBroker({"limits.message_bytes": 300_000}) as broker:
        broker.producer().send("large", b"x" * 250_000).result()
        process = Process(broker, "dead")
        kept = group_of(process.letter_store, process.wall_clock)
        process.run(kept.store_letter(broker.sent("large")[0], [failure()]))
        process.kill()
        broker.clock.advance(1)
        broker.admin().create_topic("elsewhere")
        wish = Wish(to_topic="elsewhere")
        redrive(broker, "dead", wish, killed_at=4 if arrived else 3)
        assert states(broker, "dead") == {REDRIVING: 1}
        broker.admin().delete_topic("large")
        report, _ = redrive(broker, "dead", wish)
        assert report.unsure == []
        assert len(broker.sent("elsewhere")) == arrived
        assert states(broker, "dead") == {REDRIVEN if arrived else DEAD: 1}


def test_what_comes_back_again_and_again_is_passed_over(broker: SimulatedBroker, store: Path | str) -> None:
    fill(broker, store, 1)
    for _ in range(3):
        assert redrive(broker, store)[0].sent == 1
        process = Process(broker, store)
        kept = group_of(process.letter_store, process.wall_clock)
        process.run(kept.store_letter(broker.sent("orders")[-1], [failure()]))
        process.kill()
        broker.clock.advance(1)
    report, _ = redrive(broker, store)
    assert (report.sent, report.looping) == (0, 1)
    assert redrive(broker, store, Wish(loop_limit=10))[0].sent == 1
    assert [each.redrives for each in broker.sent("orders")] == [0, 1, 2, 3, 4]


def test_what_fails_again_at_once_is_not_sent_twice_by_one_redrive(tmp_path: Path, broker: SimulatedBroker) -> None:
    store = tmp_path / "dead.db"
    fill(broker, store, 2)
    process = Process(broker, store)
    kept = group_of(process.letter_store, process.wall_clock)

    class Failing(Mortal):
        """A consumer beside it keeps at once what arrives."""

        def apply(self, steps: Any) -> Operation[Any]:
            found = yield from super().apply(steps)
            if any(isinstance(event, model.ArriveEvent) for _, event in steps):
                broker.clock.advance(1)
                for message in [each for each in broker.sent("orders") if each.redrives]:
                    yield from kept.store_letter(message, [failure()])
            return found

    work = RedriveOperation(Failing(process.letter_store, -1), process.link, Wish(), wall_clock=process.wall_clock)
    report = process.run(work.run())
    assert report.sent == 2
    assert states(broker, store) == {REDRIVEN: 2, DEAD: 2}
    process.kill()


def test_places_that_the_broker_forgot_are_looked_up(broker: SimulatedBroker, tmp_path: Path) -> None:
    """Killed after the sending, and gone on with when the broker remembers no such producer any more."""
    store = tmp_path / "dead.db"
    texts = fill(broker, store, 4)
    steps = redrive(broker, store, Wish(dry=False), killed_at=4)[1]
    assert steps == 4 and states(broker, store)[REDRIVING] > 0
    process = Process(broker, store)
    letters = process.run(process.letter_store.find(Selection(states=(REDRIVING,)), whole=True))
    sent = [each for each in letters if each.journey is not None]
    assert sent
    process.kill()
    broker.clock.advance(days=9)
    broker.restart()
    report, _ = redrive(broker, store)
    assert report.unsure == []
    assert again(broker) == texts


def test_dead_letters_of_another_broker_are_left_unless_they_are_forced(tmp_path: Path) -> None:
    """Both have the topic, with messages at the same places."""
    store = tmp_path / "dead.db"
    with SimulatedBroker(seed=1) as first, SimulatedBroker(seed=2) as second:
        texts = fill(first, store, 3)
        second.clock.advance(5)
        fill(second, tmp_path / "unused.db", 3)
        second.clock.advance(60)
        process = Process(first, store)
        name = broker_of(process)
        letters = process.run(process.letter_store.find(Selection()))
        known = [(each.id, model.AdoptEvent(each.kept_ms, name)) for each in letters[:2]]
        process.run(process.letter_store.apply(known))
        process.kill()
        for dry in (True, False):
            report, _ = redrive(second, store, Wish(dry=dry))
            assert (report.sent, report.foreign) == (0, {name: 2, "": 1})
        assert again(second) == [] and states(first, store) == {DEAD: 3}
        assert report.broker not in ("", name)
        report, _ = redrive(first, store, Wish(limit=1))
        assert (report.sent, report.foreign) == (1, {})
        report, _ = redrive(second, store, Wish(force=True))
        assert (report.sent, report.foreign) == (2, {}) and set(again(second)) < set(texts)
        assert states(first, store) == {REDRIVEN: 3}


def test_a_message_that_is_too_large_by_now_stops_no_other(tmp_path: Path) -> None:
    with SimulatedBroker({"limits.message_bytes": 2000}) as broker:
        store = tmp_path / "dead.db"
        fill(broker, store, 3)
        process = Process(broker, store)
        (large, *_) = process.run(process.letter_store.find(Selection(), whole=True))
        assert large.body is not None
        grown = replace(
            large,
            id="f" * 16,
            broker=broker_of(process),
            offset=10**9,
            body=large.body._replace(payload=b"x" * 300_000),
            failures=(),
        )
        process.run(process.letter_store.apply([(grown.id, model.KeepEvent(large.kept_ms, grown))]))
        process.kill()
        report, _ = redrive(broker, store)
        assert report.sent == 3
        assert [each.split()[0] for each in report.unsendable] == ["f" * 16]
        assert states(broker, store) == {REDRIVEN: 3, DEAD: 1}


def test_dead_letters_in_a_topic_that_was_deleted_meanwhile_have_an_unknown_outcome(
    tmp_path: Path, broker: SimulatedBroker
) -> None:
    store = tmp_path / "dead.db"
    fill(broker, store, 3)
    redrive(broker, store, killed_at=4)
    broker.admin().delete_topic("orders")
    broker.admin().create_topic("orders")
    report, _ = redrive(broker, store)
    assert report.unsure and all("which is unknown now" in each for each in report.unsure)
    assert states(broker, store)[REDRIVING] == len(report.unsure)
