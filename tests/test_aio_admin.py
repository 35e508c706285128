"""`tfmq.aio.Admin`: what `tfmq.Admin` gives, awaited. Names and docs are compared in test_aio."""

import asyncio
from typing import Any

import tfmq
from tests.client.fake_broker import listening
from tests.client.fake_delays import NOW_MS, Waiting
from tests.client.in_doubt_broker import InDoubtBroker, row
from tfmq import aio

SECONDS = 20.0
WAITING = [Waiting(NOW_MS + 1000 * n, n, "orders", 0, b"r" * 20) for n in range(5)]
HANDLES = [each.handle for each in WAITING]
CALLS: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
    ("ping", (), {}),
    ("topics", (), {}),
    ("transactions", (), {"limit": 5}),
    ("transactions", (["open"],), {"group": "shop", "after": 1}),
    ("transaction", ("order",), {}),
    ("commit_transaction", ("order",), {}),
    ("rollback_transaction", ("other", 4), {"heuristic": False}),
    ("forget_transaction", ("order",), {}),
    ("commit_groups", (), {}),
    ("commit_group", ("q", 1, "run", [("a", 1), ("b", 2)], 10), {"other_total": True}),
    ("abort_commit_group", ("q", 1, "run"), {}),
    ("forget_commit_group", ("query-1",), {}),
    ("delayed", (), {}),
    ("delayed", ("orders",), {"partition": 0, "first": 0, "end": 1 << 40, "after": HANDLES[0], "limit": 1}),
    ("delayed_histogram", ([0, NOW_MS / 1000, 1 << 40],), {}),
    ("delayed_histogram", ([0, 1 << 40], "orders"), {}),
    ("describe_delayed", (HANDLES[2],), {}),
    ("reschedule", (HANDLES[1], 0), {}),
    ("reschedule", (HANDLES[2],), {"deliver_at": 2_000_000_000}),
    ("cancel", (HANDLES[0],), {}),
    ("schedule", ("@daily", "orders", "go"), {"name": "a", "key": "k", "misfire": "all", "timezone": "Asia/Tokyo"}),
    ("schedule", ("@daily", "orders", None), {"tag": "t", "properties": {"n": "1"}, "partition": 0}),
    ("schedules", (), {}),
    ("describe_schedule", ("a",), {}),
    ("pause_schedule", ("a",), {}),
    ("resume_schedule", ("a",), {}),
    ("remove_schedule", ("a",), {}),
)


def broker() -> InDoubtBroker:
    made = InDoubtBroker(row("order", 3), row("other", 4), row("busy", 5, "open"))
    made.waiting, made.numbers = list(WAITING), len(WAITING)
    return made


def test_each_method_asks_the_same_and_gives_the_same_as_the_blocking_one() -> None:
    one, other = broker(), broker()
    with listening(one) as servers, tfmq.Admin(servers) as admin:
        expected = [getattr(admin, name)(*given, **named) for name, given, named in CALLS]

    async def ask(servers: str) -> list[Any]:
        async with aio.Admin(servers) as admin:
            return [await getattr(admin, name)(*given, **named) for name, given, named in CALLS]

    with listening(other) as servers:
        found = asyncio.run(asyncio.wait_for(ask(servers), SECONDS))
    assert found == expected
    assert other.requests[1:] == one.requests[1:], "behind hello"
    assert [each.state for each in expected[2]] == ["prepared", "prepared"]
