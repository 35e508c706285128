"""All members' offsets are one change of the catalog: what could never be written is refused while it can be."""

import pytest

from tests.transaction.rig import Rig
from tests.transaction.targets import Row
from tfmq.transaction import commit_group_commands


def test_a_group_with_too_many_offsets_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_group_commands, "OFFSETS_MAX", 2)
    rig = Rig()
    members = [rig.member("query", 1) for _ in range(3)]
    for number, member in enumerate(members):
        rig.send(member, [b"m"])
        assert rig.prepare(member, [Row(f"group-{number}", 1, 7)]).code == "ok"
    assert rig.commit_group("query", 1, members).code == "bad_request"
    assert rig.visible() == [] and {rig.state(member) for member in members} == {"prepared"}
    assert rig.commit_group("query", 1, members[:2]).state == "committed"
