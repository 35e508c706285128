"""Random lives of a group: members join, leave, are killed, frozen, cut off and come back; brokers stop and crash.

Invariants, looked at all the time:

- of members that gave no reason to be declared dead no two hold the same partition;
- what is reported to a member as its own is on the disk;
- nothing is worked on before everything in front of it was: nothing is skipped;
- what was saved, by itself or in a transaction, never goes back, and the next owner of a partition begins there.

And at the end, when all are awake, every partition is one member's, and everything is worked on and saved. A failure
prints the seed that replays it.
"""

import pytest

from tests.broker.group_simulation import World
from tests.scale import SEED, scaled, seeded

STEPS = 400


@pytest.mark.parametrize("number", range(scaled(150)))
def test_a_partition_has_one_owner_and_nothing_is_skipped_whatever_happens(number: int) -> None:
    world = World(seeded("groups", number))
    story = []
    try:
        for _ in range(STEPS):
            story.append(world.step())
        world.come_to_rest()
    except BaseException:
        print(f"life {number} of seed {SEED}, {world.strategy}: {' '.join(story)}")
        raise
