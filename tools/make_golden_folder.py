"""Writes a small data folder with the server and client of another commit, for tests/test_upgrading.py.

    git worktree add OLD COMMIT
    python tools/make_golden_folder.py tests/golden/data-COMMIT.tar.xz --client OLD --server OLD

Client and server are imported from these checkouts, which may differ: then it shows that the one understands the other.
It uses only what the oldest commits have. The archive has two folders with the same messages: `stopped`, of a server
that was stopped cleanly, and `killed`, as kill -9 left it, so that opening it needs recovery. `contents.json` says what
was acknowledged: tests compare with that, not with this program.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FAR = datetime(2100, 1, 1, tzinfo=UTC)
"""When a delayed message is due that must still be there in any test."""
SOON_SECONDS = 120
"""A delayed message that is due after the folder was written, and before any test."""


def start(checkout: Path, data: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the checkout's server; its process and its address. Its segments are as small as possible."""
    arguments = ["--data", str(data), "--listen", "127.0.0.1:0", "--set", "log.segment_bytes=65536"]
    command = [sys.executable, "-m", "tfmq.server.main", *arguments]
    process = subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("ready "):
        sys.exit(f"the server did not start (exit code {process.wait(60)})")
    return process, line.split()[1]


def fill(servers: str) -> dict[str, Any]:
    """Write one of everything; what was acknowledged."""
    import tfmq

    contents: dict[str, Any] = {"topics": {}}
    topics = contents["topics"]
    with tfmq.Admin(servers) as admin, tfmq.Producer(servers, batch_bytes=16_384) as producer:
        admin.create_topic("spread", partitions=3)
        admin.create_topic("small", settings={"flush.messages": 1})
        plain: list[dict[str, Any]] = []
        for number in range(10):
            extra: dict[str, Any] = {
                "key": f"key-{number % 3}",
                "tag": f"tag-{number % 2}",
                "properties": {"number": str(number)},
            }
            sent = producer.send("plain", f"plain {number}", **extra).result()
            plain.append({"payload": f"plain {number}", "offset": sent.offset, "id": str(sent.message_id), **extra})
        topics["plain"] = plain
        # More than three segments of 64 KiB, in batches.
        batched = [f"batched {number} " + "x" * 1000 for number in range(250)]
        producer.send_many("batched", batched).result()
        topics["batched"] = [{"payload": each} for each in batched]
        spread = [f"spread {number}" for number in range(30)]
        for each in spread:
            producer.send("spread", each, key=each)
        producer.send("small", "small").result()
        producer.flush()
        topics["spread"] = [{"payload": each} for each in spread]
        topics["small"] = [{"payload": "small"}]

        with producer.transaction() as transaction:
            transaction.send("transactions", "in one request 1")
            transaction.send("transactions", "in one request 2")
        committed = producer.begin("golden-committed")
        committed.send("transactions", "in two phases")
        committed.prepare()
        committed.commit()
        rolled_back = producer.begin("golden-rolled-back")
        rolled_back.send("transactions", "rolled back")
        rolled_back.rollback()
        prepared = producer.begin("golden-in-doubt")
        prepared.send("transactions", "in doubt")
        prepared.send("plain", "in doubt as well")
        prepared.prepare()
        kept = ["in one request 1", "in one request 2", "in two phases"]
        topics["transactions"] = [{"payload": each} for each in kept]
        contents["in_doubt"] = {"xid": "golden-in-doubt", "transactions": "in doubt", "plain": "in doubt as well"}

        far = producer.send("delayed", "far", deliver_at=FAR).result()
        to_cancel = producer.send("delayed", "to cancel", deliver_at=FAR).result()
        cancelled = producer.send("delayed", "cancelled", deliver_at=FAR).result()
        assert producer.cancel(cancelled.delayed) == "cancelled"
        moved = producer.send("delayed", "moved", deliver_at=FAR).result()
        moved_to = producer.reschedule(moved.delayed, deliver_at=FAR)
        soon = producer.send("delayed", "soon", delay=SOON_SECONDS).result()
        producer.send("delayed", "at once").result()
        topics["delayed"] = [{"payload": "at once"}]
        contents["delayed"] = {
            "due": ["soon"],
            "pending": {"far": far.delayed, "to cancel": to_cancel.delayed, "moved": moved_to.handle},
            "cancelled": cancelled.delayed,
            "due_handle": soon.delayed,
        }
        admin.schedule("0 0 1 1 *", "scheduled", "a year", name="yearly", timezone="Europe/Berlin")
        admin.pause_schedule("yearly")
        contents["schedules"] = [{"name": "yearly", "cron": "0 0 1 1 *", "timezone": "Europe/Berlin"}]
    with tfmq.Consumer(servers, topics="plain", group="readers", commits="manual") as consumer:
        read = 0
        while read < 4:
            for message in consumer.poll(timeout=10.0, max_messages=4 - read):
                read += 1
                consumer.commit(message)
    contents["groups"] = {"readers": {"topic": "plain", "read": 4}}
    return contents


def without_reserve(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out the space that is kept for deletions: a megabyte of noise, which a start creates again."""
    return None if entry.name.endswith("/meta/reserve") else entry


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archive", type=Path, help="the file to write, NAME.tar.xz")
    parser.add_argument("--client", type=Path, required=True, help="the checkout whose client writes")
    parser.add_argument("--server", type=Path, required=True, help="the checkout whose server writes")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.client.resolve()))
    revision = ["git", "-C", str(arguments.server), "describe", "--always", "--abbrev=8"]
    commit = subprocess.run(revision, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        stopped, killed = Path(folder, "stopped"), Path(folder, "killed")
        process, servers = start(arguments.server, stopped)
        contents = {"commit": commit, "written": datetime.now(UTC).isoformat(timespec="seconds")}
        try:
            contents |= fill(servers)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        shutil.copytree(stopped, killed)
        process, _ = start(arguments.server, stopped)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        Path(folder, "contents.json").write_text(json.dumps(contents, indent=1))
        with tarfile.open(arguments.archive, "w:xz", preset=9) as tar:
            for name in ("contents.json", "stopped", "killed"):
                tar.add(Path(folder, name), name, filter=without_reserve)
    print(f"{arguments.archive}: {arguments.archive.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
