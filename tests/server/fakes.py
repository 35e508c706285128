"""A socket and a reactor of lists: what the transport's tests need instead of a network."""

from __future__ import annotations

from collections import deque
from typing import Any

from twisted.internet.task import Clock as TwistedClock

from journal.buffers import Pool
from tfmq import limits
from tfmq.server.connection_limits import ConnectionLimits
from tfmq.server.reactor import Turn
from tfmq.server.transport import Connection

EVERY_LIMIT = limits.effective_limits({})


class FakeReactor(TwistedClock):  # type: ignore[misc]
    """Readers, writers and calls, run by hand; also a clock for tests that need one."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: set[Any] = set()
        self.writers: set[Any] = set()

    def addReader(self, reader: Any) -> None:
        self.readers.add(reader)

    def removeReader(self, reader: Any) -> None:
        self.readers.discard(reader)

    def addWriter(self, writer: Any) -> None:
        self.writers.add(writer)

    def removeWriter(self, writer: Any) -> None:
        self.writers.discard(writer)

    def monotonic(self) -> float:
        return self.seconds()

    def wall_ms(self) -> int:
        return int(self.seconds() * 1000)

    def wall_us(self) -> int:
        return int(self.seconds() * 1e6)


class FakeSocket:
    """`incoming`: what each read brings (b"" is the end); `room`: how many bytes writes still take."""

    def __init__(self) -> None:
        self.incoming: deque[bytes] = deque()
        self.sent = bytearray()
        self.room = 1 << 40
        self.writes = 0
        self.closed = self.half_closed = False
        self.broken: OSError | None = None

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def setsockopt(self, *arguments: Any) -> None:
        pass

    def fileno(self) -> int:
        return 99

    def recv_into(self, memory: memoryview) -> int:
        return self.recvmsg_into([memory])[0]

    def recvmsg_into(self, memories: list[memoryview]) -> tuple[int, list[Any], int, None]:
        if self.broken:
            raise self.broken
        if not self.incoming:
            raise BlockingIOError(11, "would block")
        data, count = self.incoming.popleft(), 0
        for memory in memories:
            part = data[count : count + len(memory)]
            memory[: len(part)] = part
            count += len(part)
        if count < len(data):
            self.incoming.appendleft(data[count:])
        return count, [], 0, None

    def sendmsg(self, buffers: Any) -> int:
        if self.broken:
            raise self.broken
        if not self.room:
            raise BlockingIOError(11, "would block")
        self.writes += 1
        data = b"".join(buffers)[: self.room]
        self.room -= len(data)
        self.sent += data
        return len(data)

    def shutdown(self, how: int) -> None:
        self.half_closed = True

    def close(self) -> None:
        self.closed = True


class Net:
    """Connections over fake sockets that share one traffic, in a world where time moves by hand."""

    def __init__(self, limit: dict[str, int] | None = None) -> None:
        self.reactor = FakeReactor()
        self.pool = Pool()
        self.turn = Turn(self.reactor)
        self.traffic = ConnectionLimits(
            self.pool, self.turn, self.reactor, self.reactor.callLater, {**EVERY_LIMIT, **(limit or {})}
        )

    def connect(self, protocol: Any) -> tuple[Connection, FakeSocket]:
        socket = FakeSocket()
        connection = Connection(
            socket,  # type: ignore[arg-type]
            protocol,
            ("127.0.0.1", 50_000),
            None,
            1,
            self.reactor,
            self.traffic,
        )
        protocol.makeConnection(connection)
        return connection, socket

    def bring(self, connection: Connection, *reads: bytes) -> None:
        """Let `reads` arrive, one in each read, and end the turn after each."""
        connection.socket.incoming.extend(reads)
        while connection in self.reactor.readers and connection.socket.incoming:
            self.poll(connection)

    def poll(self, connection: Connection) -> None:
        """One read of the connection, as the reactor does it, and the turn's end."""
        why = connection.doRead()
        if why is not None:
            self.reactor.removeReader(connection)
            connection.connectionLost(Failed(why))
        self.turn.request_end()
        self.reactor.advance(0)

    def write(self, connection: Connection) -> None:
        """The system has room for more of what the connection sends."""
        why = connection.doWrite()
        if why is not None:
            connection.connectionLost(Failed(why))

    def all_given_back(self) -> bool:
        """Only the arena itself is out of the pool."""
        return self.pool.stats().live_count == 1


class Failed:
    """As much of a Failure as a transport looks at."""

    def __init__(self, error: Any) -> None:
        self.value = error

    def check(self, *kinds: type) -> Any:
        return next((kind for kind in kinds if isinstance(self.value, kind)), None)
