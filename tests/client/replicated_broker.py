"""A simulated broker with three addresses: the real broker is primary at one of them, standbys answer at the others.

The disk in memory is what synchronous replication leaves: a failover is a power cut at one address, and a start at
another one.
"""

from __future__ import annotations

from typing import Any

from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.factory import in_process_brokers
from tfmq.protocol.commands import ACKS_REPLICATED, ROLE_PRIMARY
from tfmq.server.session import SessionContext
from tfmq.server.standby_handler import StandbyHandler
from tfmq.testing.broker import SimulatedBroker
from tfmq.testing.server import SimulatedServer


class ReplicatedServer(SimulatedServer):
    """`primary`: the address of the primary; "" while there is none. `down`: addresses at which nothing listens."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.addresses: list[str] = []
        self.primary = ""
        self.down: set[str] = set()
        self.named: str | None = None
        """The primary that standbys name, where that is not the primary."""
        self.promoted: list[str] = []
        self._base: SessionContext | None = None

    def _named(self) -> str:
        return self.primary if self.named is None else self.named

    def _context_at(self, address: str) -> SessionContext | None:
        if self.engine is not None:
            self._base = self._welcome(self.engine)._replace(synced_durability=ACKS_REPLICATED)
        if self._base is None or address in self.down:
            return None
        if address == self.primary:
            properties = {"role": ROLE_PRIMARY}
            return self._base._replace(hello_properties=lambda: properties) if self.engine is not None else None

        def promote(done: Any) -> None:
            self.promoted.append(address)
            done(None)

        standby = StandbyHandler(self._named, promote, self._clock.wall_ms)
        status = {"replication": {"role": "standby", "primary": self._named()}}
        return self._base._replace(
            handle=standby.handle, hello_properties=standby.hello_properties, status=lambda: status
        )


class ReplicatedBroker(SimulatedBroker):
    """`servers` has all addresses. `fail_over` moves the primary."""

    def __init__(self, settings: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        self._server.stop()
        simulated, first = self._server, self._server_name
        self.replicas = ReplicatedServer(simulated.config, self.clock, address=str(first), serve=self._faults.serve)
        self._server = self._simulation.server = self.replicas
        self.replicas.addresses = [str(first)] + [str(first._replace(host=f"{name}.{first.host}")) for name in "bc"]
        self.replicas.primary = self.replicas.addresses[0]
        in_process_brokers.update((each, self) for each in parse_servers(self.servers))
        self._server.start()
        self._simulation.settle()

    @property
    def servers(self) -> str:
        return ",".join(self.replicas.addresses) if hasattr(self, "replicas") else super().servers

    def close(self) -> None:
        for address in parse_servers(self.servers):
            in_process_brokers.pop(address, None)
        super().close()

    def fail_over(self, to: int, *, seconds: float = 3.0, silent_name: bool = False) -> None:
        """The primary loses its power and stays away; after `seconds` the server number `to` is primary.

        `silent_name`: whether standbys name the old primary until then.
        """
        replicas = self.replicas
        old, replicas.primary = replicas.primary, ""
        replicas.kill()
        replicas.down = {old}
        replicas.named = old if silent_name else None
        self.clock.advance(seconds)
        replicas.named = None
        replicas.primary = replicas.addresses[to]
        replicas.down.discard(replicas.primary)
        self.start()
