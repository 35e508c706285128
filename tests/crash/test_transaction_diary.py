"""The rig's diaries: what a client wrote down becomes what is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.rigs.transaction_diary import model_of
from tools.rigs.transaction_model import ABSENT, COMMITTED, NEVER, PREPARED, Fate

BEGIN = {"event": "begin", "xid": "x"}


def ask(what: str) -> dict[str, Any]:
    return {"event": "ask", "what": what}


def answer(what: str, code: str = "ok", outcome: str = "unknown") -> dict[str, Any]:
    return {"event": "answer", "what": what, "code": code, "outcome": outcome}


def written(folder: Path, *entries: dict[str, Any], tail: str = "") -> Path:
    path = folder / "a.diary"
    lines = [json.dumps({"label": "a", "at": number, **entry}) for number, entry in enumerate(entries, 1)]
    path.write_text("\n".join(lines) + "\n" + tail)
    return path


STORIES: list[tuple[list[dict[str, Any]], set[Fate]]] = [
    ([BEGIN], {ABSENT}),
    ([BEGIN, ask("prepare")], {ABSENT, PREPARED}),
    ([BEGIN, ask("prepare"), answer("prepare")], {PREPARED}),
    ([BEGIN, ask("prepare"), answer("prepare"), ask("commit")], {PREPARED, COMMITTED}),
    ([BEGIN, ask("prepare"), answer("prepare"), ask("commit"), answer("commit")], {COMMITTED}),
    ([BEGIN, ask("prepare"), answer("prepare"), ask("rollback"), answer("rollback")], {ABSENT}),
    ([BEGIN, ask("commit"), answer("commit", "timed_out")], {ABSENT, COMMITTED}),
    ([BEGIN, ask("commit"), answer("commit", "disk_full", "not done")], {ABSENT}),
    ([BEGIN, ask("commit"), answer("commit", "transaction_rolled_back")], {ABSENT}),
    ([BEGIN, answer("commit", "storage_stopped")], {ABSENT}),
]


@pytest.mark.parametrize(("entries", "fates"), STORIES, ids=range(len(STORIES)))
def test_what_may_be(tmp_path: Path, entries: list[dict[str, Any]], fates: set[Fate]) -> None:
    model = model_of([written(tmp_path, *entries)], [])
    assert model.transactions["a"].fates == fates


def test_an_answer_that_came_while_the_power_was_away_is_none(tmp_path: Path) -> None:
    path = written(tmp_path, BEGIN, ask("commit"), answer("commit"))
    assert model_of([path], []).transactions["a"].fates == {COMMITTED}
    away = model_of([path], [(3, 9)]).transactions["a"]
    assert (away.fates, away.asked, away.answered) == (frozenset({ABSENT, COMMITTED}), 2, NEVER)


def test_a_torn_last_line_and_a_missing_diary_are_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, BEGIN, ask("prepare"), tail='{"event": "answer", "la')
    model = model_of([path, tmp_path / "never-written"], [])
    assert model.transactions["a"].fates == {ABSENT, PREPARED}


def test_messages_and_sequences_are_as_they_were_sent(tmp_path: Path) -> None:
    sent = {"event": "send", "topic": "t", "partition": 1, "payload": "a:0:", "size": 6}
    plain = {"event": "plain", "label": "p", "topic": "t", "partition": 0, "first": 0, "count": 2}
    stored = {"event": "stored", "label": "p", "count": 2}
    model = model_of([written(tmp_path, BEGIN, sent, plain, stored)], [])
    assert model.transactions["a"].messages == {("t", 1): [b"a:0:.."]}
    assert (model.streams["p"].sent, model.streams["p"].safe) == ([b"p:0:", b"p:1:"], 2)


def test_errors_are_counted_by_their_code(tmp_path: Path) -> None:
    troubles: dict[str, int] = {}
    entry = {"event": "trouble", "code": "busy", "sentence": "later"}
    model_of([written(tmp_path, entry, entry)], [], troubles)
    assert troubles == {"busy": 2}
