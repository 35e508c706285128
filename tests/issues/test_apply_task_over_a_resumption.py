"""A large transaction is on its way into a partition that stops, loses what was not forced, and is resumed."""

import pytest

from tests.transaction.desk import ORDERS, Desk
from tfmq import apply_queue

BATCHES = 4


def on_its_way(desk: Desk) -> list[bytes]:
    """Large for its target; the first slice is written, the second one being read."""
    desk.targets.limit = 1000
    desk.targets.automatic = False
    payloads = [b"%d" % number + b"." * 400 for number in range(2 * BATCHES)]
    batches = [(ORDERS, payloads[2 * number : 2 * number + 2]) for number in range(BATCHES)]
    desk.transact(batches)
    while not desk.targets.target(ORDERS).appends:
        desk.step()
    assert len(desk.targets.target(ORDERS).appends) == 1
    return payloads


def come_back(desk: Desk, keep: int) -> None:
    desk.targets.fail_force(ORDERS)
    desk.targets.resume(ORDERS, keep=keep)
    desk.handler.target_resumed(ORDERS)
    desk.targets.automatic = True


@pytest.mark.parametrize("keep", [0, 1])
def test_what_the_resumption_cut_away_is_written_again(keep: int) -> None:
    desk = Desk(queued=True)
    payloads = on_its_way(desk)
    come_back(desk, keep)
    desk.turn()
    desk.work()
    desk.advance(60)
    desk.work()
    assert desk.visible() == payloads
    desk.advance(60)
    assert not desk.store.transactions


def test_a_slice_that_waited_for_its_room_meanwhile_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its room was taken by another partition's bytes, whose force was slow."""
    monkeypatch.setattr(apply_queue, "IN_FLIGHT_BYTES_MAX", 2000)
    desk = Desk(queued=True)
    payloads = on_its_way(desk)
    pace = desk.handler._applier.in_flight
    pace.in_flight_bytes += 2000
    desk.work()
    assert len(desk.targets.target(ORDERS).appends) == 1
    come_back(desk, 0)
    pace.release(2000)
    desk.turn()
    desk.advance(60)
    desk.work()
    desk.advance(60)
    assert desk.visible() == payloads
