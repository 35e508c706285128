"""A partition that stopped has what was written, and perhaps lost it: no restart makes that durable."""

import pytest

from tests.broker.helpers import Broker
from tfmq.protocol import commands


@pytest.mark.parametrize("restarts", [0, 1, 2])
@pytest.mark.parametrize("clean", [False, True])
def test_what_a_stopped_partition_has_is_not_taken_for_durable(restarts: int, clean: bool) -> None:
    """Its force failed: until it is resumed the journal may not forget it, whatever else goes on meanwhile."""
    broker = Broker()
    broker.create("orders")
    broker.create("bills")
    stream = broker.stream()
    broker.transact(stream, [("orders", 0, [b"first"])])
    for kind in ("force", "sync_file"):
        broker.disk.faults.fail(kind, path="/orders-0/")
    assert broker.transact(stream, [("orders", 0, [b"second"])]).code == "ok"
    broker.advance(5)
    for _ in range(restarts):
        broker = broker.restart() if clean else broker.crashed(broker.disk.crash(keep="all"))
        assert broker.transact(broker.stream(), [("bills", 0, [b"other"])]).code == "ok"
        broker.advance(300)
    broker = broker.crashed(broker.disk.crash(keep="nothing"))
    assert broker.log("orders").stopped is not None
    assert broker.ask(commands.ResumePartition("orders", 0)).state == "open"
    broker.advance(60)
    assert broker.payloads("orders") == [b"first", b"second"]
