"""Send a pandas DataFrame, and read the topic into DataFrames."""

import pandas as pd  # type: ignore[import-untyped]

import tfmq
from examples.columns.orders import COUNT, CUSTOMERS, TOPIC, amount, servers


def main() -> None:
    frame = pd.DataFrame(
        {"key": [CUSTOMERS[n % len(CUSTOMERS)] for n in range(COUNT)], "value": [str(amount(n)) for n in range(COUNT)]}
    )
    with servers() as address:
        with tfmq.Producer(address) as producer:
            results = producer.send_arrow(frame, TOPIC).result()
        print(f"sent {sum(each.count for each in results)} orders in {len(results)} batches")

        totals = pd.Series(dtype="int64")
        with tfmq.Consumer(address, topics=TOPIC) as consumer:
            for batch in consumer.arrow_batches(["key", "value"], timeout=1.0):
                orders = batch.to_pandas()
                amounts = orders["value"].str.decode("utf-8").astype("int64")
                totals = totals.add(amounts.groupby(orders["key"].str.decode("utf-8")).sum(), fill_value=0)
        for customer, cents in totals.sort_index().items():
            print(f"{customer}: {int(cents)}")


if __name__ == "__main__":
    main()
