"""What programs do over time, in a simulation: schedules, a database beside the broker, several clients."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import tfmq
import tfmq.sql
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def broker() -> Any:
    with SimulatedBroker() as made:
        yield made


def times(broker: SimulatedBroker, topic: str) -> list[str]:
    return [f"{message.appended_at:%a %H:%M:%S}" for message in broker.sent(topic)]


def test_a_schedule_fires_at_its_times_and_at_no_other(broker: SimulatedBroker) -> None:
    broker.admin().schedule("0 9 * * mon-fri", "reports", "go")
    broker.clock.advance(days=7)
    assert times(broker, "reports") == [f"{day} 09:00:00" for day in ("Tue", "Wed", "Thu", "Fri", "Mon")]


def test_a_schedule_outlives_a_power_cut_and_keeps_its_rule_for_what_it_missed(broker: SimulatedBroker) -> None:
    admin = broker.admin()
    for misfire in ("one", "all", "skip"):
        admin.schedule("0 * * * *", misfire, "go", misfire=misfire)
    broker.crash(down=timedelta(hours=3, minutes=30))
    broker.clock.advance(minutes=1)
    assert [len(broker.sent(topic)) for topic in ("one", "all", "skip")] == [1, 3, 0]
    broker.clock.advance(hours=1)
    assert [len(broker.sent(topic)) for topic in ("one", "all", "skip")] == [2, 4, 1]


def test_years_of_a_schedule_pass_quickly() -> None:
    with SimulatedBroker(start=datetime(2026, 1, 1, tzinfo=UTC)) as broker:
        broker.admin().schedule("@monthly", "bills", "go")
        broker.clock.advance_to(datetime(2031, 1, 1, tzinfo=UTC))
        assert len(broker.sent("bills")) == 60


def test_a_database_and_the_broker_agree_after_every_end(broker: SimulatedBroker, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    tfmq.sql.create_table(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (number TEXT)"))
    producer = broker.producer()

    def place(number: str, fails: bool = False) -> None:
        with Session(engine) as session, tfmq.sql.transaction(session, producer) as tx:
            session.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})
            tx.send("orders", number)
            if fails:
                raise KeyError(number)

    place("1")
    with pytest.raises(KeyError):
        place("2", fails=True)
    broker.crash()
    place("3")
    broker.clock.advance(hours=1)
    with engine.connect() as connection:
        kept = [row[0] for row in connection.execute(text("SELECT number FROM orders"))]
    assert [message.text for message in broker.sent("orders")] == kept == ["1", "3"]


def test_offsets_of_a_transaction_and_its_messages_go_together(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    producer.send_many("orders", ["1", "2", "3"]).result()

    def work(fails: bool) -> None:
        with broker.consumer("orders", group="clerk", commits="manual") as consumer:
            for message in consumer.poll(timeout=0, max_messages=2):
                with producer.transaction() as tx:
                    tx.send("invoices", message.text)
                    tx.commit_offsets(consumer)
                    if fails:
                        raise KeyError

    with pytest.raises(KeyError):
        work(fails=True)
    assert broker.sent("invoices") == []
    work(fails=False)
    broker.crash()
    work(fails=False)
    assert sorted({message.text for message in broker.sent("invoices")}) == ["1", "2", "3"]


def test_a_file_keeps_offsets_over_a_power_cut(broker: SimulatedBroker, tmp_path: Path) -> None:
    broker.producer().send_many("orders", ["1", "2"]).result()
    offsets = f"file:{tmp_path}/offsets"
    with broker.consumer("orders", group="clerk", offsets=offsets) as consumer:
        assert [message.text for message in consumer.poll(max_messages=1)] == ["1"]
    broker.crash()
    with broker.consumer("orders", group="clerk", offsets=offsets) as consumer:
        assert [message.text for message in consumer.poll()] == ["2"]


def test_a_selector_a_codec_and_hooks_are_the_programs_own(broker: SimulatedBroker) -> None:
    reported: list[str] = []

    class Tells(tfmq.Hook):
        def after_send(self, topic: str, message: Any, result: Any, error: Any) -> None:
            reported.append(f"{topic}: {error or result.durability}")

    producer = broker.producer(codec=tfmq.codecs.json, hooks=[Tells()])
    producer.send("orders", {"number": 42}).result()
    (message,) = broker.consumer("orders", codec=tfmq.codecs.json).poll()
    assert (message.value, reported) == ({"number": 42}, ["orders: synced"])
