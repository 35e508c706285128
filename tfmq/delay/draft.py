"""Messages that are gathered before they are written: columns that grow, and one table of where they go."""

from array import array

from journal.record.format import Buffer
from tfmq.delay.bucket_file import ENTRY_SIZE, ROW
from tfmq.delay.columns import Messages, Target


class Draft:
    """The messages of one span that are not written yet."""

    def __init__(self) -> None:
        self.dues, self.numbers = array("Q"), array("Q")
        self.targets, self.sizes = array("I"), array("I")
        self.flags = bytearray()
        self.table: dict[Target, int] = {}
        self.data: list[Buffer] = []
        self.size_bytes = 0
        self.table_bytes = 0

    def add(self, messages: Messages) -> None:
        """Takes them over."""
        first = len(self.dues)
        self.dues.extend(messages.dues)
        self.numbers.extend(messages.numbers)
        self.sizes.extend(messages.sizes)
        self.flags += messages.flags
        self.data.extend(messages.data)
        indices = [self._index(target) for target in messages.table]
        if len(indices) == 1:
            self.targets.extend(array("I", (indices[0],)) * messages.length)
        else:
            self.targets.extend(map(indices.__getitem__, messages.targets))
        self.size_bytes += messages.size_bytes + ENTRY_SIZE * (len(self.dues) - first)

    def _index(self, target: Target) -> int:
        index = self.table.get(target)
        if index is None:
            index = self.table[target] = len(self.table)
            self.table_bytes += ROW.size + len(target.topic.encode())
        return index

    def messages(self) -> Messages:
        """All of them."""
        columns = (self.dues, self.numbers, self.targets, self.sizes, bytes(self.flags))
        return Messages(*columns, list(self.table), [b"".join(self.data)])
