"""A change of a topic that is decided and not finished says "unknown", never "not done": the next start finishes it."""

import errno

from tests.broker.helpers import Broker
from tfmq.broker.catalog_state import GONE, READY
from tfmq.errors import NOT_DONE, DiskFull
from tfmq.protocol import commands


def failing(broker: Broker, kind: int) -> None:
    """The catalog finds no space for entries of this kind."""
    catalog = broker.engine.broker.catalog
    submit = catalog.submit

    def full(entry, done):  # type: ignore[no-untyped-def]
        if entry[0] == kind:
            done(DiskFull(outcome=NOT_DONE))
        else:
            submit(entry, done)

    catalog.submit = full  # type: ignore[method-assign]


def test_a_topic_that_lacks_only_its_last_entry_is_unknown_and_there_after_a_restart() -> None:
    broker = Broker()
    failing(broker, READY)
    created = broker.create()
    assert (created.code, created.failure.outcome) == ("disk_full", "unknown")
    broker = broker.restart()
    assert broker.engine.broker.topics.get("orders") is not None


def test_a_deletion_that_lacks_only_its_last_entry_is_unknown() -> None:
    broker = Broker()
    broker.create()
    failing(broker, GONE)
    deleted = broker.delete()
    assert (deleted.code, deleted.failure.outcome) == ("disk_full", "unknown")
    assert broker.restart().engine.broker.topics.get("orders") is None


def test_a_truncation_that_failed_in_the_middle_is_unknown() -> None:
    broker = Broker(log__segment_bytes=1 << 16)
    broker.create()
    producer = broker.lease()
    for sequence in range(6):
        broker.produce(producer, sequence, [bytes(25_000)])
    broker.disk.faults.fail("unlink", error=errno.EIO, path=".zxQueue")
    end = broker.log().end_offset
    answer = broker.ask(commands.Truncate("orders", broker.incarnation(), 0, end))
    assert (answer.code, answer.failure.outcome) == ("storage_stopped", "unknown")
    assert broker.log().first_offset == end, "it did happen"
