"""Many decided transactions take several turns, also with a clock that advances at each call."""

from itertools import count

from journal.record.format import make_log_id
from tests.transaction.desk import Desk
from tfmq.transaction.applier import TURN_BYTES

PAYLOAD = b"x" * 900_000


def test_one_turn_brings_no_more_than_it_may() -> None:
    desk = Desk()
    calls = count(1)
    desk.timers.now = lambda: desk.clock.monotonic() + next(calls) * 1e-6  # no two calls return the same
    keys = [make_log_id(16, number) for number in range(3 * TURN_BYTES // len(PAYLOAD))]
    for key in keys:
        desk.transact([(key, [PAYLOAD])], turn=False)
    desk.turn()
    assert 0 < sum(len(desk.targets.target(key).appends) for key in keys) <= TURN_BYTES // len(PAYLOAD)
    for _ in range(5):
        desk.advance(0.1)
    assert all(desk.visible(key) == [PAYLOAD] for key in keys)


def test_a_start_brings_all_in_its_only_turn() -> None:
    desk = Desk()
    keys = [make_log_id(16, number) for number in range(2 * TURN_BYTES // len(PAYLOAD))]
    for key in keys:
        desk.targets.target(key)
        desk.transact([(key, [PAYLOAD])], turn=False)
    for key in keys:
        desk.targets.stop(key)
    desk.turn()
    targets = desk.targets.killed()
    for key in keys:
        targets.target(key).stopped = None
    desk.forget()
    after = desk.again(desk.disk.crash(keep="everything"), targets)
    assert after.recovered
    assert all(after.visible(key) == [PAYLOAD] for key in keys)
