"""What STATUS says: numbers that add up, and every trouble by its name."""

from tests.broker.helpers import DATA, Broker, after
from tfmq.protocol.commands import Status


def test_it_counts_what_the_broker_holds() -> None:
    broker = Broker()
    broker.create(partitions=2)
    broker.create("bills")
    producer = broker.lease()
    broker.produce(producer, 0, [b"a", b"b"])
    broker.produce(producer, 0, [b"c"], partition=1)
    status = broker.ask(Status()).status
    assert (status["topics"], status["partitions"], status["messages"]) == (2, 3, 3)
    assert status["bytes"] == sum(broker.log("orders", number).size_bytes for number in (0, 1))
    assert status["stopped"] == status["damaged"] == status["unknown_folders"] == []
    assert status["catalog"] == "open" and status["transactions"]["journal"] == "open"


def test_it_names_what_is_in_trouble() -> None:
    broker = Broker()
    broker.create()
    broker.log().stop("its disk failed")
    assert broker.ask(Status()).status["stopped"] == [
        {"topic": "orders", "partition": 0, "reason": "its disk failed"}
    ]


def test_it_names_what_is_not_served() -> None:
    broker = Broker()
    broker.create(partitions=2)
    broker.stop()
    broker.disk.rename(f"{DATA}/orders-1", "/elsewhere")
    broker.disk.write_file(f"{DATA}/orders-1", b"")
    (stopped,) = Broker(broker.disk).ask(Status()).status["stopped"]
    assert (stopped["topic"], stopped["partition"]) == ("orders", 1)
    assert "a folder belongs there" in stopped["reason"]


def test_it_says_what_waits_for_its_time() -> None:
    broker = Broker()
    broker.create()
    broker.delay(broker.lease(), 0, [b"a", b"b"], due=after(60_000))
    status = broker.ask(Status()).status["delay"]
    assert status["pending"] == 2 and status["arrivals"] == "open"
    assert broker.ask(Status()).status["messages"] == 0, "it is in no partition yet"
