"""A real server finds a byte that was flipped on the disk, and the command line shows it."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import tfmq
from tests.e2e import commands
from tests.server.wire import running

SECONDS = 30.0


def shown(servers: str) -> Any:
    ended = commands.tfmq("topic", "show", "orders", "--json", servers=servers)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)["partitions"][0]


def test_a_flipped_byte_is_in_topic_show_status_and_the_log(tmp_path: Path) -> None:
    data = tmp_path / "data"
    settings = ["log.segment_bytes=64KiB", "verification.interval_seconds=1s", "verification.bytes_per_second=1GiB"]
    options = [option for each in settings for option in ("--set", each)]
    with running(data, *options) as (process, (host, port)):
        servers = f"{host}:{port}"
        with tfmq.Producer(servers) as producer:
            for number in range(8):
                producer.send("orders", bytes([number]) * 30_000).result()
        segment = min((data / "orders-0").glob("*.zxQueue"))
        with segment.open("r+b") as file:
            file.seek(200)
            file.write(b"\xff")
        found: list[Any] = []
        deadline = time.monotonic() + SECONDS
        with tfmq.Admin(servers) as admin:
            while not found and time.monotonic() < deadline:
                found = list(admin.topic("orders").partitions[0].findings)
                time.sleep(0.1)
            assert admin.status()["verification"]["findings"]["damaged"] == 1
        row = shown(servers)
        (finding,) = row["findings"]
        assert row["state"] == "damaged"
        assert (finding["file"], finding["first"], finding["kind"]) == (segment.name, 0, "damaged")
        assert finding["found_ms"] == found[0].found_ms
        assert round(datetime.fromisoformat(finding["found_at"]).timestamp() * 1000) == finding["found_ms"]
        ended = commands.tfmq("topic", "show", "orders", servers=servers)
        assert f"in {segment.name} of partition 0: damaged, 0 to {finding['next']}: {finding['reason']}" in ended.err
        assert "1 damaged" in commands.tfmq("status", servers=servers).out.decode()
        time.sleep(2.5)  # at least one more pass
        log = process.stop()[2]
    assert log.count(f"orders-0: {segment.name} is damaged from 0 to {finding['next']}: ") == 1
