"""Send a polars DataFrame, and read the topic into polars, with the JSON of the values as columns."""

import polars as pl

import tfmq
from examples.columns.orders import COUNT, CUSTOMERS, TOPIC, amount, servers


def main() -> None:
    orders = pl.DataFrame(
        {"customer": [CUSTOMERS[n % len(CUSTOMERS)] for n in range(COUNT)], "cents": [amount(n) for n in range(COUNT)]}
    )
    messages = orders.select(key="customer", value=pl.struct("customer", "cents").struct.json_encode())
    with servers() as address:
        with tfmq.Producer(address) as producer:
            results = producer.send_arrow(messages.to_arrow(compat_level=pl.CompatLevel.oldest()), TOPIC).result()
        print(f"sent {sum(each.count for each in results)} orders in {len(results)} batches")

        with tfmq.Consumer(address, topics=TOPIC) as consumer:
            frames = [pl.DataFrame(batch) for batch in consumer.arrow_batches(["value"], timeout=1.0)]
        fields = pl.Struct({"customer": pl.String, "cents": pl.Int64})
        read = pl.concat(frames).select(pl.col("value").cast(pl.String).str.json_decode(fields)).unnest("value")
        for customer, cents in read.group_by("customer").agg(pl.col("cents").sum()).sort("customer").iter_rows():
            print(f"{customer}: {cents}")


if __name__ == "__main__":
    main()
