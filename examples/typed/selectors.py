"""A partition for each of some countries, and the last one for all others."""

from collections.abc import Sequence
from contextlib import suppress
from typing import assert_type

import tfmq

COUNTRIES = {"DE": 0, "FR": 1}


class ByCountry(tfmq.PartitionSelector):
    """Called under the producer's lock: it must not wait for anything."""

    def get_partition(self, topic: str, partitions: Sequence[tfmq.Partition], message: tfmq.Message) -> tfmq.Partition:
        number = COUNTRIES.get((message.properties or {}).get("country", ""), len(partitions) - 1)
        return partitions[number % len(partitions)]


def main() -> None:
    with tfmq.Admin() as admin, suppress(tfmq.TopicExists):
        admin.create_topic("parcels", partitions=3)
    with tfmq.Producer(selector=ByCountry()) as producer:
        sent = [
            producer.send("parcels", "x", properties={"country": country}).result() for country in ("DE", "FR", "NZ")
        ]
        assert_type(sent, list[tfmq.SendResult])
    print([result.partition for result in sent])


if __name__ == "__main__":
    main()
