"""`tfmq tx groups` and `forget-group` against a broker of the test's own."""

from collections.abc import Iterator

import click
import pytest

from tests.cli.conftest import Cli
from tests.cli.test_tx import Rig
from tests.client.fake_broker import listening
from tests.client.in_doubt_broker import InDoubtBroker
from tfmq.cli import tx
from tfmq.client.admin.models import CommitGroupDescription


@pytest.fixture
def rig(offline: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    broker = InDoubtBroker()
    with listening(broker) as servers:
        monkeypatch.setenv("TFMQ_SERVERS", servers)
        yield Rig(broker, offline)


def test_the_list_says_how_far_each_writer_is(rig: Rig) -> None:
    ran = rig("groups")
    table = ran.out.decode()
    assert ran.code == 0
    for words in ("query-0", "query-2", "sequence", "members"):
        assert words in table
    found = rig("groups", "--json").json
    assert [(each["group"], each["sequence"]) for each in found] == [("query-0", 0), ("query-1", 1), ("query-2", 2)]
    rig.broker.groups.clear()
    assert rig("groups") == (0, b"", "no commit group has committed anything\n")
    assert rig("groups", "--json").out == b"[]\n"


def test_a_program_gets_each_field_once_and_its_time_as_iso_too() -> None:
    details = {"members": 3, "committed_ms": 1_795_000_000_123}
    row = tx.group_row(CommitGroupDescription("query", 7, "run", 5, details))
    assert row == {
        "group": "query",
        "sequence": 7,
        "run": "run",
        "rows": 5,
        **details,
        "committed_at": "2026-11-18T11:06:40.123+00:00",
    }


def test_one_that_has_committed_nothing_shows_no_sequence() -> None:
    shown = tx.group_table_row(CommitGroupDescription("query", details={"members": 3, "committed_ms": 0}))
    assert shown == {"group": "query", "sequence": None, "rows": None, "committed": "-", "members": 3, "run": None}


def test_groups_are_forgotten_by_name(rig: Rig) -> None:
    ran = rig("forget-group", "query-0", "query-2", "--yes")
    stay = tx.remaining_text(4)
    assert (ran.code, ran.err) == (0, f"query-0: forgotten{stay}\nquery-2: forgotten{stay}\n")
    assert list(rig.broker.groups) == ["query-1"]
    assert rig("forget-group", "query-1", "--yes", "--json").json == [{"group": "query-1", "forgotten": True}]


def test_a_wrong_name_forgets_nothing_and_gets_the_likely_one(rig: Rig) -> None:
    ran = rig("forget-group", "query-0", "qeury-1", "--yes")
    assert ran.code == 1 and "There is no commit group 'qeury-1'. Did you mean 'query-1'?" in ran.err
    assert len(rig.broker.groups) == 3


def test_a_script_forgets_nothing_without_a_yes(rig: Rig) -> None:
    ran = rig("forget-group", "query-1")
    assert ran.code == 2 and "Add --yes to forget query-1, which is at sequence 1; this cannot be undone." in ran.err
    assert len(rig.broker.groups) == 3


def test_a_person_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr(click, "confirm", lambda question, **_: asked.append(question) or True)
    tx.confirm_forgetting([CommitGroupDescription("a", 1), CommitGroupDescription("b", 2)])
    tx.confirm_forgetting([CommitGroupDescription("c")])
    assert asked == [
        "Forget 2 commit groups; the first is a, which is at sequence 1? This cannot be undone.",
        "Forget c, which has committed nothing yet? This cannot be undone.",
    ]


def test_what_stays_of_a_group_is_said() -> None:
    assert tx.remaining_text(0) == ""
    assert tx.remaining_text(1).startswith("; 1 prepared transaction of it stays until the time is over (`tfmq tx")
    assert tx.remaining_text(2).startswith("; 2 prepared transactions of it stay until")


@pytest.mark.parametrize("command", ["groups", "forget-group"])
def test_every_command_has_help_with_an_example(offline: Cli, command: str) -> None:
    ran = offline("tx", command, "--help")
    assert ran.code == 0 and f"tfmq tx {command}" in ran.out.decode().split("Example")[1]
