"""Many decided transactions take several turns, also with a clock that advances at each call."""

from itertools import count

from journal.record.format import make_log_id
from tests.transaction.rig import Rig
from tfmq.transaction.applier import TURN_BYTES

PAYLOAD = b"x" * 900_000


def test_one_turn_brings_no_more_than_it_may() -> None:
    rig = Rig()
    calls = count(1)
    rig.timers.now = lambda: rig.clock.monotonic() + next(calls) * 1e-6  # no two calls return the same
    keys = [make_log_id(16, number) for number in range(3 * TURN_BYTES // len(PAYLOAD))]
    for key in keys:
        rig.transact([(key, [PAYLOAD])], turn=False)
    rig.turn()
    assert 0 < sum(len(rig.targets.target(key).appends) for key in keys) <= TURN_BYTES // len(PAYLOAD)
    for _ in range(5):
        rig.advance(0.1)
    assert all(rig.visible(key) == [PAYLOAD] for key in keys)


def test_a_start_brings_all_in_its_only_turn() -> None:
    rig = Rig()
    keys = [make_log_id(16, number) for number in range(2 * TURN_BYTES // len(PAYLOAD))]
    for key in keys:
        rig.targets.target(key)
        rig.transact([(key, [PAYLOAD])], turn=False)
    for key in keys:
        rig.targets.stop(key)
    rig.turn()
    targets = rig.targets.killed()
    for key in keys:
        targets.target(key).stopped = None
    rig.forget()
    after = rig.again(rig.disk.crash(keep="everything"), targets)
    assert after.recovered
    assert all(after.visible(key) == [PAYLOAD] for key in keys)
