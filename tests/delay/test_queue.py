"""The queue as a whole: what arrives fires when it is due, in order, once, whatever happens meanwhile."""

from tests.delay.desk import BILLS, ORDERS, Desk


def test_a_message_fires_when_it_is_due_and_not_before() -> None:
    desk = Desk()
    desk.send([b"a"], 1000)
    desk.advance(0.999)
    assert desk.visible() == []
    desk.advance(0.011)
    assert desk.visible() == [b"a"]


def test_messages_fire_in_the_order_of_their_dues() -> None:
    desk = Desk()
    desk.send([b"c", b"a", b"b", b"a2"], [300, 100, 200, 100])
    desk.advance(1)
    assert desk.visible() == [b"a", b"a2", b"b", b"c"]


def test_each_partition_gets_its_own() -> None:
    desk = Desk()
    desk.send([b"o1", b"o2"], [200, 100])
    desk.send([b"b1", b"b2"], [150, 50], key=BILLS)
    desk.advance(1)
    assert desk.visible(ORDERS) == [b"o2", b"o1"]
    assert desk.visible(BILLS) == [b"b2", b"b1"]


YEAR_MS = 365 * 86_400_000


def test_what_is_far_goes_to_the_disk_and_comes_back() -> None:
    desk = Desk()
    delays = [0, 1, 30_000, 65_536, 100_000, 3_600_000, 3 * 86_400_000, 400 * 86_400_000, 10 * YEAR_MS]
    sent = [desk.send([b"%d" % number], delay)[0] for number, delay in enumerate(delays)]
    for handle in sent:
        desk.until(handle.due + 20)
    assert [payload for _, payload in desk.fired] == [b"%d" % number for number in range(len(delays))]
    for (at, _), handle in zip(desk.fired, sent, strict=True):
        assert 0 <= at - handle.due <= 10
    assert desk.queue.pending == 0
    desk.advance(20)
    assert desk.buckets.live_buckets == ()
