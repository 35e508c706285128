"""What `acks="written"` promises of a live broker."""

from __future__ import annotations

from pathlib import Path

import pytest

import tfmq
from tools.rigs.live_server import LiveServer


@pytest.mark.long
def test_what_was_acknowledged_as_written_survives_kill_9(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "data", "flush.messages=100000", "flush.seconds=3600")
    server.start()
    payloads = [b"%d" % number for number in range(2000)]
    try:
        with tfmq.Producer(server.address, acks="written") as producer:
            handles = [producer.send("orders", payload) for payload in payloads]
            results = [handle.result(30) for handle in handles]
            assert {result.durability for result in results} <= {"written", "synced"}
            server.kill()
        server.start()
        with tfmq.Consumer(server.address, topics="orders") as consumer:
            found: list[bytes] = []
            while len(found) < len(payloads):
                messages = consumer.poll(10.0, 10_000)
                assert messages, f"{len(found)} of {len(payloads)} are there"
                found += [message.payload or b"" for message in messages]
        assert found == payloads
    finally:
        server.stop()
