"""What kill -9 leaves of a broker is no damage: audited as it lies, and again when it was started and works."""

import threading
from contextlib import suppress
from pathlib import Path
from random import Random

import tfmq
from journal.control import SOURCE_TRANSACTION
from tests.scale import scaled, seeded
from tests.spark.pipelines.audited import audit_here, segments
from tests.spark.pipelines.broken import blocks_of
from tfmq.errors import TfmqError
from tfmq.message import Message
from tools.rigs.live_server import LiveServer

KILLS = 1 + scaled(30)


def work(address: str, random: Random, ended: threading.Event) -> None:
    """Plain, delayed and transactional sends until the broker is gone; commits, rollbacks, prepared, large ones."""
    with suppress(TfmqError), tfmq.Producer(address, timeout=1) as producer:
        number = 0
        while not ended.is_set():
            number += 1
            producer.send_many(
                "orders", [b"x" * random.randrange(400) for _ in range(random.randrange(1, 300))]
            )
            producer.send("orders", b"later", delay=random.random() / 20)
            xid = f"x{random.getrandbits(60)}" if number % 3 == 0 else None
            transaction = producer.begin() if xid is None else producer.begin(xid=xid)
            size = 20_000 if number % 17 == 0 else random.randrange(1, 40)
            transaction.send_many("paid", [Message(b"p" * 100, partition=n % 3) for n in range(size)])
            transaction.send("later", b"later", delay=0.01)
            if xid is not None and number % 2:
                transaction.prepare()
            if random.random() < 0.2:
                transaction.rollback()
            elif xid is None or number % 5:
                transaction.commit()


def test_nothing_is_found_in_what_kill_9_leaves(tmp_path: Path) -> None:
    random = seeded("audit", "kill")
    data = tmp_path / "data"
    server = LiveServer(
        data, "topics.partitions=3", "log.segment_bytes=2097152", "transaction.journal_file_bytes=1048576"
    )
    for kill in range(KILLS):
        server.start()
        ended = threading.Event()
        threads = [
            threading.Thread(target=work, args=(server.address, seeded("audit", kill, n), ended))
            for n in range(2)
        ]
        for thread in threads:
            thread.start()
        for _ in range(random.randrange(1, 4)):
            result = audit_here(data, 1 << 20)
            assert result.findings == [], (kill, "at work", result.findings)
        server.kill()
        ended.set()
        for thread in threads:
            thread.join()
        result = audit_here(data, 1 << 20)
        assert result.findings == [], (kill, "killed", result.findings)
    server.start()
    server.stop()
    result = audit_here(data, 1 << 20)
    assert result.findings == [] and result.pending == 0
    sources = {each.control.source_kind for path in segments(data / "paid-0") for each in blocks_of(path)}
    assert result.messages > 1000 * KILLS and SOURCE_TRANSACTION in sources
