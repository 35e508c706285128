"""The statements on the table of offsets, one by one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, create_engine, event, inspect
from sqlalchemy.engine import Connection, Engine

from tfmq.offsets import sql
from tfmq.offsets.storage import PartitionName, StoredOffset

A, B = PartitionName("orders", 0), PartitionName("orders", 1)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'offsets.db'}")
    sql.create_table(engine)
    yield engine
    engine.dispose()


def generations(connection: Connection) -> dict[PartitionName, int]:
    found = connection.execute(sql.TABLE.select()).mappings()
    return {PartitionName(row["topic"], row["topic_partition"]): row["generation"] for row in found}


def test_the_table_is_made_once_whichever_process_is_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sql.create_table(engine)
    assert inspect(engine).get_table_names() == ["tfmq_offsets"]
    looks = iter([False])  # the first look is too early: another process makes it between that and our own making
    monkeypatch.setattr(engine.dialect, "has_table", lambda *_, **__: next(looks, True))
    sql.create_table(engine)
    assert next(looks, None) is None


def test_the_table_can_have_a_schema_and_a_name_for_alembic() -> None:
    made = sql.offsets_table(MetaData(), name="mine", schema="shop")
    assert made.fullname == "shop.mine"
    assert [column.name for column in made.primary_key] == ["consumer_group", "topic", "topic_partition"]


def test_a_row_is_made_changed_and_refused_by_its_generation(engine: Engine) -> None:
    with engine.begin() as connection:
        assert sql.save_rows(connection, "billing", {A: StoredOffset(5, generation=3)}) == {}
        assert sql.save_rows(connection, "billing", {A: StoredOffset(6, generation=3)}) == {}
        assert sql.save_rows(
            connection, "billing", {A: StoredOffset(7, generation=2), B: StoredOffset(8, generation=2)}
        ) == {A: 3}
        assert {name: row.offset for name, row in sql.read_rows(connection, "billing", [A, B]).items()} == {A: 6, B: 8}
        assert generations(connection) == {A: 3, B: 2}


def test_a_claim_keeps_the_offset_and_a_claimed_row_without_one_is_not_read(engine: Engine) -> None:
    with engine.begin() as connection:
        sql.save_rows(connection, "billing", {A: StoredOffset(5, 1, 2, 3, 3)})
        sql.claim_rows(connection, "billing", 4, [A, B])
        assert sql.read_rows(connection, "billing", [A, B]) == {A: StoredOffset(5, 1, 2, 3, 4)}
        assert generations(connection) == {A: 4, B: 4}


@pytest.mark.parametrize("generation", [2, 3])
@pytest.mark.parametrize("before", ["is_select", "is_insert"])
def test_a_row_that_comes_between_the_look_and_the_insert_is_changed_instead(
    engine: Engine, before: str, generation: int
) -> None:
    with engine.begin() as connection:
        made: list[bool] = []

        def comes_between(_: Connection, element: object, *__: object) -> None:
            if getattr(element, before, False) and not made:
                made.append(True)
                connection.execute(sql.TABLE.insert().values(row))

        row = {
            "consumer_group": "billing",
            "topic": A.topic,
            "topic_partition": A.partition,
            "next_offset": 1,
            "record_index": 0,
            "incarnation": 0,
            "log_epoch": 0,
            "generation": generation,
        }
        event.listen(connection, "before_execute", comes_between)
        assert sql.save_rows(connection, "billing", {A: StoredOffset(9, generation=3)}) == {}
        assert sql.read_rows(connection, "billing", [A])[A] == StoredOffset(9, generation=3)


def test_a_transaction_that_sees_an_old_state_believes_the_update(engine: Engine) -> None:
    """Where a snapshot still shows the generation that fits, an update that finds nothing has seen a higher one."""

    def finds_nothing(*called: Any) -> tuple[str, Any]:
        return called[2].replace("<=", "< -"), called[3]

    with engine.begin() as connection:
        sql.save_rows(connection, "billing", {A: StoredOffset(5, generation=3)})
        event.listen(connection, "before_cursor_execute", finds_nothing, retval=True)
        assert sql.save_rows(connection, "billing", {A: StoredOffset(6, generation=4)}) == {A: 3}


def test_rows_are_changed_in_one_order_whatever_order_they_come_in(engine: Engine) -> None:
    """Two members that changed the same rows in two orders would wait for each other without end."""

    def asked(*names: PartitionName) -> list[Any]:
        found: list[Any] = []
        with engine.begin() as connection:
            event.listen(connection, "before_cursor_execute", lambda *called: found.append(called[3]))
            sql.save_rows(connection, "billing", {name: StoredOffset(5, generation=3) for name in names})
        return found

    asked(A, B)
    assert asked(A, B) == asked(B, A)
