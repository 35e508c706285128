"""A transaction as its holder sees it; one that nobody holds any more."""

import gc
import logging

import pytest

from tests.client.transaction_rig import TransactionRig
from tfmq.client.producer.xa import XaBranches
from tfmq.client.transaction.transaction import TransactionCore, TransactionHandle


class Handle(TransactionHandle):
    """Without any waiting."""

    def __init__(self, core: TransactionCore) -> None:
        self._core = core


def test_it_shows_its_name_and_state() -> None:
    rig = TransactionRig()
    handle = Handle(rig.begin("order-42"))
    assert (handle.xid, handle.state, handle.dropped) == ("order-42", "open", 0)
    assert repr(handle) == "<Transaction order-42 open>"


def test_one_that_is_forgotten_is_rolled_back_and_told(caplog: pytest.LogCaptureFixture) -> None:
    rig = TransactionRig()
    core = rig.begin("order-42")
    handle = Handle(core)
    rig.send(core, b"x")
    del handle
    gc.collect()
    assert core.state == "open"
    with caplog.at_level(logging.WARNING):
        rig.transactions.roll_back_unreferenced()
    rig.exchange()
    assert core.state == "rolled_back" and rig.broker.states() == ["rolled_back"]
    assert "order-42 was dropped without commit or rollback" in caplog.text


def test_one_that_is_held_by_its_name_is_not_forgotten() -> None:
    rig = TransactionRig()
    core = rig.run(XaBranches(rig.transactions).start("branch"))
    handle = Handle(core)
    del handle
    gc.collect()
    rig.transactions.roll_back_unreferenced()
    assert core.state == "open" and rig.broker.states() == ["open"]


def test_one_that_is_over_or_prepared_is_forgotten_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    rig = TransactionRig()
    over, prepared = rig.begin(), rig.begin("p")
    for core in (over, prepared):
        rig.send(core, b"x")
    rig.commit(over), rig.prepare(prepared)
    handles = [Handle(over), Handle(prepared)]
    del handles
    gc.collect()
    rig.transactions.roll_back_unreferenced()
    assert prepared.state == "prepared" and "prepared" in rig.broker.states() and caplog.text == ""
    assert len(rig.transactions) == 0
