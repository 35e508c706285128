"""A primary and a standby as processes, which share a folder as their store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.rigs.failover import ReplicaServer

QUICK = ("replicate.lease_seconds=1.5", "replicate.heartbeat_seconds=0.3")


@contextmanager
def primary_and_standby(folder: Path, *settings: str) -> Iterator[list[ReplicaServer]]:
    """Start both, with QUICK and `settings`; kill those that still run at the end."""
    store = folder / "store"
    store.mkdir()
    made: list[ReplicaServer] = []
    try:
        for name, state in (("one", "ready"), ("two", "standby")):
            (folder / name).mkdir()
            server = ReplicaServer(folder / name / "data", f"replicate.url=file://{store}", *QUICK, *settings)
            made.append(server)
            server.start()
            server.wait_for(state)
        yield made
    finally:
        for server in made:
            if server in ReplicaServer.alive:
                server.kill()


def addresses(servers: Sequence[ReplicaServer]) -> str:
    return ",".join(server.address for server in servers)
