"""A large transaction is on its way into a partition that stops, loses what was not forced, and is resumed."""

import pytest

from tests.transaction.rig import ORDERS, Rig
from tfmq import apply_queue

BATCHES = 4


def on_its_way(rig: Rig) -> list[bytes]:
    """Large for its target; the first slice is written, the second one being read."""
    rig.targets.limit = 1000
    rig.targets.automatic = False
    payloads = [b"%d" % number + b"." * 400 for number in range(2 * BATCHES)]
    batches = [(ORDERS, payloads[2 * number : 2 * number + 2]) for number in range(BATCHES)]
    rig.transact(batches)
    while not rig.targets.target(ORDERS).appends:
        rig.step()
    assert len(rig.targets.target(ORDERS).appends) == 1
    return payloads


def come_back(rig: Rig, keep: int) -> None:
    rig.targets.fail_force(ORDERS)
    rig.targets.resume(ORDERS, keep=keep)
    rig.handler.target_resumed(ORDERS)
    rig.targets.automatic = True


@pytest.mark.parametrize("keep", [0, 1])
def test_what_the_resumption_cut_away_is_written_again(keep: int) -> None:
    rig = Rig(queued=True)
    payloads = on_its_way(rig)
    come_back(rig, keep)
    rig.turn()
    rig.work()
    rig.advance(60)
    rig.work()
    assert rig.visible() == payloads
    rig.advance(60)
    assert not rig.store.transactions


def test_a_slice_that_waited_for_its_room_meanwhile_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its room was taken by another partition's bytes, whose force was slow."""
    monkeypatch.setattr(apply_queue, "IN_FLIGHT_BYTES_MAX", 2000)
    rig = Rig(queued=True)
    payloads = on_its_way(rig)
    pace = rig.handler._applier.in_flight
    pace.in_flight_bytes += 2000
    rig.work()
    assert len(rig.targets.target(ORDERS).appends) == 1
    come_back(rig, 0)
    pace.release(2000)
    rig.turn()
    rig.advance(60)
    rig.work()
    rig.advance(60)
    assert rig.visible() == payloads
