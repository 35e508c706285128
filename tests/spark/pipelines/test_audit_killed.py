"""What kill -9 leaves of a broker is no damage: audited as it lies, and again when it was started and works."""

import threading
from pathlib import Path
from random import Random

import pytest

import tfmq
from journal.record.block_trailer import SOURCE_TRANSACTION
from tests.scale import scaled, seeded
from tests.spark.pipelines.audited import audit_here, segments
from tests.spark.pipelines.broken import blocks_of
from tfmq.message import Message
from tools.rigs.live_server import LiveServer

KILLS = 1 + scaled(30)


class Work:
    """A client that sends until the broker is killed: `rounds` are done; `error`: what ended it before."""

    def __init__(self, address: str, random: Random) -> None:
        self.address, self.random = address, random
        self.rounds = 0
        self.killed = False
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        """Until the broker is gone."""
        try:
            with tfmq.Producer(self.address, timeout=60) as producer:
                while not self.killed:
                    self.rounds += 1
                    self.round(producer)
        except Exception as error:
            if not self.killed:
                self.error = error

    def round(self, producer: tfmq.Producer) -> None:
        """Plain, delayed and transactional sends; commits, rollbacks, prepared, large ones."""
        random, number = self.random, self.rounds
        producer.send_many("orders", [b"x" * random.randrange(400) for _ in range(random.randrange(1, 300))])
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


def ended(workers: list[Work]) -> None:
    """What they had begun when the broker was killed is over, once it is there again."""
    for worker in workers:
        worker.thread.join()


@pytest.mark.long
def test_nothing_is_found_in_what_kill_9_leaves(tmp_path: Path) -> None:
    random = seeded("audit", "kill")
    data = tmp_path / "data"
    server = LiveServer(
        data, "topics.partitions=3", "log.segment_bytes=2097152", "transaction.journal_file_bytes=1048576"
    )
    workers: list[Work] = []
    for kill in range(KILLS):
        server.start()
        ended(workers)
        workers = [Work(server.address, seeded("audit", kill, n)) for n in range(2)]
        enough = random.randrange(5, 40)
        while max(worker.rounds for worker in workers) < enough:
            assert [worker.error for worker in workers] == [None, None]
            result = audit_here(data, 1 << 20)
            assert result.findings == [], (kill, "at work", result.findings)
        for worker in workers:
            worker.killed = True
        server.kill()
        result = audit_here(data, 1 << 20)
        assert result.findings == [], (kill, "killed", result.findings)
    server.start()
    ended(workers)
    server.stop()
    result = audit_here(data, 1 << 20)
    assert result.findings == [] and result.pending == 0
    sources = {each.control.source_kind for path in segments(data / "paid-0") for each in blocks_of(path)}
    assert result.messages > 100 * KILLS and SOURCE_TRANSACTION in sources
