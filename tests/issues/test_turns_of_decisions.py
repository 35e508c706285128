"""A pile of decided transactions takes several turns, by a clock that never stands still, too."""

import time

from journal.record.format import make_log_id
from tests.transaction.desk import Desk
from tfmq.transaction.applier import TURN_BYTES

PAYLOAD = b"x" * 900_000


def test_one_turn_brings_no_more_than_it_may() -> None:
    desk = Desk()
    desk.timers.now = time.monotonic  # type: ignore[method-assign]  # a real one, which no two looks find alike
    keys = [make_log_id(16, number) for number in range(3 * TURN_BYTES // len(PAYLOAD))]
    for key in keys:
        desk.transact([(key, [PAYLOAD])], turn=False)
    desk.turn()
    assert 0 < sum(len(desk.targets.target(key).appends) for key in keys) <= TURN_BYTES // len(PAYLOAD)
    for _ in range(5):
        desk.tick()
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
