"""What users write for a store, and what it names."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dead_letters.conftest import Stand
from tests.dead_letters.helpers import NOW, Time, failure, finished, group_of, message, sql_letter_store
from tests.scale import scaled, seeded
from tfmq import codecs
from tfmq.client.worker.dead_letter_store import DeadLetterStore
from tfmq.dead_letters import model
from tfmq.dead_letters.model import (
    DEAD,
    FAILING,
    FIRST_PAGE,
    HANDLED,
    REDRIVING,
    RETRYING,
    WAITING,
    Letter,
    PagePosition,
    RedrivePosition,
    Selection,
    letter_from_message,
)
from tfmq.dead_letters.sql_store import Database
from tfmq.dead_letters.store import (
    LEASE_SECONDS,
    GroupDeadLetterStore,
    Step,
    StoreAddress,
    default_path,
    parse_address,
    time_after_ms,
)
from tfmq.errors import BadRequest
from tfmq.message import BORN_MS_MAX


@pytest.mark.parametrize(
    ("where", "address"),
    [
        ("dead.db", StoreAddress("path", "dead.db")),
        ("/var/lib/x/dead letters.db", StoreAddress("path", "/var/lib/x/dead letters.db")),
        (Path("dead.db"), StoreAddress("path", "dead.db")),
        ("C:\\dead.db", StoreAddress("path", "C:\\dead.db")),
        ("sqlite:///dead.db", StoreAddress("url", "sqlite:///dead.db")),
        ("postgresql+psycopg://u@h/d", StoreAddress("url", "postgresql+psycopg://u@h/d")),
        ("topic:dead", StoreAddress("topic", "dead")),
    ],
)
def test_a_path_a_url_and_a_topic_are_distinguished(where: str | Path, address: StoreAddress) -> None:
    assert parse_address(where) == address


@pytest.mark.parametrize("where", ["", "topic:", "topic:a/b", "topic:..", None, 7, b"dead.db"])
def test_what_names_no_store_is_said_so(where: object) -> None:
    with pytest.raises(BadRequest, match=r"takes a path|cannot be a topic"):
        parse_address(where)  # type: ignore[arg-type]


def test_a_password_is_never_shown() -> None:
    assert str(parse_address("postgresql://me:se:cret@host/db")) == "postgresql://me:***@host/db"
    assert str(parse_address("topic:dead")) == "topic:dead"
    assert str(parse_address("postgresql:///db?host=/run")) == "postgresql:///db?host=/run"


def test_the_default_lies_where_programs_keep_their_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path("billing") == str(tmp_path / ".local/state/tfmq/billing.db")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_path("billing") == str(tmp_path / "state/tfmq/billing.db")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hun/ter2@host/db",
        "postgresql://me:hun@ter2@host/db",
        "postgresql://me:hun?ter2@host/db",
        "postgresql+psycopg://host/db?user=me&password=hunter2",
        "mssql+pyodbc://?odbc_connect=DRIVER%3Dx%3BPWD%3Dhunter2",
    ],
)
def test_a_password_is_not_shown_wherever_it_stands(url: str) -> None:
    assert "ter2" not in str(parse_address(url)), "it is logged with each dead letter"


def test_what_is_no_url_of_a_database_is_refused_without_its_password() -> None:
    with pytest.raises(BadRequest) as refused:
        Database(parse_address("postgresql+psycopg://me:se@cret:hunter2@host/db"))
    assert "hunter2" not in str(refused.value) and "cret" not in str(refused.value)


# The letters of a group, as its consumers use them, over each kind of store, with no broker where none is needed.


def only(stand: Stand) -> Letter:
    (letter,) = stand.run(stand.letter_store.find(Selection()))
    found: Letter = letter
    return found


def test_a_dead_letter_is_kept_with_its_history(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    kept: DeadLetterStore = group_of(stand.letter_store, Time())
    secret = failure(6, "ValueError: secret of the payload")
    assert stand.run(kept.store_letter(message(1), [failure(n) for n in range(5)] + [secret])) == DEAD
    letter = only(stand)
    assert (letter.state, letter.calls, len(letter.failures)) == (DEAD, 6, 6)
    assert stand.run(kept.lease_next()) is None and stand.run(kept.seconds_until_due()) is None
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert letter.id in line and kept.address in line and "ValueError" in line
    assert "secret" not in line


def test_calls_in_a_queue_are_noted_until_they_are_used_up(stand: Stand) -> None:
    clock = Time()
    states = []
    for number in range(5):  # each by another process: the one before was killed
        letter_store, run = stand.open()
        states.append(run(group_of(letter_store, clock, calls_max=4).record_failure(message(1), failure(number))))
    assert states == [FAILING, FAILING, FAILING, DEAD, DEAD]
    letter = only(stand)
    assert (letter.calls, len(letter.failures)) == (5, 5)


def test_one_that_ends_its_process_each_time_is_dead_in_the_end(stand: Stand) -> None:
    states = []
    for number in range(5):
        letter_store, run = stand.open()
        states.append(run(group_of(letter_store, Time(NOW + number), calls_max=3).count_call(message(1))))
    assert states == [FAILING, FAILING, FAILING, DEAD, DEAD]
    kept = group_of(stand.letter_store, Time(NOW + 9))
    assert stand.run(kept.count_call(message(2))) == FAILING
    assert stand.run(kept.record_failure(message(2), failure(5), begun=True)) == FAILING
    assert stand.run(kept.count_call(message(2))) == FAILING
    stand.run(kept.record_success(message(2)))
    found = {each.ordinal: (each.state, each.calls) for each in stand.run(stand.letter_store.find(Selection()))}
    assert found == {1: (DEAD, 3), 2: (HANDLED, 2)}


def test_one_that_passes_after_failures_is_over(stand: Stand) -> None:
    kept = group_of(stand.letter_store, Time())
    stand.run(kept.record_success(message(1)))
    assert stand.run(stand.letter_store.find(Selection())) == []
    stand.run(kept.record_failure(message(1), failure()))
    stand.run(kept.record_success(message(1)))
    assert only(stand).state == HANDLED


def test_what_ended_is_forgotten_in_time(stand: Stand) -> None:
    clock = Time()
    kept = group_of(stand.letter_store, clock)
    stand.run(kept.store_letter(message(1), [failure()]))
    stand.run(kept.record_failure(message(2), failure()))
    stand.run(kept.record_success(message(2)))
    stand.run(kept.delete_expired())
    assert len(stand.run(stand.letter_store.find(Selection()))) == 2
    clock.now += 31 * 86_400
    stand.run(kept.delete_expired())
    kinds = {each.state for each in stand.run(stand.letter_store.find(Selection()))}
    assert DEAD in kinds and (HANDLED not in kinds or stand.letter_store.name.startswith("topic:"))


def test_one_that_is_put_off_comes_at_its_time_and_not_before(stand: Stand) -> None:
    clock = Time()
    kept = group_of(stand.letter_store, clock)
    assert stand.run(kept.store_letter(message(1, b"{}"), [failure()], retry_after=30)) == WAITING
    assert stand.run(kept.seconds_until_due()) == 30
    clock.now += 29.99
    assert stand.run(kept.lease_next()) is None
    clock.now += 0.01
    due = stand.run(kept.lease_next())
    assert (due.message.payload, due.message.offset, due.calls, due.put_offs) == (b"{}", 100, 2, 1)
    assert stand.run(kept.lease_next()) is None
    assert stand.run(kept.mark_handled(due)) is True
    assert only(stand).state == HANDLED
    assert stand.run(kept.mark_handled(due)) is False


def test_it_is_called_as_often_as_it_may_fail_and_then_it_is_dead(stand: Stand) -> None:
    clock = Time()
    kept = group_of(stand.letter_store, clock, calls_max=4)
    stand.run(kept.store_letter(message(1), [failure()], retry_after=1))
    calls, states = 0, []
    while (wait := stand.run(kept.seconds_until_due())) is not None:
        clock.now += wait
        due = stand.run(kept.lease_next())
        calls += 1
        states.append(stand.run(kept.mark_failed(due, failure(calls))))
    assert (calls, states) == (4, [WAITING, WAITING, WAITING, DEAD])
    letter = only(stand)
    assert (letter.calls, len(letter.failures)) == (5, 5)


def test_a_rejected_one_is_dead_at_once(stand: Stand) -> None:
    kept = group_of(stand.letter_store, Time())
    stand.run(kept.store_letter(message(1), [], calls=1, retry_after=0))
    kept = group_of(stand.letter_store, Time(NOW + 1))
    due = stand.run(kept.lease_next())
    assert stand.run(kept.mark_failed(due, failure(), rejected=True)) == DEAD


def test_waits_grow_between_failures(stand: Stand) -> None:
    clock = Time()
    kept = group_of(stand.letter_store, clock, calls_max=6)
    stand.run(kept.store_letter(message(1), [failure()], retry_after=1))
    waits = []
    for number in range(4):
        clock.now += stand.run(kept.seconds_until_due())
        stand.run(kept.mark_failed(stand.run(kept.lease_next()), failure(number)))
        waits.append(stand.run(kept.seconds_until_due()))
    assert waits == [2, 4, 8, 16]


def test_putting_off_once_more_costs_no_call(stand: Stand) -> None:
    clock = Time()
    kept = group_of(stand.letter_store, clock, calls_max=2)
    stand.run(kept.store_letter(message(1), [failure()], retry_after=1))
    for _ in range(10):
        clock.now += stand.run(kept.seconds_until_due())
        due = stand.run(kept.lease_next())
        assert stand.run(kept.postpone(due, 60, "the bank is closed")) == WAITING
    assert only(stand).put_offs == 11
    assert "the bank is closed" in only(stand).error


def test_what_a_killed_consumer_had_is_anothers_when_the_lease_is_over(stand: Stand) -> None:
    clock = Time()
    killed = group_of(stand.letter_store, clock)
    stand.run(killed.store_letter(message(1), [failure()], retry_after=1))
    clock.now += 1
    lost = stand.run(killed.lease_next())
    letter_store, run = stand.open()
    heir = group_of(letter_store, clock)
    assert run(heir.lease_next()) is None
    assert run(heir.seconds_until_due()) == LEASE_SECONDS
    clock.now += LEASE_SECONDS / 2
    assert stand.run(killed.renew_lease(lost)) is True
    clock.now += LEASE_SECONDS - 0.001
    assert run(heir.lease_next()) is None
    clock.now += 0.001
    due = run(heir.lease_next())
    assert due.calls == lost.calls + 1
    assert stand.run(killed.renew_lease(lost)) is False
    assert stand.run(killed.mark_failed(lost, failure())) == ""
    assert stand.run(killed.postpone(lost, 5)) == ""
    assert stand.run(killed.release(lost)) is False
    assert run(heir.mark_handled(due)) is True


def test_what_is_given_back_was_never_called(stand: Stand) -> None:
    clock = Time()
    kept = group_of(stand.letter_store, clock)
    stand.run(kept.store_letter(message(1), [failure()], retry_after=1))
    clock.now += 1
    first = stand.run(kept.lease_next())
    assert stand.run(kept.release(first)) is True
    again = stand.run(kept.lease_next())
    assert again.calls == first.calls


def test_another_groups_dead_letters_are_not_taken(stand: Stand) -> None:
    clock = Time()
    stand.run(group_of(stand.letter_store, clock).store_letter(message(1), [failure()], retry_after=0))
    other = GroupDeadLetterStore(stand.letter_store, "shipping", 6, wall_clock=clock)
    clock.now += 1
    assert stand.run(other.lease_next()) is None
    assert stand.run(other.store_letter(message(1), [failure()])) == DEAD
    assert stand.run(stand.letter_store.count_by_state()) == {("billing", WAITING): 1, ("shipping", DEAD): 1}


def test_a_value_is_made_by_the_consumers_codec(tmp_path: Path) -> None:
    clock = Time()
    kept = GroupDeadLetterStore(
        sql_letter_store(tmp_path / "dead.db"), "billing", 6, wall_clock=clock, codec=codecs.json
    )
    finished(kept.store_letter(message(1, b'{"n": 1}'), [failure()], retry_after=0))
    clock.now += 1
    due = finished(kept.lease_next())
    assert due is not None and due.message.value == {"n": 1}


def test_no_time_is_beyond_the_calendar(tmp_path: Path) -> None:
    assert time_after_ms(1000, 5) == 6000 and time_after_ms(1000, 0) == 1001
    assert time_after_ms(1000, 1e300) == BORN_MS_MAX
    kept = group_of(sql_letter_store(tmp_path / "dead.db"), Time())
    assert finished(kept.store_letter(message(1), [failure()], retry_after=1e300)) == WAITING
    assert finished(kept.seconds_until_due()) > 1e9


@pytest.mark.long
def test_random_consumers_that_die_lose_nothing_and_end(tmp_path: Path) -> None:
    """At most as many calls as were granted and one a kill, nothing lost, nothing endless."""
    for run in range(scaled(200)):
        chance = seeded("keeping", run)
        letter_store, clock = sql_letter_store(tmp_path / f"{run}.db"), Time()
        count, calls_max = 8, chance.randrange(2, 5)
        calls: Counter[str] = Counter()
        kills: Counter[str] = Counter()
        group_store = group_of(letter_store, clock, calls_max)
        for number in range(count):
            finished(group_store.store_letter(message(number), [failure()], calls=1, retry_after=chance.random() * 5))
        consumers = [group_of(letter_store, clock, calls_max) for _ in range(3)]
        while (wait := finished(group_store.seconds_until_due())) is not None:
            clock.now += wait
            due = finished(chance.choice(consumers).lease_next())
            if due is None:
                continue
            calls[due.id] += 1
            if chance.random() < 0.3:
                kills[due.id] += 1
            else:
                finished(group_store.mark_failed(due, failure(calls[due.id])))
        letters = finished(letter_store.find(Selection()))
        assert [each.state for each in letters] == [DEAD] * count, f"run {run}"
        assert all(calls[each.id] <= calls_max for each in letters), f"run {run}"
        assert RETRYING not in {each.state for each in letters}
        letter_store.close()


# What every store of dead letters does, whatever it is made of: a file, PostgreSQL, a topic.


def keeping(number: int, at_ms: int = 10, next_ms: int = 0, group: str = "billing", **options: object) -> Step:
    letter = letter_from_message(message(number, f"payload {number}".encode(), key=f"k{number % 2}", tag="t"), group)
    letter = replace(letter, calls=1, calls_left=3 if next_ms else 0, failures=(failure(number),), **options)  # type: ignore[arg-type]
    return letter.id, model.KeepEvent(at_ms, letter, next_ms)


def ids(letters: list[Letter]) -> list[str]:
    return [each.id for each in letters]


def test_what_is_kept_is_there_when_the_store_is_opened(stand: Stand) -> None:
    step = keeping(1)
    (kept,) = stand.run(stand.letter_store.apply([step]))
    assert kept.state == DEAD
    letter_store, run = stand.open()
    found = run(letter_store.get(step[0]))
    assert found.message().payload == b"payload 1"
    assert found.failures == (failure(1),)
    assert (found.kept_ms, found.changed_ms, found.key, found.tag) == (10, 10, "k1", "t")
    assert run(letter_store.get("0" * 16)) is None


def test_item_31_a_store_that_is_opened_again_has_what_was_kept_twice_once(stand: Stand) -> None:
    id, event = keeping(1)
    assert isinstance(event, model.KeepEvent)
    later = event._replace(at_ms=50, letter=replace(event.letter, failures=(failure(50),)))
    for each in (event, event, later):
        letter_store, run = stand.open()
        run(letter_store.apply([(id, each)]))
    letter_store, run = stand.open()
    (found,) = run(letter_store.find(Selection(), whole=True))
    assert found.failures == (failure(1), failure(50))
    assert found.body.payload == b"payload 1"


def test_failing_dead_letters_are_found_by_group_and_partition(stand: Stand) -> None:
    def note(number: int, group: str = "billing") -> Step:
        id, event = keeping(number, group=group)
        return id, model.NoteEvent(10, replace(event.letter, calls_left=3), False)

    stand.run(stand.letter_store.apply([note(1), note(2), note(3), note(4, "other"), keeping(5)]))
    stand.run(stand.letter_store.apply([(note(2)[0], model.PassEvent(20))]))
    letter_store, run = stand.open()
    first, third = (letter_from_message(message(number), "billing") for number in (1, 3))
    place = (first.incarnation, first.partition)
    assert sorted(run(letter_store.failing_offsets("billing", *place))) == sorted((first.offset, third.offset))
    assert run(letter_store.failing_offsets("billing", place[0] + 1, place[1])) == []
    assert run(letter_store.failing_offsets("billing", place[0], place[1] + 1)) == []


def test_two_that_want_the_same_are_notified_which_was_first(stand: Stand) -> None:
    id, event = keeping(1)
    stand.run(stand.letter_store.apply([(id, event)]))
    other, run = stand.open()
    run(other.find(Selection()))
    (mine,) = stand.run(stand.letter_store.apply([(id, model.ClaimEvent(20, "me"))]))
    assert mine.token == "me"
    journey = RedrivePosition("orders", 7, 0, 99, 5, 1000)
    assert run(other.apply([(id, model.DepartEvent(21, "you", journey))])) == [None]
    (placed,) = stand.run(stand.letter_store.apply([(id, model.DepartEvent(22, "me", journey))]))
    assert placed.journey == journey
    assert run(other.apply([(id, model.ClaimEvent(23, "you"))])) == [None]
    (seen,) = run(other.find(Selection(states=(REDRIVING,))))
    assert (seen.token, seen.journey) == ("me", journey)


def test_each_of_many_has_its_own_answer(stand: Stand) -> None:
    steps = [keeping(number) for number in range(5)]
    stand.run(stand.letter_store.apply(steps))
    stand.run(stand.letter_store.apply([(steps[2][0], model.DropEvent(20))]))
    claims = [(id, model.ClaimEvent(30, "me")) for id, _ in steps]
    found = stand.run(stand.letter_store.apply([*claims, ("0" * 16, model.ClaimEvent(30, "me"))]))
    assert [each is not None for each in found] == [True, True, False, True, True, False]
    assert stand.run(stand.letter_store.apply([])) == []


def test_pages_follow_each_other_in_the_order_of_keeping(stand: Stand) -> None:
    steps = [keeping(number, at_ms=100 - number // 2) for number in range(9)]
    stand.run(stand.letter_store.apply(steps))
    seen: list[Letter] = []
    page = FIRST_PAGE
    while found := stand.run(stand.letter_store.find(Selection(), page, 2)):
        assert len(found) <= 2
        seen += found
        page = PagePosition(found[-1].kept_ms, found[-1].id)
    assert ids(seen) == sorted(
        (id for id, _ in steps), key=lambda id: (next(s.kept_ms for s in seen if s.id == id), id)
    )
    assert len(seen) == 9 and all(each.body is None for each in seen)


@pytest.mark.parametrize(
    ("selection", "numbers"),
    [
        (Selection(), [0, 1, 2, 3]),
        (Selection(states=(WAITING,)), [3]),
        (Selection(states=(DEAD, WAITING)), [0, 1, 2, 3]),
        (Selection(group="billing"), [0, 1, 3]),
        (Selection(topic="nowhere"), []),
        (Selection(topic="orders", partition=0, key="k1", tag="t"), [1, 3]),
        (Selection(partition=1), []),
        (Selection(error="SUCH ORDER"), [0, 1, 2, 3]),
        (Selection(error="100%_"), []),
        (Selection(since_ms=11, until_ms=13), [1, 2]),
    ],
)
def test_only_what_is_meant_is_found(stand: Stand, selection: Selection, numbers: list[int]) -> None:
    groups = ["billing", "billing", "shipping", "billing"]
    steps = [keeping(n, at_ms=10 + n, next_ms=50 if n == 3 else 0, group=groups[n]) for n in range(4)]
    stand.run(stand.letter_store.apply(steps))
    found = stand.run(stand.letter_store.find(selection))
    assert ids(found) == [steps[number][0] for number in numbers]


def test_an_id_is_found_by_its_beginning(stand: Stand) -> None:
    steps = [keeping(number) for number in range(3)]
    stand.run(stand.letter_store.apply(steps))
    assert ids(stand.run(stand.letter_store.find(Selection(ids=(steps[1][0][:8],))))) == [steps[1][0]]
    assert stand.run(stand.letter_store.find(Selection(ids=("%",)))) == []


def test_what_is_due_is_given_in_the_order_of_its_times_and_for_its_group(stand: Stand) -> None:
    steps = [keeping(n, next_ms=next_ms) for n, next_ms in ((0, 300), (1, 100), (2, 200))]
    steps.append(keeping(4, next_ms=50, group="shipping"))
    stand.run(stand.letter_store.apply(steps))
    assert stand.run(stand.letter_store.next_due_ms("billing")) == 100
    assert stand.run(stand.letter_store.next_due_id("billing", 99)) is None
    assert stand.run(stand.letter_store.next_due_id("billing", 250)) == steps[1][0]
    stand.run(stand.letter_store.apply([(steps[1][0], model.TakeEvent(250, "me", 260))]))
    assert stand.run(stand.letter_store.next_due_id("billing", 250)) == steps[2][0]
    stand.run(stand.letter_store.apply([(steps[2][0], model.TakeEvent(250, "me", 400))]))
    assert stand.run(stand.letter_store.next_due_id("billing", 255)) is None
    assert stand.run(stand.letter_store.next_due_ms("billing")) == 260
    assert stand.run(stand.letter_store.next_due_id("billing", 260)) == steps[1][0]
    assert stand.run(stand.letter_store.next_due_ms("nobody")) is None


def test_they_are_counted_by_group_and_state(stand: Stand) -> None:
    steps = [keeping(0), keeping(1), keeping(2, next_ms=20), keeping(3, group="shipping")]
    stand.run(stand.letter_store.apply(steps))
    stand.run(stand.letter_store.apply([(steps[2][0], model.TakeEvent(20, "me", 90))]))
    counted = stand.run(stand.letter_store.count_by_state())
    assert counted == {("billing", DEAD): 2, ("billing", RETRYING): 1, ("shipping", DEAD): 1}


def test_what_is_hard_to_store_is_stored(stand: Stand) -> None:
    """NUL, half a surrogate, a key that is no text, an attribute that is none, no payload: poison has many forms."""
    odd = [
        letter_from_message(message(1, None), "billing"),
        letter_from_message(message(2, b"\x00\xff" * 500, key=b"\x00\xff", tag="\x00"), "billing"),
        letter_from_message(message(3, "\ud800".encode("utf-8", "surrogatepass"), attribute=b"\xc1"), "billing"),
        letter_from_message(message(4, b"", key="\x00 key", properties={"\x00": "\x00"}), "billing"),
    ]
    for each in odd:
        bad = replace(each, failures=(failure(1, "ValueError: \x00 \U0001f4a3 \N{SNOWMAN}"),))
        stand.run(stand.letter_store.apply([(each.id, model.KeepEvent(10, bad))]))
        found = stand.run(stand.letter_store.get(each.id))
        assert found.body == each.body
        assert found.failures == bad.failures
        assert found.message().attribute_bytes == each.message().attribute_bytes
    assert len(stand.run(stand.letter_store.find(Selection()))) == len(odd)


def test_bodies_come_no_more_at_once_than_memory_has_room_for(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [keeping(number, at_ms=number) for number in range(6)]
    stand.run(stand.letter_store.apply(steps))
    monkeypatch.setattr(model, "PAGE_BYTES", 2 * len(b"payload 0"))
    page, found = FIRST_PAGE, []
    while letters := stand.run(stand.letter_store.find(Selection(), page, whole=True)):
        assert len(letters) == 2
        found += letters
        page = PagePosition(letters[-1].kept_ms, letters[-1].id)
    assert ids(found) == [id for id, _ in steps]
    assert [each.message().payload for each in found] == [b"payload %d" % number for number in range(6)]
    monkeypatch.setattr(model, "PAGE_BYTES", 1)
    assert len(stand.run(stand.letter_store.find(Selection(), FIRST_PAGE, whole=True))) == 1, "one always has room"
    assert len(stand.run(stand.letter_store.find(Selection(), FIRST_PAGE))) == 6


def test_what_was_only_counted_and_was_handled_is_no_dead_letter(stand: Stand) -> None:
    steps = {number: keeping(number) for number in range(3)}
    ids_of = {number: id for number, (id, _) in steps.items()}
    new = {
        number: replace(event.letter, calls=0, calls_left=3, failures=())
        for number, (_, event) in steps.items()
        if isinstance(event, model.KeepEvent)
    }
    begun = [(ids_of[number], model.BeginEvent(10, new[number])) for number in range(3)]
    again = (ids_of[1], model.BeginEvent(11, new[1]))  # its process ended in its first call
    failed = (ids_of[2], model.NoteEvent(11, replace(new[2], failures=(failure(2),)), True))
    passed = [(ids_of[number], model.PassEvent(12)) for number in range(3)]
    stand.run(stand.letter_store.apply([*begun, again, failed]))
    assert len(stand.run(stand.letter_store.find(Selection(), FIRST_PAGE, 9))) == 3, "they are in work"
    stand.run(stand.letter_store.apply(passed))
    found = stand.run(stand.letter_store.find(Selection(states=("handled",)), FIRST_PAGE, 9))
    assert {each.id for each in found} == {ids_of[1], ids_of[2]}
    assert stand.run(stand.letter_store.count_by_state()) == {("billing", "handled"): 2}
