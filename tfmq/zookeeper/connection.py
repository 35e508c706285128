"""A ZooKeeper connection with kazoo, opened at the first use. Errors of kazoo are replaced by errors of tfmq."""

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


RESPONSE_SECONDS: Final = 10.0
"""Timeout for one response. If the connection is lost meanwhile, the time until it is restored counts too."""
RETRY_SECONDS: Final = 0.1
RETRY_SECONDS_MAX: Final = 2.0
"""Maximum pause between connection attempts. The first pause is RETRY_SECONDS, each further one twice as long."""


def require_kazoo() -> None:
    """Raise NotSupported if kazoo is not installed, with the command that installs it."""
    try:
        import kazoo.client  # noqa: F401
    except ImportError:
        raise NotSupported('ZooKeeper needs kazoo: pip install "tfmq[zookeeper]".') from None


def new_client(address: ZooKeeperAddress, session_seconds: float, **options: Any) -> KazooClient:
    """Return a client that, once started, never stops connecting. Raises NotSupported if kazoo is not installed."""
    require_kazoo()
    from kazoo.client import KazooClient

    return KazooClient(
        hosts=address.hosts,
        timeout=session_seconds,
        connection_retry={"max_tries": -1, "delay": RETRY_SECONDS, "backoff": 2, "max_delay": RETRY_SECONDS_MAX},
        logger=logger,
        **options,
    )


class ZooKeeperConnection:
    """A connection that is opened at the first use: `with connection.client() as client:` yields a connected client.
    Errors of kazoo in the block become NotAllowed (no permission) or StoreFailed (the operation may have been done)."""

    def __init__(self, address: ZooKeeperAddress) -> None:
        """Create the connection without connecting. Raises NotSupported if kazoo is not installed."""
        require_kazoo()
        self.address = address
        self._client: KazooClient | None = None
        self._process = 0
        self._closed = False

    @contextmanager
    def client(self) -> Iterator[KazooClient]:
        if self._closed:
            raise Closed(f"The connection to {self.address} was closed.")
        with translate_errors(self.address):
            if self._client is None or self._process != os.getpid():  # a forked child must not use its parent's session
                client = new_client(self.address, RESPONSE_SECONDS)
                client.start(timeout=RESPONSE_SECONDS)
                self._client, self._process = client, os.getpid()
            yield self._client

    def close(self) -> None:
        """End the session. A second call has no effect."""
        self._closed = True
        client, self._client = self._client, None
        if client is not None and self._process == os.getpid():
            stop(client)


def stop(client: KazooClient) -> None:
    client.stop()
    client.close()


def wait_results(waiting: Sequence[Any]) -> list[Any]:
    """Wait for pending requests of kazoo and return their results, in order. For a failed request, the result is its
    exception. Raises OperationTimeoutError if a response does not arrive within RESPONSE_SECONDS."""
    found = []
    for each in waiting:
        each.wait(RESPONSE_SECONDS)
        if not each.ready():
            from kazoo.exceptions import OperationTimeoutError

            raise OperationTimeoutError(f"no answer in {RESPONSE_SECONDS:g} seconds")
        found.append(each.value if each.successful() else each.exception)
    return found


def result_or_none(response: Any) -> Any:
    """Return `response`, a result of `wait_results`; None if the node does not exist. Raises any other exception."""
    from kazoo.exceptions import NoNodeError

    if isinstance(response, NoNodeError):
        return None
    if isinstance(response, BaseException):
        raise response
    return response


@contextmanager
def translate_errors(address: ZooKeeperAddress) -> Iterator[None]:
    """Replace exceptions that kazoo raises in the block by errors of tfmq."""
    from kazoo import exceptions
    from kazoo.handlers.threading import KazooTimeoutError

    try:
        yield
    except (exceptions.NoAuthError, exceptions.AuthFailedError) as error:
        raise NotAllowed(
            f"{address} has nodes that not everybody may use ({error_text(error)}); tfmq brings no credentials."
        ) from error
    except (exceptions.KazooException, KazooTimeoutError, exceptions.ZookeeperError) as error:
        raise StoreFailed(f"{address} does not answer: {error_text(error)}.") from error


def error_text(error: Exception) -> str:
    """Return the text of a kazoo exception. Most have none: then return the name of the class."""
    return str(error) or type(error).__name__


# Throttling of the log of kazoo, which repeats its attempts to connect until the client is stopped

REPEAT_SECONDS: Final = 60.0  # after which the same message is logged again
REMEMBERED_MESSAGES_MAX: Final = 100  # above it, all are forgotten
STOPPED_CONNECTING: Final = "Failed connecting to Zookeeper within the connection retry policy."
"""kazoo's message when it stops connecting. It is not logged, because kazoo stops only at the request of tfmq."""
NO_ZOOKEEPER: Final = "Exception raised during deserialization of request"
"""The beginning of kazoo's message if a server is not ZooKeeper. The message does not help users, so it is replaced."""


class ThrottledLogFilter(logging.Filter):
    """Log filter: passes warnings and errors of kazoo, each text at most once a minute, without tracebacks. Without
    this filter the log would grow without limit, because kazoo repeats and logs its attempts to connect."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.msg == STOPPED_CONNECTING:
            return False
        if isinstance(record.msg, str) and record.msg.startswith(NO_ZOOKEEPER):
            record.msg, record.args = "What answers there is no ZooKeeper, or one that wants TLS.", ()
        record.exc_info = record.exc_text = None
        now, text = self._clock(), record.getMessage()
        if now < self._logged_at.get(text, float("-inf")) + REPEAT_SECONDS:
            return False
        if len(self._logged_at) >= REMEMBERED_MESSAGES_MAX:
            self.clear()
        self._logged_at[text] = now
        return True

    def clear(self) -> None:
        """Forget which messages were logged, so that each of them may be logged again at once."""
        self._logged_at.clear()


logger: Final = logging.getLogger("tfmq.zookeeper")
logger.addFilter(ThrottledLogFilter())
