"""The replication of one server: the store, the threads for it, and the `Replica` that decides what the server is."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Protocol

from journal.clock import Clock
from journal.disk import Disk, Lock
from journal.filenames import LOCK_NAME, join
from journal.linux_aio import StartFsync
from tfmq.broker.catalog import write_version
from tfmq.config import Config
from tfmq.data_dir import META_NAME
from tfmq.errors import ConfigError, NotAllowed
from tfmq.protocol.commands import ACKS_REPLICATED, ACKS_SYNCED, ROLE_PRIMARY
from tfmq.replication.entry_writer import WINDOW
from tfmq.replication.errors import Deposed, InvalidObject, StoreMissing, StoreRefused, StoreUnavailable
from tfmq.replication.local_state import LocalStateFile
from tfmq.replication.primary import Primary, Settings, StoredJobs
from tfmq.replication.recording_disk import unwrap
from tfmq.replication.replica import Replica
from tfmq.replication.store import Store
from tfmq.replication.stores.file_store import FileStore
from tfmq.replication.stores.open_store import open_store, probe
from tfmq.server.reactor import CHUNK_THREAD, Turn, WorkerThreads
from tfmq.server.standby_handler import StandbyHandler

if TYPE_CHECKING:
    from tfmq.server.access_control import AccessControl
    from tfmq.server.standby_reads import StandbyReads

logger = logging.getLogger("tfmq.replication")

STORE_THREADS: Final = WINDOW + 4
"""Threads for calls of the store: for the puts under way, and for reads beside them."""
CHUNK_THREADS: Final = 4
STOP_SECONDS_MIN: Final = 10.0


class ReplicatedServer(Protocol):
    """What a `Replication` needs of the server around it. All methods are called in the reactor's thread."""

    @property
    def name(self) -> str:
        """Name and version of the package."""

    def following(self) -> None:
        """The server is a standby from here on."""

    def serve_as_primary(self, primary: Primary) -> None:
        """Start the broker on `primary.disk`."""

    def refuse(self, reason: str) -> None:
        """Refuse requests that write, for this reason; with "", accept them again."""

    def close_connections(self) -> None:
        """Close all connections of clients, after the replies that are to be sent."""

    def hand_over(self) -> None:
        """Stop the broker cleanly; `Replication.stop` then seals the term."""

    def restart(self, reason: str) -> None:
        """Replace the process by a new one with the same arguments."""

    def fail(self, error: BaseException) -> None:
        """End the process with the error's sentence."""


