"""What every store of dead letters does, whatever it is made of: a file, PostgreSQL, a topic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dead_letters.conftest import Stand
from tests.dead_letters.helpers import failure, message
from tfmq.dead_letters import model
from tfmq.dead_letters.model import (
    DEAD,
    FIRST_PAGE,
    REDRIVING,
    RETRYING,
    WAITING,
    Letter,
    PagePosition,
    RedrivePosition,
    Selection,
    letter_from_message,
)
from tfmq.dead_letters.store import Step


def keeping(
    number: int, at_ms: int = 10, next_ms: int = 0, group: str = "billing", **options: object
) -> Step:
    letter = letter_from_message(
        message(number, f"payload {number}".encode(), key=f"k{number % 2}", tag="t"), group
    )
    letter = replace(letter, calls=1, calls_left=3 if next_ms else 0, failures=(failure(number),), **options)  # type: ignore[arg-type]
    return letter.id, model.KeepEvent(at_ms, letter, next_ms)


def ids(letters: list[Letter]) -> list[str]:
    return [each.id for each in letters]


def test_what_is_kept_is_there_for_whoever_opens_the_store(stand: Stand) -> None:
    step = keeping(1)
    (kept,) = stand.run(stand.shelf.apply([step]))
    assert kept.state == DEAD
    shelf, run = stand.open()
    found = run(shelf.get(step[0]))
    assert found.message().payload == b"payload 1"
    assert found.failures == (failure(1),)
    assert (found.kept_ms, found.changed_ms, found.key, found.tag) == (10, 10, "k1", "t")
    assert run(shelf.get("0" * 16)) is None


def test_item_31_a_store_that_is_opened_again_has_what_was_kept_twice_once(stand: Stand) -> None:
    id, event = keeping(1)
    assert isinstance(event, model.KeepEvent)
    later = event._replace(at_ms=50, letter=replace(event.letter, failures=(failure(50),)))
    for each in (event, event, later):
        shelf, run = stand.open()
        run(shelf.apply([(id, each)]))
    shelf, run = stand.open()
    (found,) = run(shelf.find(Selection(), whole=True))
    assert found.failures == (failure(1), failure(50))
    assert found.body.payload == b"payload 1"


def test_failing_letters_are_found_by_group_and_partition(stand: Stand) -> None:
    def note(number: int, group: str = "billing") -> Step:
        id, event = keeping(number, group=group)
        return id, model.NoteEvent(10, replace(event.letter, calls_left=3), False)

    stand.run(stand.shelf.apply([note(1), note(2), note(3), note(4, "other"), keeping(5)]))
    stand.run(stand.shelf.apply([(note(2)[0], model.PassEvent(20))]))
    shelf, run = stand.open()
    first, third = (letter_from_message(message(number), "billing") for number in (1, 3))
    place = (first.incarnation, first.partition)
    assert sorted(run(shelf.failing_offsets("billing", *place))) == sorted((first.offset, third.offset))
    assert run(shelf.failing_offsets("billing", place[0] + 1, place[1])) == []
    assert run(shelf.failing_offsets("billing", place[0], place[1] + 1)) == []


def test_two_who_want_the_same_are_told_who_was_first(stand: Stand) -> None:
    id, event = keeping(1)
    stand.run(stand.shelf.apply([(id, event)]))
    other, run = stand.open()
    run(other.find(Selection()))
    (mine,) = stand.run(stand.shelf.apply([(id, model.ClaimEvent(20, "me"))]))
    assert mine.token == "me"
    journey = RedrivePosition("orders", 7, 0, 99, 5, 1000)
    assert run(other.apply([(id, model.DepartEvent(21, "you", journey))])) == [None]
    (placed,) = stand.run(stand.shelf.apply([(id, model.DepartEvent(22, "me", journey))]))
    assert placed.journey == journey
    assert run(other.apply([(id, model.ClaimEvent(23, "you"))])) == [None]
    (seen,) = run(other.find(Selection(states=(REDRIVING,))))
    assert (seen.token, seen.journey) == ("me", journey)


def test_each_of_many_has_its_own_answer(stand: Stand) -> None:
    steps = [keeping(number) for number in range(5)]
    stand.run(stand.shelf.apply(steps))
    stand.run(stand.shelf.apply([(steps[2][0], model.DropEvent(20))]))
    claims = [(id, model.ClaimEvent(30, "me")) for id, _ in steps]
    found = stand.run(stand.shelf.apply([*claims, ("0" * 16, model.ClaimEvent(30, "me"))]))
    assert [each is not None for each in found] == [True, True, False, True, True, False]
    assert stand.run(stand.shelf.apply([])) == []


def test_pages_follow_each_other_in_the_order_of_keeping(stand: Stand) -> None:
    steps = [keeping(number, at_ms=100 - number // 2) for number in range(9)]
    stand.run(stand.shelf.apply(steps))
    seen: list[Letter] = []
    page = FIRST_PAGE
    while found := stand.run(stand.shelf.find(Selection(), page, 2)):
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
    stand.run(stand.shelf.apply(steps))
    found = stand.run(stand.shelf.find(selection))
    assert ids(found) == [steps[number][0] for number in numbers]


def test_an_id_is_found_by_its_beginning(stand: Stand) -> None:
    steps = [keeping(number) for number in range(3)]
    stand.run(stand.shelf.apply(steps))
    assert ids(stand.run(stand.shelf.find(Selection(ids=(steps[1][0][:8],))))) == [steps[1][0]]
    assert stand.run(stand.shelf.find(Selection(ids=("%",)))) == []


def test_what_is_due_is_given_in_the_order_of_its_times_and_for_its_group(stand: Stand) -> None:
    steps = [keeping(n, next_ms=next_ms) for n, next_ms in ((0, 300), (1, 100), (2, 200))]
    steps.append(keeping(4, next_ms=50, group="shipping"))
    stand.run(stand.shelf.apply(steps))
    assert stand.run(stand.shelf.next_due_ms("billing")) == 100
    assert stand.run(stand.shelf.next_due_id("billing", 99)) is None
    assert stand.run(stand.shelf.next_due_id("billing", 250)) == steps[1][0]
    stand.run(stand.shelf.apply([(steps[1][0], model.TakeEvent(250, "me", 260))]))
    assert stand.run(stand.shelf.next_due_id("billing", 250)) == steps[2][0]
    stand.run(stand.shelf.apply([(steps[2][0], model.TakeEvent(250, "me", 400))]))
    assert stand.run(stand.shelf.next_due_id("billing", 255)) is None
    assert stand.run(stand.shelf.next_due_ms("billing")) == 260
    assert stand.run(stand.shelf.next_due_id("billing", 260)) == steps[1][0]
    assert stand.run(stand.shelf.next_due_ms("nobody")) is None


def test_they_are_counted_by_group_and_state(stand: Stand) -> None:
    steps = [keeping(0), keeping(1), keeping(2, next_ms=20), keeping(3, group="shipping")]
    stand.run(stand.shelf.apply(steps))
    stand.run(stand.shelf.apply([(steps[2][0], model.TakeEvent(20, "me", 90))]))
    counted = stand.run(stand.shelf.count_by_state())
    assert counted == {("billing", DEAD): 2, ("billing", RETRYING): 1, ("shipping", DEAD): 1}


def test_what_is_hard_to_store_is_stored(stand: Stand) -> None:
    """NUL, half a surrogate, a key that is no text, an attribute that is none, no payload: poison has many forms."""
    odd = [
        letter_from_message(message(1, None), "billing"),
        letter_from_message(message(2, b"\x00\xff" * 500, key=b"\x00\xff", tag="\x00"), "billing"),
        letter_from_message(
            message(3, "\ud800".encode("utf-8", "surrogatepass"), attribute=b"\xc1"), "billing"
        ),
        letter_from_message(message(4, b"", key="\x00 key", properties={"\x00": "\x00"}), "billing"),
    ]
    for each in odd:
        bad = replace(each, failures=(failure(1, "ValueError: \x00 \U0001f4a3 \N{SNOWMAN}"),))
        stand.run(stand.shelf.apply([(each.id, model.KeepEvent(10, bad))]))
        found = stand.run(stand.shelf.get(each.id))
        assert found.body == each.body
        assert found.failures == bad.failures
        assert found.message().attribute_bytes == each.message().attribute_bytes
    assert len(stand.run(stand.shelf.find(Selection()))) == len(odd)


def test_bodies_come_no_more_at_once_than_memory_has_room_for(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [keeping(number, at_ms=number) for number in range(6)]
    stand.run(stand.shelf.apply(steps))
    monkeypatch.setattr(model, "PAGE_BYTES", 2 * len(b"payload 0"))
    page, found = FIRST_PAGE, []
    while letters := stand.run(stand.shelf.find(Selection(), page, whole=True)):
        assert len(letters) == 2
        found += letters
        page = PagePosition(letters[-1].kept_ms, letters[-1].id)
    assert ids(found) == [id for id, _ in steps]
    assert [each.message().payload for each in found] == [b"payload %d" % number for number in range(6)]
    monkeypatch.setattr(model, "PAGE_BYTES", 1)
    assert len(stand.run(stand.shelf.find(Selection(), FIRST_PAGE, whole=True))) == 1, "one always has room"
    assert len(stand.run(stand.shelf.find(Selection(), FIRST_PAGE))) == 6


def test_what_was_only_counted_and_was_handled_is_no_letter_to_anybody(stand: Stand) -> None:
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
    stand.run(stand.shelf.apply([*begun, again, failed]))
    assert len(stand.run(stand.shelf.find(Selection(), FIRST_PAGE, 9))) == 3, "they are in work"
    stand.run(stand.shelf.apply(passed))
    found = stand.run(stand.shelf.find(Selection(states=("handled",)), FIRST_PAGE, 9))
    assert {each.id for each in found} == {ids_of[1], ids_of[2]}
    assert stand.run(stand.shelf.count_by_state()) == {("billing", "handled"): 2}
