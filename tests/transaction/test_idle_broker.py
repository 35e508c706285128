"""A broker that saw no transaction for longer than producers may be idle: who sends now was not idle."""

from tests.transaction.rig import ORDERS, Rig

WEEK_SECONDS = 7 * 86_400


def silent(rig: Rig) -> None:
    """Longer than a producer id is remembered."""
    assert rig.transact([(ORDERS, [b"before"])]).code == "ok"
    rig.clock.advance(WEEK_SECONDS + 60)


def test_the_first_sequence_after_a_long_silence_goes_on() -> None:
    rig = Rig()
    silent(rig)
    stream = rig.stream()
    for payload in (b"first", b"second", b"third"):
        assert rig.transact([(ORDERS, [payload])], stream).code == "ok"
    assert rig.visible() == [b"before", b"first", b"second", b"third"]


def test_a_transaction_that_is_open_while_others_end_the_silence_goes_on() -> None:
    rig = Rig()
    silent(rig)
    began = rig.begin("x")
    assert rig.send(began, [b"one"]).code == "ok"
    for _ in range(3):
        assert rig.transact([(ORDERS, [b"another"])]).code == "ok"
        rig.clock.advance(1)
    assert rig.send(began, [b"two"]).code == "ok"
    assert rig.commit(began, one_phase=True).code == "ok"
    assert rig.visible()[-2:] == [b"one", b"two"]


def test_what_was_sent_before_a_checkpoint_is_as_young_after_it() -> None:
    """A stream whose records bear no time yet is in the snapshot as such."""
    rig = Rig()
    silent(rig)
    stream = rig.stream()
    began = rig.begin("x", stream)
    assert rig.send(began, [b"one"]).code == "ok"
    rig.stop()
    after = rig.again(rig.disk, rig.targets)
    late = after.begin("y", stream)
    assert after.send(late, [b"two"]).code == "ok"
    assert after.commit(late, one_phase=True).code == "ok"
    assert after.visible() == [b"before", b"two"]
