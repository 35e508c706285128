"""The servers of one replicated broker as a client meets them: of one fake broker, one address at a time is primary.

The fake broker stands for the replicated folder: what was stored before a change of the primary is there after it.
"""

from __future__ import annotations

from typing import Any, Final

from tests.client.fake_broker import FakeBroker, Session
from tests.client.rig import Rig, SenderRig
from tfmq.client.connection.addresses import BrokerAddress
from tfmq.errors import NotPrimary, TfmqError
from tfmq.protocol.commands import ACKS_REPLICATED, HelloReply

STANDBY, DOWN, SILENT, ACCEPTS_ONLY, CLOSES = "standby", "down", "silent", "accepts only", "closes"


class ReplicaSession(Session):
    """A session of one server. `named`: the primary that a standby names."""

    def __init__(self, broker: FakeBroker, is_primary: bool, named: str) -> None:
        super().__init__(broker)
        self._properties: dict[str, Any] = {"role": "primary", "durability": ACKS_REPLICATED}
        if not is_primary:
            self._properties = {"role": "standby", "primary": named}
            self.refuses = NotPrimary(primary=named)

    def greeting(self, hello: HelloReply) -> HelloReply:
        return hello._replace(properties=self._properties)


class Replicas:
    """What each server does, by its address, and which one is primary ("" for none)."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        broker.synced_durability = ACKS_REPLICATED
        self.primary = ""
        self.states: dict[str, str] = {}
        self.names: dict[str, str] = {}
        """The primary that a standby names, where that is not the primary."""

    def state(self, address: str) -> str:
        return self.states.get(address, STANDBY)

    def named_by(self, address: str) -> str:
        return self.names.get(address, self.primary)

    def open_session(self, address: str) -> Session:
        return ReplicaSession(self.broker, address == self.primary, self.named_by(address))

    def demote(self, sessions: list[Session]) -> None:
        """The primary becomes a standby, and its sessions stay."""
        self.primary = ""
        for session in sessions:
            session.refuses = NotPrimary()


class ReplicaRig(Rig):
    """A rig whose servers are `a:8367`, `b:8367`, `c:8367`."""

    names: Final = ("a", "b", "c")

    def __init__(self, *arguments: Any, servers: int = 3, **options: Any) -> None:
        super().__init__(*arguments, servers=servers, **options)
        self.addresses = [f"{name}:8367" for name in self.names[:servers]]
        self.link.servers = tuple(BrokerAddress(name, 8367) for name in self.names[:servers])
        self.replicas = Replicas(self.broker)
        self.hangs = False
        """Whether the present attempt to connect, or the connection, gets no answer at all."""

    @property
    def dialled_names(self) -> str:
        return "".join(each.host for each in self.dialled)

    def _connect(self) -> None:
        address = str(self.link.server)
        state = self.replicas.state(address)
        self.hangs = state in (SILENT, ACCEPTS_ONLY)
        if state == DOWN:
            self.link.disconnected(ConnectionRefusedError())
            return
        self.link.connecting()
        if state != SILENT:
            self.session = self.replicas.open_session(address)
            self.link.connected()
        if state == CLOSES:
            self.cut(ConnectionResetError())

    def _step(self) -> bool:
        session = self.session
        try:
            if self.hangs and not self.link.wants_connection():
                for ticker in self.tickers:
                    ticker.tick()
                self.link.tick()
                return False
            return super()._step()
        except TfmqError as error:
            self.hangs = False
            if session is not None:
                session._cut()  # the broker notices that the client is gone
            self.cut(error)
            return True


class ReplicaSenderRig(ReplicaRig, SenderRig):
    """A sender whose broker is replicated."""
