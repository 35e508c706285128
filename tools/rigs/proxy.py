"""A TCP proxy on loopback that cuts connections, swallows replies and delays bytes, on request."""

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PIECE_BYTES = 16 << 10
POLL_SECONDS = 0.05

Judge = Callable[[bytes], bytes | None]
"""What to pass on of a piece; None: cut the connection."""


class Pipe:
    """One connection through the proxy, in a thread of its own."""

    def __init__(self, proxy: "Proxy", near: socket.socket, far: socket.socket) -> None:
        self.proxy, self.near, self.far = proxy, near, far
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        with selectors.DefaultSelector() as selector, suppress(OSError):
            selector.register(self.near, selectors.EVENT_READ, (self.far, "up"))
            selector.register(self.far, selectors.EVENT_READ, (self.near, "down"))
            while not self.proxy.done.is_set():
                for key, _ in selector.select(POLL_SECONDS):
                    target, way = key.data
                    data = key.fileobj.recv(PIECE_BYTES)  # type: ignore[union-attr]
                    if not data or not self.pass_on(target, way, data):
                        self.cut()
                        return
        self.cut()

    def pass_on(self, target: socket.socket, way: str, data: bytes) -> bool:
        """False when the connection is to be cut; what the judge let through was sent before."""
        judge = self.proxy.up if way == "up" else self.proxy.down
        judged = data if judge is None else judge(data)
        if judged is None:
            return False
        target.sendall(judged)
        return len(judged) == len(data) or judge is None or not self.proxy.cut_when_short

    def cut(self) -> None:
        for end in (self.near, self.far):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Proxy:
    """Between clients and the broker at `target`. `up` and `down` judge every piece in their direction.

    `cut_when_short`: a judge that passes on only a part has the connection cut after it; else the rest is swallowed.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        self.up: Judge | None = None
        self.down: Judge | None = None
        self.cut_when_short = True
        self.connections = 0
        self.done = threading.Event()
        self.pipes: list[Pipe] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(POLL_SECONDS)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        while not self.done.is_set():
            with suppress(TimeoutError):
                near = self.listener.accept()[0]
                try:
                    far = socket.create_connection(self.target, timeout=10)
                except OSError:
                    near.close()
                    continue
                self.connections += 1
                self.pipes.append(Pipe(self, near, far))

    def cut(self) -> None:
        """Ends every connection that is open now."""
        for pipe in self.pipes:
            pipe.cut()
        self.pipes = [pipe for pipe in self.pipes if pipe.thread.is_alive()]

    def close(self) -> None:
        self.done.set()
        self.cut()
        self.thread.join(5)
        self.listener.close()


@contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    """A proxy in front of `target`, closed at the end."""
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
