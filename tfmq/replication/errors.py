"""Errors inside the replication. Users see their sentences in the log, in `tfmq replica`, or at the start."""

from __future__ import annotations


class ReplicationError(Exception):
    """Base of these errors. `str(error)` is a sentence or the part of one after a colon."""


class StoreUnavailable(ReplicationError):
    """The store cannot be reached, is full, or failed: the same call may succeed later.

    A `put_new` that raises this may have stored the object.
    """


class StoreRefused(ReplicationError):
    """The store refuses: wrong credentials, no bucket, no rights, no conditional puts. An operator has to act."""


class StoreMissing(StoreRefused):
    """The folder of the store is not there: it has another name, or its file system is not mounted.

    `store`: the name of the store.
    """

    def __init__(self, store: str, sentence: str) -> None:
        super().__init__(sentence)
        self.store = store


class InvalidObject(ReplicationError):
    """An object of the store is damaged, forged, of a newer format, or missing although others refer to it."""


class NewerObject(InvalidObject):
    """An object was written by a newer version of tfmq."""


class NoReplica(InvalidObject):
    """Nothing is replicated there, or not yet enough to make a folder from it."""


class Deposed(ReplicationError):
    """Another server has become primary: nothing that this one writes counts any more."""


class SnapshotLost(ReplicationError):
    """The folder changed too much while a snapshot was made: the snapshot has to begin again."""


class SnapshotTooSlow(ReplicationError):
    """The snapshot took so long that a sweep could delete chunks that it refers to. It was not stored: begin again."""
