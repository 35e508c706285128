"""What tfmq.sql asks of a producer: the group it belongs to, the broker it speaks with."""

from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

import tfmq
from tfmq.errors import NotAllowed
from tfmq.sql.database import default_group_name
from tfmq.sql.session import broker_node, describe_transaction, is_closed, join_group

SHOP, STOCK = make_url("postgresql+psycopg://u:p@db/shop"), make_url("postgresql+psycopg://u:p@db/stock")


def test_a_producer_without_a_group_gets_the_databases() -> None:
    with tfmq.Producer("127.0.0.1:1") as producer:
        join_group(producer, SHOP)
        join_group(producer, SHOP.set(username="another"))
        assert producer._core.group == default_group_name(SHOP)


def test_it_serves_one_database() -> None:
    with tfmq.Producer("127.0.0.1:1") as producer:
        join_group(producer, SHOP)
        with pytest.raises(NotAllowed, match=r"Producer\(group="):
            join_group(producer, STOCK)


def test_one_with_a_group_serves_all_its_databases() -> None:
    with tfmq.Producer("127.0.0.1:1", group="shop") as producer:
        join_group(producer, SHOP)
        join_group(producer, STOCK)
        assert producer._core.group == "shop"


def test_looking_at_a_transaction_does_not_take_it_up(tmp_path: Path) -> None:
    with tfmq.local_server(tmp_path / "data") as servers, tfmq.Producer(servers) as producer:
        assert broker_node(producer) == ""
        transaction = producer.begin("x")
        transaction.send("orders", "1")
        assert len(broker_node(producer)) == 32
        with tfmq.Producer(servers) as other:
            assert describe_transaction(other, "x").state == "open"
            assert describe_transaction(other, "y").state == "unknown"
        assert is_closed(other)
        assert not is_closed(producer)
        assert transaction.commit() == "committed"
