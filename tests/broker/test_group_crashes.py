"""Every power cut during a rebalance: a reported assignment is valid after the cut, or a later one is."""

import random

from journal.testing import Moment, crash_states
from tests.broker.group_member import Name, Seat
from tests.broker.helpers import Broker
from tests.scale import SEED, scaled

Told = dict[str, dict[Name, int]]


def test_what_was_sent_to_members_survives_every_power_cut() -> None:
    """Seeded by TFMQ_TEST_SEED. No member gets a partition before its owner's time is over, either."""
    broker = Broker()
    broker.create(partitions=4)
    members = [Seat(broker, name) for name in ("ada", "bob", "eve")]
    reported: Told = {}
    moments: list[tuple[Moment, Told]] = []
    broker.disk.after = lambda kind, path: moments.append((Moment(broker.disk), dict(reported)))

    def note() -> None:
        reported.update({each.name: dict(each.held) for each in members if each.generation})
        moments.append((Moment(broker.disk), dict(reported)))

    for each in members:
        each.join()
        note()
    for _ in range(3):
        for each in members:
            each.beat()
            note()
            each.finish()
            note()
    members[0].leave()
    reported.pop("ada")
    for each in members[1:]:
        each.beat()
        note()
    broker.disk.after = None
    assert len(moments) > 20
    assert {name[2] for held in reported.values() for name in held} == {0, 1, 2, 3}
    for moment, expected in moments:
        for disk in crash_states(moment, scaled(20), random.Random(SEED)):
            examine(Broker(disk, broker.clock), expected)


def examine(after: Broker, expected: Told) -> None:
    row = after.engine.broker.catalog.state.groups.get("billing")
    for member, held in expected.items():
        for (_, incarnation, number), grant in held.items():
            owner = row and row.owners.get((incarnation, number))
            assert owner, f"{member} was told of {number} by {grant}, and nobody has it"
            assert (owner.member, owner.generation) == (member, grant) or owner.generation > grant, (
                number,
                member,
                owner,
            )
    owned = set() if row is None else set(row.owners)
    stranger = Seat(after, "joe")
    stranger.join()
    assert not {(name[1], name[2]) for name in stranger.held} & owned
