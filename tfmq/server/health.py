"""Health over HTTP: `/live` and `/ready`, also while the broker recovers and the reactor does not run yet."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Final

from tfmq import limits
from tfmq.access.rights import MONITOR, Need
from tfmq.server.http_message import HttpAnswer, HttpRequest, json_answer, text_answer
from tfmq.tls import TlsSocket

RECOVERING: Final = {"reason": "recovering", "detail": "The broker opens its files."}


def live(request: HttpRequest) -> HttpAnswer:
    """Answer that the reactor runs: otherwise nothing would answer."""
    return json_answer({"live": True})


def ready(request: HttpRequest) -> HttpAnswer:
    """Answer whether the broker does its whole work; why not, where it has users, only to those who may ask for it."""
    reasons = request.context.not_ready()
    may_know = request.account.allow(Need((MONITOR,))) if request.account else request.context.access is None
    if may_know or not reasons:
        return readiness(reasons)
    return json_answer({"ready": False}, 503)


def readiness(reasons: Sequence[Mapping[str, str]]) -> HttpAnswer:
    """Return 200, or 503 with the reasons why the broker is not ready."""
    return json_answer({"ready": not reasons, "reasons": list(reasons)}, 503 if reasons else 200)


QUIET_SECONDS: Final = 0.2
"""A recovery that is shorter than this ends before `RecoveryResponder` accepts anything: connections wait that long."""


class RecoveryResponder:
    """Answers HTTP requests in a thread of its own during the recovery, which keeps the reactor's thread busy.

    A context manager around the recovery. `/live` is answered with 200, so that nothing ends a broker that recovers a
    large folder; `/ready` with 503 and the reason; any other path with 503. At the end, connections that have no answer
    yet are closed; those that were not accepted yet wait for the server.
    """

    def __init__(self, listening: socket.socket, tls_context: ssl.SSLContext | None) -> None:
        self._listening, self._tls_context = listening, tls_context
        self._ended = threading.Event()
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="http-recovery", daemon=True)

    def __enter__(self) -> RecoveryResponder:
        with contextlib.suppress(RuntimeError):  # No thread can be started: connections wait for the server.
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        os.eventfd_write(self._end, 1)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._end)

    def _run(self) -> None:
        if self._ended.wait(QUIET_SECONDS):
            return
        clients: dict[socket.socket, _Client] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            selector.register(self._listening, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, _ in selector.select(1.0 if clients else None):
                    if key.fileobj is self._listening:
                        self._accept(selector, clients)
                    elif isinstance(key.fileobj, socket.socket) and clients[key.fileobj].is_done():
                        selector.unregister(key.fileobj)
                        clients.pop(key.fileobj).close()
                for raw in [raw for raw, client in clients.items() if time.monotonic() > client.deadline]:
                    selector.unregister(raw)
                    clients.pop(raw).close()
        for client in clients.values():
            client.close()

    def _accept(self, selector: selectors.BaseSelector, clients: dict[socket.socket, _Client]) -> None:
        with contextlib.suppress(OSError):
            raw, _ = self._listening.accept()
            if len(clients) >= limits.HTTP_CONNECTIONS:
                raw.close()
                return
            raw.setblocking(False)
            clients[raw] = _Client(raw, self._tls_context)
            selector.register(raw, selectors.EVENT_READ)


class _Client:
    """One connection to the `RecoveryResponder`: receives the head of one request and answers it."""

    def __init__(self, raw: socket.socket, tls_context: ssl.SSLContext | None) -> None:
        self.deadline = time.monotonic() + limits.HTTP_REQUEST_SECONDS
        self._socket = TlsSocket(raw, tls_context) if tls_context is not None else raw
        self._head = b""

    def is_done(self) -> bool:
        """Read what has arrived. Return whether the connection is to be closed, after the answer or an error."""
        try:
            received = self._socket.recv(int(limits.HTTP_HEADER_BYTES))
            self._head += received
            if not received or len(self._head) > limits.HTTP_HEADER_BYTES:
                return True
            if b"\r\n\r\n" not in self._head:
                return False
            answer = answer_while_recovering(self._head)
            self._socket.sendmsg([encode(answer, self._head.startswith(b"HEAD "))])
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def answer_while_recovering(head: bytes) -> HttpAnswer:
    """Return the answer to the request with this head, while the broker recovers."""
    words = head.split(b"\r\n", 1)[0].split(b" ")
    path = words[1].split(b"?")[0] if len(words) > 1 else b""
    if path == b"/live":
        return json_answer({"live": True})
    if path == b"/ready":
        return readiness([RECOVERING])
    return text_answer(503, f"{RECOVERING['detail']} Ask again; /ready says when it is done.")


def encode(answer: HttpAnswer, without_body: bool) -> bytes:
    """Return the answer as bytes, for a connection that is closed after it."""
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in answer.all_headers()]
    return "\r\n".join([*lines, "", ""]).encode() + (b"" if without_body else answer.body)
