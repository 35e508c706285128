"""TLS of a client's connection: its socket, and errors that say what to do."""

from __future__ import annotations

import errno
import socket
import ssl
import threading
from collections.abc import Sequence
from typing import Final

from tfmq.client.connection.addresses import BrokerAddress
from tfmq.errors import NOT_DONE, ConnectionFailed
from tfmq.tls import Buffer, NotTls, TlsSocket

RECEIVE_BYTES: Final = 256 << 10
"""Memory for ciphertext, one for each connection: a reply to a fetch then needs few reads."""

_UNKNOWN_AUTHORITY: Final = frozenset((2, 18, 19, 20, 21))
"""Codes of `SSLCertVerificationError.verify_code` (X509_V_ERR in OpenSSL): the chain ends at no trusted authority."""
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_OTHER_NAME: Final = frozenset((62, 64))
_CERTIFICATE_MISSING: Final = frozenset(("TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE"))


class ClientTlsSocket(TlsSocket):
    """The encrypted socket of a client. Raises `ConnectionFailed` with advice where TLS fails.

    One thread may receive while another one sends, as with a plain socket.
    """

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, server: BrokerAddress) -> None:
        super().__init__(raw, context, server_hostname=server.host, scratch=bytearray(RECEIVE_BYTES))
        self._server = server
        # OpenSSL's objects are not for two threads at once. The lock is reentrant, because a signal handler may send a
        # message while its thread receives.
        self._lock = threading.RLock()
        self._sending = False

    def start(self) -> None:
        try:
            with self._lock:
                super().start()
        except ssl.SSLError as error:
            raise tls_error(error, self._server) from error

    def recv(self, size: int) -> bytes:
        try:
            with self._lock:
                return super().recv(size)
        except (ssl.SSLError, NotTls) as error:
            raise tls_error(error, self._server) from error

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        with self._lock:
            if self._sending:
                raise BlockingIOError(errno.EAGAIN, "a signal handler sends while its thread does: the thread goes on")
            self._sending = True
            try:
                return super().sendmsg(buffers)
            except OSError:
                raise
            except BaseException:
                # Ctrl-C: how much is encrypted and sent is not known any more, so nothing may follow it.
                self._failed = True
                raise
            finally:
                self._sending = False


def tls_error(error: ssl.SSLError | NotTls, server: BrokerAddress) -> ConnectionFailed:
    """Return the error for a failure of TLS. It is retriable if another attempt may succeed without a change."""
    sentence = _sentence(error, server)
    if sentence:
        return ConnectionFailed(sentence, outcome=NOT_DONE, retriable=False)
    reason = (getattr(error, "reason", None) or str(error)).lower().replace("_", " ")
    return ConnectionFailed(f"TLS with {server} failed: {reason}.")


def _sentence(error: ssl.SSLError | NotTls, server: BrokerAddress) -> str:
    if isinstance(error, NotTls):
        return f"{server.host}:{server.port} does not use TLS: write tfmq:// instead of tfmqs://, or correct the port."
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"The certificate of {server} is not accepted: {error.verify_message.rstrip('.')}.{_advice(error)}"
    reason = error.reason or ""
    if reason in _CERTIFICATE_MISSING:
        return (
            f"{server} asks for a certificate of the client: write"
            f" {server}?certificate=FILE&key=FILE, with a certificate of an authority that the broker trusts."
        )
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        alert = reason.partition("ALERT_")[2].lower().replace("_", " ")
        return f"{server} does not accept the certificate of this client ({alert}): use another, or renew it."
    return ""


def _advice(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _UNKNOWN_AUTHORITY:
        return " Name the authority that signed it: tfmqs://HOST:PORT?ca=FILE."
    if error.verify_code == _EXPIRED:
        return " Renew it at the server, and send the server SIGHUP."
    if error.verify_code == _NOT_YET_VALID:
        return " Compare the clocks of both machines."
    if error.verify_code in _OTHER_NAME:
        return " Connect by a name that is in the certificate."
    return ""
