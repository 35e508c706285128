"""A broker's registration in ZooKeeper: the `Registry` on a session of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from tfmq.zookeeper.address import BROKER, zookeeper_address
from tfmq.zookeeper.connection import new_client
from tfmq.zookeeper.layout import Layout
from tfmq.zookeeper.registry import Registry
from tfmq.zookeeper.runner import Runner

log = logging.getLogger("tfmq.server")

SESSION_SECONDS: Final = 30.0
"""A broker that is started again, or cut off for a moment, stays registered; one that is gone is gone after that."""
PATIENCE_SECONDS: Final = 3.0
"""So long it is not said that nobody answers."""
CLOSE_SECONDS: Final = 2.0
"""A stop does not wait for a ZooKeeper that does not answer: the session ends by itself."""


class Registration:
    """The registration of the broker at `broker_address`. No method waits but `close`."""

    def __init__(
        self,
        address: str,
        broker_address: str,
        *,
        session_seconds: float = SESSION_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches no network. Raises BadRequest for what is no address, NotSupported without kazoo."""
        self.address = zookeeper_address(address)
        new_client(self.address, session_seconds)
        self._registry = Registry(Layout(self.address.root, BROKER), broker_address, session_seconds)
        self._runner = Runner(self.address, self._registry, self._changed, clock)
        self._clock = clock
        self._patient_until = 0.0
        self._told = False

    def wants(self, topics: Mapping[str, int]) -> None:
        """The topics that there are, and their partitions. The first time it connects. Called every now and then, it
        says when ZooKeeper is away, once each time."""
        runner = self._runner
        with runner.condition:
            if runner.is_closed:
                return
            self._registry.wants(topics)
            now = self._clock()
            if self._registry.is_connected or not runner.is_started:
                self._patient_until, self._told = now + PATIENCE_SECONDS, False
            elif now >= self._patient_until and not self._told:
                self._told = True
                log.warning(
                    "%s does not answer: this broker serves, and registers when it is back.", self.address
                )
            if not runner.is_started:
                runner.start()
            runner.wake()

    @property
    def registered(self) -> bool:
        """Whether everything is registered, as far as it is known."""
        with self._runner.condition:
            return self._registry.registered

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Take everything back; what cannot be taken back in time goes with the session."""
        self._runner.close(seconds)

    def _changed(self) -> None:
        if self._runner.failure is not None:
            log.error("This broker is not registered: %s", self._runner.failure)
