"""A connection to ZooKeeper by kazoo, made when it is first used, anew in a forked child; its errors as ours."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tfmq.errors import Closed, NotAllowed, NotSupported, StoreFailed
from tfmq.zookeeper.paths import ZooKeeperAddress

if TYPE_CHECKING:
    from kazoo.client import KazooClient


ANSWER_SECONDS: Final = 10.0
"""So long one answer is waited for, over new connections too: as long as a session lasts."""
RETRY_SECONDS: Final = 0.1
RETRY_SECONDS_MAX: Final = 2.0
"""Pauses between attempts to connect, doubled up to the second."""

Started = Callable[["KazooClient"], None]


def want_kazoo() -> None:
    """Raises NotSupported without it, in words that say how to get it."""
    try:
        import kazoo.client  # noqa: F401
    except ImportError:
        raise NotSupported('ZooKeeper needs kazoo: pip install "tfmq[zookeeper]".') from None


def new_client(address: ZooKeeperAddress, session_seconds: float, **options: Any) -> KazooClient:
    """A client that connects for ever once it is started. Raises NotSupported without kazoo."""
    want_kazoo()
    from kazoo.client import KazooClient

    return KazooClient(
        hosts=address.hosts,
        timeout=session_seconds,
        connection_retry={
            "max_tries": -1,
            "delay": RETRY_SECONDS,
            "backoff": 2,
            "max_delay": RETRY_SECONDS_MAX,
        },
        logger=logger,
        **options,
    )


class Connection:
    """`with connection.client() as client:` gives the client, connected; failures of kazoo leave the block as errors of
    ours: StoreFailed, where it may have happened, and NotAllowed.
    """

    def __init__(self, address: ZooKeeperAddress, session_seconds: float = ANSWER_SECONDS) -> None:
        """Touches no network. Raises NotSupported without kazoo."""
        want_kazoo()
        self.address = address
        self._session_seconds = session_seconds
        self._client: KazooClient | None = None
        self._process = 0
        self._closed = False

    @contextmanager
    def client(self) -> Iterator[KazooClient]:
        if self._closed:
            raise Closed(f"The connection to {self.address} was closed.")
        with translated(self.address):
            yield self._started()

    def close(self) -> None:
        """Ends the session; twice is harmless."""
        self._closed = True
        client, self._client = self._client, None
        if client is not None and self._process == os.getpid():
            stop(client)

    def _started(self) -> KazooClient:
        if self._client is None or self._process != os.getpid():  # a parent's session is not ours
            client = new_client(self.address, self._session_seconds)
            client.start(timeout=ANSWER_SECONDS)
            self._client, self._process = client, os.getpid()
        return self._client


def stop(client: KazooClient) -> None:
    """End a client's session and threads."""
    client.stop()
    client.close()


def results(waiting: Sequence[Any]) -> list[Any]:
    """The results of requests that are under way, in order; an exception of one is in its place."""
    found = []
    for each in waiting:
        each.wait(ANSWER_SECONDS)
        if not each.ready():
            from kazoo.exceptions import OperationTimeoutError

            raise OperationTimeoutError(f"no answer in {ANSWER_SECONDS:g} seconds")
        found.append(each.value if each.successful() else each.exception)
    return found


@contextmanager
def translated(address: ZooKeeperAddress) -> Iterator[None]:
    """What kazoo raises in the block leaves it as an error of ours."""
    from kazoo import exceptions
    from kazoo.handlers.threading import KazooTimeoutError

    try:
        yield
    except (exceptions.NoAuthError, exceptions.AuthFailedError) as error:
        raise NotAllowed(
            f"{address} has nodes that not everybody may use ({in_words(error)}); tfmq brings no credentials."
        ) from error
    except (exceptions.KazooException, KazooTimeoutError, exceptions.ZookeeperError) as error:
        raise StoreFailed(f"{address} does not answer: {in_words(error)}.") from error


def in_words(error: Exception) -> str:
    """What an exception of kazoo says; most say no more than their name."""
    return str(error) or type(error).__name__


# What kazoo says of its connections, said sparingly: it connects for as long as that takes, and tells each time.
#
# Its tracebacks show its own inside, and are left out: who sees one cannot do more than its first line says.

AGAIN_SECONDS: Final = 60.0
"""The same words are said again after so long."""
TEXTS_MAX: Final = 100
"""Different words that are remembered; with more of them all are forgotten."""
NO_NEWS: Final = "Failed connecting to Zookeeper within the connection retry policy."
"""What it says when it stops connecting, which it does only because it was told to."""
NO_ZOOKEEPER: Final = "Exception raised during deserialization of request"
"""How it tells that something answers that is no ZooKeeper; what follows is of use to nobody."""


class Sparing(logging.Filter):
    """Lets warnings and errors through, the same one once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is to be said."""
        if record.levelno < logging.WARNING or record.msg == NO_NEWS:
            return False
        if isinstance(record.msg, str) and record.msg.startswith(NO_ZOOKEEPER):
            record.msg, record.args = "What answers there is no ZooKeeper, or one that wants TLS.", ()
        record.exc_info = record.exc_text = None
        now, text = self._clock(), record.getMessage()
        if now < self._said_at.get(text, float("-inf")) + AGAIN_SECONDS:
            return False
        if len(self._said_at) >= TEXTS_MAX:
            self.forget()
        self._said_at[text] = now
        return True

    def forget(self) -> None:
        """Everything may be said again."""
        self._said_at.clear()


logger: Final = logging.getLogger("tfmq.zookeeper")
logger.addFilter(Sparing())
