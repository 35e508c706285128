"""A block that was prepared when segments were larger than they are now is written all the same: it was promised."""

import pytest

from tests.broker.helpers import Broker
from tfmq.protocol import commands

LARGE = b"x" * 200_000


@pytest.mark.parametrize("neighbours", [0, 3])
def test_it_has_a_segment_of_its_own(neighbours: int) -> None:
    before = Broker(log__segment_bytes=1 << 20)
    before.create("orders", 1)
    stream = before.stream()
    began = before.begin(stream, "x")
    assert before.send(stream, began, [LARGE]).code == "ok"
    assert before.prepare(began).state == "prepared"
    after = Broker(before.disk.crash(keep="everything"), before.clock, log__segment_bytes=1 << 16)
    for number in range(neighbours):
        assert after.transact(after.stream(), [("orders", 0, [b"small %d" % number])]).state == "committed"
    found = after.ask(commands.CommitTransaction("x", began.epoch, False, False, []))
    assert found.state == "committed"
    assert LARGE in after.payloads()
    assert after.transact(after.stream(), [("orders", 0, [b"behind"])]).state == "committed"
    again = Broker(after.disk.crash(keep="everything"), after.clock, log__segment_bytes=1 << 16)
    assert len(again.payloads()) == neighbours + 2
