"""What all components of the broker share: configuration, disk, clock, timers, limits, workers and fsyncs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from journal.clock import Clock
from journal.disk import Disk, File
from journal.filenames import join
from journal.fsync import Forcer, FsyncTarget, Waiter, WhenStored
from journal.linux_aio import AioFsync, FsyncCallback, StartFsync
from tfmq.broker.admission import Backpressure
from tfmq.broker.reply import Pause, Randomness, Run
from tfmq.broker.reserve import FullDiskLog
from tfmq.broker.timers import Timers
from tfmq.config import Config


class Replicas(Protocol):
    """What the broker needs to know of the replication of its data folder, if its replies wait for the store."""

    def run(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work` in a worker; call `done` with its result when all that it has fsynced is stored, too."""

    def begin_round(self) -> WhenStored:
        """Let everything that is written now be stored, and return the function that waits for that."""


class Runtime:
    """The shared part of the broker. Each component gets the `Runtime` as an argument."""

    forcer: Forcer
    """Makes the fsyncs of all logs. Set by the step `create_forcer` of a start."""

    def __init__(
        self,
        config: Config,
        disk: Disk,
        clock: Clock,
        run: Run,
        randomness: Randomness,
        begin_force: StartFsync | None = None,
        pause: Pause | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.config, self.disk, self.clock, self.randomness = config, disk, clock, randomness
        self.data = config.server.data
        self.meta = join(self.data, "meta")
        self.limits: dict[str, int] = dict(config.limits)
        """One mutable mapping for all components, so that a changed limit takes effect everywhere."""
        self.timers = Timers(clock)
        self.full_disk = FullDiskLog(self.timers)
        self.backpressure = Backpressure(self.limits)
        self.running_jobs = 0
        self.is_starting = True
        """Whether the broker is starting. No turns run then, so `run` runs jobs at once, in the broker's thread."""
        self.begin_force = None if begin_force is None else partial(self._start_fsync, begin_force)
        self._ready: set[str] = set()
        self._fsync_requested = False
        self._run = run if replicas is None else replicas.run
        self._run_unreplicated = run
        self._replicas = replicas
        self.replicate = None if replicas is None else self._begin_round
        self.may_be_behind: Callable[[], bool] = lambda: False
        """Whether another server may have messages that this one lacks. Set by the owner of a replicated broker."""
        self.pause: Pause = pause or (lambda seconds: None)
        """Called in a worker, to let others run for this time (seconds); does nothing where there are no workers."""

    def settings(self, name: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the topic `name`. `own` has the settings made for this topic only.

        Each is from the topic's section of the configuration, else from `own`, else from the broker's settings.
        """
        return {**self.config.values, **own, **self.config.topic.get(name, {})}

    def partitions_default(self, name: str, own: Mapping[str, Any]) -> int:
        """Return how many partitions a new topic gets. `own` has the settings that were requested for this topic."""
        count: int = self.settings(name, own)["topics.partitions"]
        return count

    def run(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work` in a worker. Running jobs are counted, so that `Broker.stop` can wait for their end."""
        self._run_counted(self._run, work, done)

    def run_unreplicated(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """As `run`, for jobs whose results do not wait for the replicas."""
        self._run_counted(self._run_unreplicated, work, done)

    def _run_counted(
        self, run: Run, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        self.running_jobs += 1

        def ended(result: Any, error: BaseException | None) -> None:
            self.running_jobs -= 1
            done(result, error)

        (run_immediately if self.is_starting else run)(work, ended)

    def _begin_round(self) -> WhenStored | None:
        """Return the function that waits until everything that is written now is stored; None during a start."""
        return None if self.is_starting or self._replicas is None else self._replicas.begin_round()

    def _start_fsync(self, begin: StartFsync, file: File, completed: FsyncCallback) -> AioFsync | None:
        """Start an fsync of `file` by Linux AIO, without a worker; `completed` is called with its result.

        Returns None if a worker has to do the fsync. It always returns None during a start, because the reactor, which
        receives the completions, does not run yet.
        """
        return None if self.is_starting else begin(file, completed)

    def request_fsync(self, wanted: FsyncTarget, offset: int, waiter: Waiter) -> None:
        """Request an fsync of `wanted` up to `offset` at the end of the turn; `waiter` is called with its result."""
        self.forcer.want(wanted, offset, waiter, start=False)
        self._fsync_requested = True

    def ready_marker(self, component: str) -> Callable[[], None]:
        """Return the function that `component` calls when it has something to write at the end of the turn."""
        return partial(self._ready.add, component)


def run_immediately(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
    """Call `work` immediately in this thread, then `done` with its result; a `Run` without worker threads."""
    try:
        result = work()
    except Exception as error:
        done(None, error)
    else:
        done(result, None)
