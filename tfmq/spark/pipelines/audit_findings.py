"""What an audit can find, in words, and what to do about each."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

BLOCK = "damaged block"
CUT = "cut file"
MISSING = "missing segment"
OVERLAP = "overlapping segments"
ORDER = "order"
MARK = "mark"
FOLDER = "folder"
UNREADABLE = "unreadable"
REPEATED = "repeated id"
TORN = "torn transaction"
UNDECIDED = "undecided messages"
ROLLED_BACK = "rolled back messages"
NO_DECISION = "no decision"
JOURNAL = "transaction journal"

_REPAIR: Final = (
    "stop the broker; put the file back from a backup, or let `tfmq log repair DATA` close the place with a"
    " filler"
)
_PUT_BACK: Final = "stop the broker and put the missing bytes back from a backup; without one they are lost"

ADVICE: Final = {
    BLOCK: _REPAIR,
    CUT: _PUT_BACK,
    MISSING: _PUT_BACK,
    OVERLAP: "stop the broker; one of the two files does not belong here: move it away",
    ORDER: "stop the broker and look with `tfmq log dump`; a file of another folder or time stands here",
    MARK: "put log.mark back from a backup, or remove it: the next start then checks the whole log",
    FOLDER: "stop the broker and put the folder back from a backup",
    UNREADABLE: "look at the disk and at who may read the file",
    REPEATED: "consumers got these messages twice; tell their owners the ids",
    TORN: "send what is missing again: `tfmq log dump DATA/transactions` shows the messages while the journal has them",
    UNDECIDED: "consumers got messages that nobody committed; tell their owners",
    ROLLED_BACK: "consumers got messages that were rolled back; tell their owners",
    NO_DECISION: "the journal may be of another time than the partitions: put both back from one backup",
    JOURNAL: "stop the broker and run `tfmq log verify DATA`, then `tfmq log repair DATA`",
}
"""Kind of a finding -> what to do."""


class Finding(NamedTuple):
    """One thing that is wrong. `first <= x < next` are offsets of the partition (places, of the transaction journal);
    `data`: the data folder; `segment`: the file's name, "" where it is about the whole folder."""

    kind: str
    data: str
    topic: str
    partition: int
    segment: str
    first: int
    next: int
    text: str

    @property
    def advice(self) -> str:
        """What to do."""
        return ADVICE[self.kind]

    def row(self) -> dict[str, Any]:
        """As a table and JSON have it."""
        return {**self._asdict(), "do": self.advice}
