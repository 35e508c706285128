"""The model sees what it claims to see: every wrong view is refused, by the sentence that names it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tools.rigs.transaction_model import ABSENT, COMMITTED, PREPARED, Broken, Key, Model, Together, View

A = [b"a:0", b"a:1"]
B = [b"b:0"]
P = [b"p:0", b"p:1"]


@pytest.fixture
def model() -> Model:
    """Two transactions in two partitions, of which `a` was answered before `b` was asked for; and one stream."""
    made = Model()
    for number, (label, payloads) in enumerate((("a", A), ("b", B))):
        transaction = made.begin(label, label)
        transaction.epoch = number + 1
        transaction.messages.update({0: list(payloads), 1: list(payloads)})
        transaction.is_now(COMMITTED)
        transaction.asked, transaction.answered = made.tick(), made.tick()
    stream = made.stream("p", 0)
    stream.sent, stream.safe = list(P), 1
    return made


RIGHT = View({0: [P[0], *A, *B, P[1]], 1: [*A, *B]})


def test_what_is_right_is_right(model: Model) -> None:
    model.check(RIGHT)
    model.check(RIGHT)


WRONG: dict[str, tuple[dict[Key, Sequence[bytes]], str]] = {
    "half of it in one partition": ({0: [P[0], A[0], *B], 1: [*A, *B]}, "torn: 1 of 2"),
    "one partition without it": ({0: [P[0], *B], 1: [*A, *B]}, "torn"),
    "twice": ({0: [P[0], *A, *B], 1: [*A, *A, *B]}, "torn: 4 of 2"),
    "out of order": ({0: [P[0], A[1], A[0], *B], 1: [*A, *B]}, "torn"),
    "gone": ({0: [P[0], *B], 1: B}, "an answered commit is lost"),
    "not side by side": ({0: [P[0], A[0], P[1], A[1], *B], 1: [*A, *B]}, "side by side"),
    "before one that was answered earlier": ({0: [P[0], *B, *A], 1: [*B, *A]}, "stands before"),
    "a hole in a stream": ({0: [P[1], *A, *B], 1: [*A, *B]}, "hole"),
    "a plain one lost": ({0: [*A, *B], 1: [*A, *B]}, "1 acknowledged, 0 there"),
    "what nobody sent": ({0: [*P, *A, *B, b"x:1"], 1: [*A, *B]}, "never sent"),
    "in a strange partition": ({0: [*P, *A, *B], 1: [*A, *B], 2: A}, "where none were sent"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_view_is_named(model: Model, name: str) -> None:
    messages, sentence = WRONG[name]
    with pytest.raises(Broken, match=sentence):
        model.check(View(messages))


FATES = {
    "aborted and visible": (ABSENT, RIGHT, "never committed"),
    "prepared and visible": (PREPARED, RIGHT, "decided by itself"),
    "prepared, listed and visible": (PREPARED, replace(RIGHT, prepared=frozenset({1})), "and can be seen"),
    "prepared and forgotten": (PREPARED, View({0: [P[0], *B], 1: B}), "forgotten"),
    "never prepared": (ABSENT, View({0: [P[0], *B], 1: B}, prepared=frozenset({1})), "not prepared"),
    "committed and still in doubt": (COMMITTED, View({0: [P[0], *B], 1: B}, prepared=frozenset({1})), "lost"),
}


@pytest.mark.parametrize("name", FATES)
def test_a_fate_that_cannot_be_is_named(model: Model, name: str) -> None:
    fate, view, sentence = FATES[name]
    model.transactions["a"].is_now(fate)
    with pytest.raises(Broken, match=sentence):
        model.check(view)


def test_different_orders_in_two_partitions_are_seen(model: Model) -> None:
    for each in model.transactions.values():
        each.asked, each.answered = 1, 1 << 62
    model.check(View({0: [P[0], *B, *A], 1: [*B, *A]}))
    with pytest.raises(Broken, match="different orders"):
        model.seen.clear()
        model.check(View({0: [P[0], *B, *A], 1: [*A, *B]}))


def test_what_was_found_is_known_from_then_on(model: Model) -> None:
    a = model.transactions["a"]
    a.is_now(ABSENT, COMMITTED)
    model.check(View({0: [P[0], *B], 1: B}))
    assert a.fates == {ABSENT}
    with pytest.raises(Broken, match="never committed"):
        model.check(View({0: [P[0], *B, *A], 1: [*B, *A]}))


def test_what_was_seen_stays(model: Model) -> None:
    model.check(RIGHT)
    model.streams["p"].safe = 0
    with pytest.raises(Broken, match="not there any more"):
        model.check(View({0: [*A, *B], 1: [*A, *B]}))


def test_a_half_committed_group_is_seen(model: Model) -> None:
    a, b = model.transactions.values()
    a.is_now(PREPARED, COMMITTED)
    b.is_now(PREPARED, COMMITTED)
    model.together.append(Together("g/1", (a, b), ()))
    with pytest.raises(Broken, match="g/1 is torn"):
        model.check(View({0: [P[0], *B], 1: B}, prepared=frozenset({1})))


def test_a_member_that_a_commit_did_not_drop_is_seen(model: Model) -> None:
    a, b = model.transactions.values()
    a.is_now(PREPARED, ABSENT)
    model.together.append(Together("g/1", (b,), (a,)))
    with pytest.raises(Broken, match="not dropped"):
        model.check(View({0: [P[0], *B], 1: B}, prepared=frozenset({1})))


OFFSETS: dict[str, tuple[Callable[[View], View], str]] = {
    "not there": (lambda view: view, "stands at None"),
    "another one's": (lambda view: replace(view, saved={"g": 7}), "stands at 7"),
    "locked by nobody": (lambda view: replace(view, locked=frozenset({"g"})), "locked"),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_that_do_not_belong_to_the_messages_are_seen(model: Model, name: str) -> None:
    model.transactions["a"].offsets["g"] = 3
    model.transactions["b"].offsets["g"] = 4
    model.check(replace(RIGHT, saved={"g": 4}))
    change, sentence = OFFSETS[name]
    with pytest.raises(Broken, match=sentence):
        model.check(change(RIGHT))


def test_offsets_of_one_in_doubt_are_locked(model: Model) -> None:
    model.transactions["a"].offsets["g"] = 3
    model.transactions["a"].is_now(PREPARED)
    view = View({0: [P[0], *B], 1: B}, prepared=frozenset({1}))
    model.check(replace(view, locked=frozenset({"g"})))
    with pytest.raises(Broken, match="locked: False"):
        model.check(view)


def test_knowledge_can_be_recalled(model: Model) -> None:
    known = model.knowledge()
    model.transactions["a"].is_now(ABSENT)
    model.check(View({0: [P[0], *B, P[1]], 1: B}))
    model.begin("c").is_now(PREPARED)
    model.recall(known)
    model.check(RIGHT)
    assert model.transactions["c"].fates == {ABSENT}
