"""SQL over the messages of a topic with DuckDB, and the result of a query sent as messages."""

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]

import tfmq
from examples.columns.orders import COUNT, CUSTOMERS, TOPIC, amount, servers

TOTALS = "totals"


def main() -> None:
    orders = pa.table(
        {"key": [CUSTOMERS[n % len(CUSTOMERS)] for n in range(COUNT)], "value": [str(amount(n)) for n in range(COUNT)]}
    )
    with servers() as address:
        with tfmq.Producer(address) as producer:
            results = producer.send_arrow(orders, TOPIC).result()
            print(f"sent {sum(each.count for each in results)} orders in {len(results)} batches")

            with tfmq.Consumer(address, topics=TOPIC) as consumer:
                messages = pa.Table.from_batches(list(consumer.arrow_batches(["key", "value"], timeout=1.0)))
            totals = duckdb.from_arrow(messages).query(
                "messages",
                "select decode(key) as key, sum(decode(value)::bigint)::varchar as value"
                " from messages group by all order by all",
            )
            assert totals is not None, "a select has rows"
            producer.send_arrow(totals.to_arrow_table(), TOTALS).result()

        with tfmq.Consumer(address, topics=TOTALS) as consumer:
            for batch in consumer.arrow_batches(["key", "value"], timeout=1.0):
                for row in batch.to_pylist():
                    print(f"{row['key'].decode()}: {row['value'].decode()}")


if __name__ == "__main__":
    main()
