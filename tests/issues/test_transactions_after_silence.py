"""A broker that saw no transaction for longer than producers may be idle: who sends now was not idle."""

from tests.transaction.desk import ORDERS, Desk

WEEK_SECONDS = 7 * 86_400


def silent(desk: Desk) -> None:
    """Longer than a producer id is remembered."""
    assert desk.transact([(ORDERS, [b"before"])]).code == "ok"
    desk.clock.advance(WEEK_SECONDS + 60)


def test_the_first_stream_after_a_long_silence_goes_on() -> None:
    desk = Desk()
    silent(desk)
    stream = desk.stream()
    for payload in (b"first", b"second", b"third"):
        assert desk.transact([(ORDERS, [payload])], stream).code == "ok"
    assert desk.visible() == [b"before", b"first", b"second", b"third"]


def test_a_transaction_that_is_open_while_others_end_the_silence_goes_on() -> None:
    desk = Desk()
    silent(desk)
    began = desk.begin("x")
    assert desk.send(began, [b"one"]).code == "ok"
    for _ in range(3):
        assert desk.transact([(ORDERS, [b"another"])]).code == "ok"
        desk.clock.advance(1)
    assert desk.send(began, [b"two"]).code == "ok"
    assert desk.commit(began, one_phase=True).code == "ok"
    assert desk.visible()[-2:] == [b"one", b"two"]


def test_what_was_sent_before_a_checkpoint_is_as_young_after_it() -> None:
    """A stream whose records bear no time yet is in the snapshot as such."""
    desk = Desk()
    silent(desk)
    stream = desk.stream()
    began = desk.begin("x", stream)
    assert desk.send(began, [b"one"]).code == "ok"
    desk.stop()
    after = desk.again(desk.disk, desk.targets)
    late = after.begin("y", stream)
    assert after.send(late, [b"two"]).code == "ok"
    assert after.commit(late, one_phase=True).code == "ok"
    assert after.visible() == [b"before", b"two"]
