"""What tests of transactions do alike with `tfmq.aio` and `tfmq.twisted`: coroutines that either of the two runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.fake_broker import FakeBroker
from tfmq.errors import NotAllowed


async def commit_by_leaving(made: Any, broker: FakeBroker) -> None:
    async with made.transaction() as tx:
        delivery = await tx.send("orders", b"1", key="k")
        many = await tx.send_many("orders", [b"2", "3"])
        with pytest.raises(NotAllowed, match="Ask for the result after the commit"):
            await delivery
        assert broker.payloads("orders") == []
    assert tx.state == "committed" and (await delivery).offset == 0
    assert sum(each.count for each in await many) == 2


async def send_in_transactions_and_plainly(made: Any, number: int, count: int) -> None:
    for each in range(count):
        async with made.transaction() as tx:
            await tx.send("orders", b"%d/%d" % (number, each))
        await made.send("orders", b"%d/%d plain" % (number, each))


async def drive_through_both_phases(producer: Any, resource_type: type) -> None:
    resource = producer.xa()
    assert isinstance(resource, resource_type)
    tx = await resource.start("branch-1")
    await tx.send("orders", b"1")
    resource.end("branch-1")
    assert await resource.prepare("branch-1") == "prepared"
    assert await resource.recover() == ["branch-1"]
    assert await resource.commit("branch-1") == "committed"
    await resource.start("branch-2")
    resource.end("branch-2")
    assert await resource.rollback("branch-2") == "rolled_back"
    assert await resource.forget("branch-1") is False
