"""What is said of a redrive over several stores, and its exit codes."""

from __future__ import annotations

from typing import Any

import pytest

from tfmq.cli.dlq import add, redrive_stores
from tfmq.cli.output import Output
from tfmq.dead_letters.redrive import Report, Wish
from tfmq.errors import BadRequest, TfmqError, TimedOut, UnknownTopic


class Scripted:
    """A desk that says what a redrive came to, and how it ended."""

    def __init__(self, report: Report, error: Exception | None = None) -> None:
        self.report = report
        self.error = error
        self.wishes: list[Wish] = []

    def redrive(self, wish: Wish, told: Any, report: Report) -> Report:
        self.wishes.append(wish)
        add(report, self.report)
        if self.error is not None:
            raise self.error
        return report


OUTPUT = Output(None, False, False)


def test_stores_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    desks: Any = [Scripted(Report(3, 1, 2, targets={"a": 3})), Scripted(Report(2, targets={"a": 1, "b": 1}))]
    assert redrive_stores(desks, Wish(), OUTPUT) == 0
    said = capsys.readouterr().err
    assert "5 dead letters sent: 4 to a, 1 to b" in said
    assert "1 of these had been sent by an interrupted redrive" in said and "2 dead letters skipped" in said


def test_letters_of_another_broker_are_named_with_both_brokers(capsys: pytest.CaptureFixture[str]) -> None:
    desks: Any = [
        Scripted(Report(1, targets={"a": 1}, foreign={"0b1c": 2}, broker="2d3e")),
        Scripted(Report(foreign={"0b1c": 1, "": 1}, broker="2d3e")),
    ]
    assert redrive_stores(desks, Wish(), OUTPUT) == 1
    said = capsys.readouterr().err
    assert (
        "3 dead letters left, of the broker 0b1c: --servers is the broker 2d3e;" in said and "--force" in said
    )
    assert "1 dead letter left, of an unknown broker" in said
    assert redrive_stores(desks, Wish(), Output(None, True, False)) == 1
    assert '"foreign": {"0b1c": 3, "": 1}' in capsys.readouterr().out


def test_what_strangers_wrote_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    clear = "\x1b[2J"
    report = Report(targets={clear: 1}, foreign={clear: 1}, broker="2d3e", unsure=[clear], unsendable=[clear])
    desks: Any = [Scripted(report)]
    assert redrive_stores(desks, Wish(), OUTPUT) == 1
    said = capsys.readouterr()
    assert "\x1b" not in said.err + said.out and said.err.count("[2J") == 4


def test_a_limit_counts_over_all_stores() -> None:
    desks: Any = [
        Scripted(Report(3, 1, targets={"a": 3})),
        Scripted(Report(3, targets={"a": 3})),
        Scripted(Report()),
    ]
    redrive_stores(desks, Wish(limit=5), OUTPUT)
    assert [[wish.limit for wish in each.wishes] for each in desks] == [[5], [3], []]


def test_what_nobody_knows_is_said_and_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    desks: Any = [Scripted(Report(unsure=["x may be there"], unsendable=["y cannot be sent"]))]
    assert redrive_stores(desks, Wish(), OUTPUT) == 1
    said = capsys.readouterr().err
    assert "x may be there" in said and "y cannot be sent" in said
    for report in (Report(unsure=["x may be there"]), Report(unsendable=["y cannot be sent"])):
        alone: Any = [Scripted(report)]
        assert redrive_stores(alone, Wish(), OUTPUT) == 1


def test_one_that_is_cut_short_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    cut = Scripted(Report(7, targets={"a": 7}), TimedOut("no answer"))
    desks: Any = [cut, Scripted(Report(9))]
    with pytest.raises(TimedOut):
        redrive_stores(desks, Wish(), OUTPUT)
    said = capsys.readouterr().err
    assert "7 dead letters sent" in said and "run the same command again" in said
    assert desks[1].wishes == []


@pytest.mark.parametrize(
    ("error", "dry", "told"),
    [
        (BadRequest("no topic name"), False, ""),
        (UnknownTopic("no topic nosuch"), True, ""),
        (UnknownTopic("no topic nosuch"), False, "correct the cause and run the same command again"),
    ],
)
def test_what_cannot_succeed_is_not_to_be_run_again(
    capsys: pytest.CaptureFixture[str], error: TfmqError, dry: bool, told: str
) -> None:
    desks: Any = [Scripted(Report(), error)]
    with pytest.raises(TfmqError):
        redrive_stores(desks, Wish(dry=dry), OUTPUT)
    said = capsys.readouterr().err
    assert told in said and ("the same command again" in said) == bool(told)