class LostStore:
    """While a primary can store nothing, closes its connections, first after a lease and then after each one.

    Meanwhile another server may have become primary. A client that has several addresses tries the others before it
    comes back; without this it would stay, and be refused until its requests fail.
    """

    def __init__(
        self, call_later: Callable[[float, Callable[[], None]], Any], lease_seconds: float, close: Callable[[], None]
    ) -> None:
        self._call_later, self._lease_seconds, self._close = call_later, lease_seconds, close
        self._call: Any = None

    def begin(self) -> None:
        if self._call is None:
            self._call = self._call_later(self._lease_seconds, self._close_all)

    def end(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _close_all(self) -> None:
        self._call = None
        self.begin()
        self._close()


class Replication:
    """The replication of a server, in its reactor's thread."""

    def __init__(
        self,
        config: Config,
        reactor: Any,
        disk: Disk,
        clock: Clock,
        randomness: Callable[[int], bytes],
        server: ReplicatedServer,
        turn: Turn,
    ) -> None:
        self._config, self._reactor, self._disk, self._clock = config, reactor, disk, clock
        self._randomness, self._server = randomness, server
        self._folder = os.path.abspath(config.server.data)
        # What the broker does with results that have waited for the store is completed at the end of a turn.
        self._workers = WorkerThreads(reactor, STORE_THREADS, delivered=turn.request_end)
        self._executor = ThreadPoolExecutor(CHUNK_THREADS, thread_name_prefix=CHUNK_THREAD)
        self._thread = threading.get_ident()
        self._turn = turn
        self._lost_store = LostStore(reactor.callLater, config.replicate.lease_seconds, server.close_connections)
        self._address = ""
        self._replica: Replica | None = None

    def open(self, address: str) -> None:
        """Open the store and check that it fits the data folder. Raises ConfigError, NotAllowed, and journal errors."""
        self._address = address
        os.makedirs(self._folder, 0o750, exist_ok=True)
        lock = self._disk.lock(join(self._folder, LOCK_NAME))
        try:
            self.store = open_store_of(self._config)
            probe(self.store)
            self._replica = self._create_replica(address, lock)
            self._replica.check_identity()
        except (StoreUnavailable, StoreRefused, InvalidObject) as error:
            lock.release()
            # A store that this server has used is not misspelled, but away, as a share that is not mounted.
            is_away = isinstance(error, StoreMissing) and error.store == self._last_store()
            if isinstance(error, StoreUnavailable) or is_away:
                reason = str(error).rstrip(".")
                raise NotAllowed(
                    f"The store of replicate.url cannot be used now: {reason}. Start again later."
                ) from None
            raise refusal(error) from None

    def _last_store(self) -> str:
        return LocalStateFile(self._disk, self._folder).read(self._randomness).store

    def _create_replica(self, address: str, lock: Lock) -> Replica:
        settings = self._config.replicate
        return Replica(
            self.store,
            self._disk,
            self._folder,
            address,
            Settings(
                is_sync=settings.mode == "sync",
                linger_seconds=settings.linger_ms / 1000,
                interval_seconds=settings.interval_seconds,
                heartbeat_seconds=settings.heartbeat_seconds,
                lease_seconds=settings.lease_seconds,
                history_seconds=settings.history_seconds,
            ),
            self,
            self._workers.run,
            self._executor,
            self._clock,
            self._reactor.callLater,
            self._randomness,
            time.sleep,
            random.random,
            self._wake,
            lock,
            self._create_folder,
        )

    def start(self) -> None:
        """Find out what this server is. Called when the reactor runs."""
        assert self._replica is not None
        self._replica.start()

    def stop(self, done: Callable[[], None]) -> None:
        """Store all that is left and end the term, or stop following; then call `done()`."""
        self._lost_store.end()
        if self._replica is None:
            done()
        else:
            self._replica.stop(done)

    def end_calls(self) -> None:
        """Start no further call of chunks. Threads that have none end; those that have one end after it."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self.end_calls()
        self._workers.stop(0.5)

    @property
    def primary(self) -> Primary | None:
        return self._replica.primary if self._replica is not None else None

    @property
    def primary_address(self) -> str:
        return self._replica.primary_address if self._replica is not None else ""

    def promote(self, done: Callable[[BaseException | None], None]) -> None:
        """Ask the primary to hand over to this standby."""
        assert self._replica is not None
        self._replica.request_hand_over(done)

    def status(self) -> dict[str, Any]:
        """Return the map `replication` of the reply to STATUS."""
        return {} if self._replica is None else self._replica.status(self._config.replicate.mode)

    def standby_status(self) -> dict[str, Any]:
        """Return the reply to STATUS of a server that is not primary."""
        return {
            "version": self._server.name,
            "data": self._folder,
            "listen": self._address,
            "replication": self.status(),
        }

    def standby_handler(self, access: AccessControl | None, reads: StandbyReads | None) -> StandbyHandler:
        return StandbyHandler(lambda: self.primary_address, self.promote, self._clock.wall_ms, access, reads)

    @property
    def folder_version(self) -> int | None:
        return None if self._replica is None else self._replica.folder_version

    def hello_properties(self) -> dict[str, Any]:
        """Return the properties of a primary's reply to HELLO."""
        return {"role": ROLE_PRIMARY}

    @property
    def synced_durability(self) -> int:
        return ACKS_REPLICATED if self.is_sync else ACKS_SYNCED

    def end_turn(self) -> None:
        """Store what was recorded in this turn of the broker."""
        if self.primary is not None:
            self.primary.woken()

    def broker_started(self) -> None:
        """From now on the high watermarks of logs wait for the store. Called in the worker that starts the broker."""
        primary = self.primary
        assert primary is not None
        primary.disk.is_replicated = self.is_sync

    @property
    def stop_seconds(self) -> float:
        """How long a stop waits for the store."""
        return max(STOP_SECONDS_MIN, self._config.replicate.lease_seconds)

    def sentence_of_rest(self) -> str:
        """Return what is not in the store when a stop waits no longer."""
        trouble = self.primary.writer.trouble if self.primary is not None else ""
        late = f"the stop was not complete within {self.stop_seconds:g} s" + (f" ({trouble})" if trouble else "")
        if self.primary is None:
            return f"{late}: what was applied is not noted, so the next start compares the folder with the store"
        if self.primary.may_end_cleanly and not self.primary.unstored_bytes:
            return f"{late}: all changes are in {self.store.name}, which lacks the end of the term"
        term, slot = self.primary.writer.position
        count = f"{self.primary.unstored_bytes:,} bytes of changes" if self.primary.may_end_cleanly else "changes"
        return (
            f"{late}: {count} after entry {slot} of term {term} are only in"
            f" {self._folder}, and the next start of this server stores them unless another one is primary by then"
        )

    # What a broker on a primary's disk is given

    def replicas_of(self, primary: Primary, run: Callable[..., None]) -> StoredJobs | None:
        """Return what a broker on `primary.disk` waits with; None if it waits for its own disk only."""
        return StoredJobs(primary, run) if self.is_sync else None

    def begin_force_of(self, begin: StartFsync | None) -> StartFsync | None:
        """Return what starts an fsync of a file of a primary's disk in the kernel; None without `begin`."""
        return None if begin is None else lambda file, completed: begin(unwrap(file), completed)

    @property
    def is_sync(self) -> bool:
        return self._config.replicate.mode == "sync"

    # The host of the replica

    def following(self) -> None:
        self._server.following()

    def promoted(self, primary: Primary) -> None:
        self._server.serve_as_primary(primary)

    def stalled(self, reason: str) -> None:
        self._server.refuse(reason)
        if reason:
            self._lost_store.begin()
        else:
            self._lost_store.end()

    def hand_over(self) -> None:
        self._server.hand_over()

    def deposed(self, error: Deposed) -> None:
        self._server.restart(str(error))

    def failed(self, error: BaseException) -> None:
        self._server.fail(error)

    # Helpers

    def _wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._turn.request_end()
        else:
            self._reactor.callFromThread(self.end_turn)

    def _create_folder(self, disk: Disk, node: str) -> None:
        """Make the folder `meta` with the version file of a new broker, unless it is there."""
        meta = join(self._folder, META_NAME)
        if not disk.exists(meta):
            disk.make_folder(meta)
            disk.force_folder(self._folder)
        if not disk.list(meta):
            write_version(disk, meta, node)


def check_store(config: Config) -> None:
    """Raise ConfigError if `replicate.url` names no store, or a folder that cannot be one. Connects to no server."""
    try:
        open_store_of(config).close()
    except StoreRefused as error:
        raise refusal(error) from None


def open_store_of(config: Config) -> Store:
    """Return the store of `replicate.url`. Raises StoreRefused, also if it and the data folder are nested."""
    store, data = open_store(config.replicate.url), os.path.abspath(config.server.data)
    if isinstance(store, FileStore) and are_nested(store.folder, data):
        raise StoreRefused(f"{data} and {store.name} have files of each other: name two folders")
    return store


def refusal(error: Exception) -> ConfigError:
    return ConfigError(f"replicate.url: {str(error).rstrip('.')}.", key="replicate.url")


def are_nested(one: str, other: str) -> bool:
    """Return whether two folders are the same, or one is inside of the other."""
    found = [os.path.realpath(each) for each in (one, other)]
    return os.path.commonpath(found) in found
