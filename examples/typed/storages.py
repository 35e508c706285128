"""Offsets that are kept in a place of one's own: here in a dictionary, which is no place to keep anything."""

from collections.abc import Mapping, Sequence

import tfmq
from tfmq.offsets.storage import PartitionName


class Memory:
    """What a storage does. `save` refuses a member that lost its partition: its generation is lower."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, PartitionName], tfmq.StoredOffset] = {}

    def read(self, group: str, partitions: Sequence[PartitionName]) -> Mapping[PartitionName, tfmq.StoredOffset]:
        return {name: self.rows[group, name] for name in partitions if (group, name) in self.rows}

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, tfmq.StoredOffset]) -> None:
        for name, row in offsets.items():
            kept = self.rows.get((group, name))
            if kept is not None and kept.generation > (row.generation or generation):
                raise tfmq.Fenced(f"{name} is another member's by now.")
            self.rows[group, name] = row if row.generation else row._replace(generation=generation)

    def close(self) -> None:
        """There is nothing to give back."""


def main() -> None:
    memory = Memory()
    storage: tfmq.OffsetStorage = memory
    with tfmq.Producer() as producer:
        producer.send_many("kept", ["a", "b", "c"]).result()
    found: list[list[str]] = []
    for _ in range(2):
        with tfmq.Consumer(topics="kept", group="mine", offsets=storage) as consumer:
            messages = consumer.poll(timeout=10, max_messages=2)
            found.append([message.text for message in messages])
    print(found, len(memory.rows))


if __name__ == "__main__":
    main()
