"""What commands that read need of topics, partitions and logs, which are the broker's own or those of a standby."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from journal.log.log import Upto
from journal.record.batch import Chunk


class ReadableLog(Protocol):
    """The part of `journal.log.log.Log` that reads, with the same names and errors."""

    log_id: int

    @property
    def folder(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def first_offset(self) -> int: ...

    @property
    def first_ordinal(self) -> int: ...

    @property
    def forced_offset(self) -> int: ...

    @property
    def forced_place(self) -> tuple[int, int]: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def end_ordinal(self) -> int: ...

    def read(
        self,
        offset: int,
        max_bytes: int,
        *,
        upto: Upto = ...,
        epoch: int | None = ...,
        block_bytes: int = ...,
        pause: Callable[[], None] | None = ...,
    ) -> Chunk: ...

    def read_cached(
        self, offset: int, max_bytes: int, *, upto: Upto = ..., epoch: int | None = ..., block_bytes: int = ...
    ) -> Chunk | None: ...

    def seek_offset(self, offset: int) -> int: ...

    def offset_of_ordinal(self, ordinal: int) -> tuple[int, int]: ...

    def offset_of_time(self, ms: int) -> int: ...


class ReadablePartition(Protocol):
    """The part of `tfmq.broker.partition.Partition` that fetches need."""

    name: str
    number: int
    parked: dict[Any, Callable[[], None]]
    deleted: bool

    @property
    def log(self) -> ReadableLog: ...

    def request_fsync(self) -> None: ...


class ReadableTopics(Protocol):
    """The part of `tfmq.broker.topics.Topics` that fetches need."""

    def partition(self, name: str, incarnation: int, number: int) -> ReadablePartition: ...

    def count(self, name: str) -> int: ...
