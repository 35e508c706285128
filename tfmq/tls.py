"""TLS over non-blocking sockets, by the `ssl` module of Python: contexts, and a socket that encrypts.

`TlsSocket` has those methods of a socket that a connection uses, and raises the same errors, so the code that reads and
writes frames is the same with and without TLS. It uses an `ssl.SSLObject` between two memory buffers instead of
`ssl.SSLSocket`, which has neither `sendmsg` nor `recvmsg_into`, and does not tell whether decrypted data are left.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final

from tfmq.errors import ConfigError

READ_BYTES: Final = 64 << 10
"""Maximum ciphertext that is decrypted at a time. OpenSSL keeps buffers of this size for each connection."""
READ_BYTES_MIN: Final = 4096
"""Ciphertext is read in pieces of at least this size, also where less space for plaintext is left."""
WRITE_BYTES: Final = 64 << 10
"""Maximum plaintext that is encrypted before its ciphertext is written."""
OUTPUT_BYTES_MAX: Final = 4 * WRITE_BYTES
"""A peer that makes us answer on the TLS layer, and does not read, is disconnected at this much ciphertext."""
RECORD_TYPES: Final = frozenset((21, 22))
"""First byte of the first TLS record of a peer: an alert or a handshake."""
RECORD_HEADER_BYTES: Final = 5
"""The header of a record: its type, version, and length (2 bytes)."""
RECORD_BYTES_MAX: Final = 1 << 14
"""Maximum length of the first record, which is not encrypted."""
START_BYTES: Final = 64
"""How many bytes of a peer that does not use TLS are kept, to tell what it is."""

Buffer = bytes | bytearray | memoryview


class NotTls(OSError):
    """The peer does not use TLS. `start` has the first bytes that it sent."""

    def __init__(self, start: bytes) -> None:
        super().__init__(errno.EPROTO, "the peer does not use TLS")
        self.start = start


class TlsSocket:
    """A TLS connection over `raw`, a connected socket that does not block. All other attributes are those of `raw`.

    A server's handshake begins with the first bytes that the client sends, and makes progress in each call that reads.
    Until it is complete, nothing can be sent. Errors are those of a socket: `BlockingIOError` where a call would block,
    `ssl.SSLError` (an `OSError`) where TLS fails, and `NotTls`.
    """

    def __init__(
        self,
        raw: socket.socket,
        context: ssl.SSLContext,
        *,
        server_hostname: str | None = None,
        scratch: bytearray | None = None,
    ) -> None:
        """`server_hostname`: the name that the server's certificate must have; None: this end is the server.

        `scratch`: memory for ciphertext during a call, which several sockets of one thread may share.
        """
        self.raw = raw
        self._context = context
        self._server_hostname = server_hostname
        self._scratch = memoryview(scratch if scratch is not None else bytearray(READ_BYTES))
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl: ssl.SSLObject | None = None
        self._ended = self._failed = False
        self._start = b""
        """The first bytes that were received, at least RECORD_HEADER_BYTES of them as soon as there are as many."""
        self._error: OSError | None = None
        """An error that the next read raises: before it, there was plaintext."""
        self._ciphertext = memoryview(b"")
        """Output that the system has not accepted yet."""
        self._in_flight = 0
        """How many bytes of plaintext are encrypted of which `sendmsg` has not returned yet that they are sent."""
        self.is_established = False
        """Whether the handshake is complete."""
        self.is_buffered = False
        """Whether more plaintext, or the end of the stream, may be read although the raw socket is not readable."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    @property
    def has_output(self) -> bool:
        """Whether there is ciphertext that the system has not accepted yet."""
        return bool(self._ciphertext) or self._outgoing.pending > 0

    def flush(self) -> bool:
        """Write ciphertext that is left. Return whether the system has accepted all of it."""
        return self._flush()

    def start(self) -> None:
        """Begin the handshake of a client."""
        self._shake_hands(self._create())

    def recv(self, size: int) -> bytes:
        """Return the plaintext of all ciphertext of one read, which may be more than `size`; b"" at the end."""
        self._raise_kept_error()
        if not self._ended and self._read_ciphertext(len(self._scratch)):
            pieces = []
            tls = self._ssl
            try:
                if tls is not None and (self.is_established or self._shake_hands(tls)):
                    with contextlib.suppress(ssl.SSLWantReadError):
                        while piece := tls.read(READ_BYTES):
                            pieces.append(piece)
                        self._ended = True
                    self._flush_answers()
            except OSError as error:
                if not pieces:
                    raise
                self._error = error
            if pieces:
                return b"".join(pieces)
        if self._ended:
            return b""
        raise BlockingIOError(errno.EAGAIN, "no plaintext yet")

    def recv_into(self, buffer: memoryview) -> int:
        """Fill `buffer` with plaintext; return the number of bytes, 0 at the end of the stream."""
        return self._receive((buffer,))

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int, list[Any], int, Any]:
        return self._receive(buffers), [], 0, None

    def _receive(self, rooms: Sequence[memoryview]) -> int:
        if self._failed:
            return self.raw.recv_into(rooms[0])  # The caller discards what follows a failed handshake.
        self._raise_kept_error()
        # Not more ciphertext than there is room for plaintext: with records that have little or no plaintext, a peer
        # could otherwise keep this call busy for as long as it sends.
        size = left = sum(map(len, rooms))
        filled = self._decrypt(rooms, 0) if self.is_buffered else 0
        while filled < size and left > 0 and not self._ended and self._error is None:
            wanted = max(READ_BYTES_MIN, min(size - filled, len(self._scratch)))
            try:
                count = self._read_ciphertext(wanted)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._keep_error(error, filled)
                break
            left -= count
            filled = self._decrypt(rooms, filled)
            if count < wanted:
                break
        if filled or self._ended:
            return filled
        raise BlockingIOError(errno.EAGAIN, "no plaintext yet")

    def _keep_error(self, error: OSError, filled: int) -> None:
        """Raise the error, or keep it for the next read if plaintext was decrypted before it."""
        if not filled:
            try:
                raise error
            finally:
                # The error's traceback has this frame: without this, they and all callers would keep one another.
                del error
        self._error = error
        self.is_buffered = True

    def _raise_kept_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _read_ciphertext(self, size: int) -> int:
        """Read up to `size` bytes of ciphertext, and return their number. Note the end of the stream."""
        count = self.raw.recv_into(self._scratch[:size])
        data = self._scratch[:count]
        if not count:
            self._ended = True
        elif len(self._start) < RECORD_HEADER_BYTES:
            if not self._start and data[0] not in RECORD_TYPES:
                raise NotTls(bytes(data[:START_BYTES]))
            self._start += data[:RECORD_HEADER_BYTES]
        self._incoming.write(data)
        if self._ssl is None and self._has_first_record():
            self._create()
        return count

    def _has_first_record(self) -> bool:
        """Return whether the first record of the client is complete, or longer than any.

        OpenSSL has 45 KB for each handshake, which are not allocated for a client that has sent a part of a record.
        """
        if len(self._start) < RECORD_HEADER_BYTES:
            return False
        size = int.from_bytes(self._start[3:RECORD_HEADER_BYTES], "big")
        return size > RECORD_BYTES_MAX or self._incoming.pending >= RECORD_HEADER_BYTES + size

    def _decrypt(self, rooms: Sequence[memoryview], filled: int) -> int:
        """Decrypt into `rooms` after their first `filled` bytes; return how many are filled then."""
        tls = self._ssl
        if tls is None or not (self.is_established or self._shake_hands(tls)):
            return filled
        skip = filled
        for room in rooms:
            view = room[skip:]
            skip = max(0, skip - len(room))
            while len(view):
                try:
                    count = int(tls.read(len(view), view))
                except ssl.SSLWantReadError:
                    count = -1
                except ssl.SSLError as error:
                    self._keep_error(error, filled)
                    return filled
                if count <= 0:
                    self._ended = self._ended or not count
                    # The end came with data: the system will not report it again.
                    self.is_buffered = not count and filled > 0
                    try:
                        self._flush_answers()
                    except OSError as error:
                        self._keep_error(error, filled)
                    return filled
                filled += count
                view = view[count:]
        self.is_buffered = True
        return filled

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Send `buffers`; return how many of their bytes the system has accepted as ciphertext.

        After fewer bytes than all, or `BlockingIOError`, the next call must begin with the bytes that were not sent,
        because some of them are encrypted already.
        """
        tls = self._ssl
        if self._failed:
            raise ConnectionResetError("the TLS handshake failed")
        if tls is None or not self.is_established:
            raise BlockingIOError(errno.EAGAIN, "the TLS handshake is not complete")
        sent = 0
        while self._in_flight or self._encrypt(tls, buffers, sent):
            if not self._flush():
                if sent:
                    break
                raise BlockingIOError(errno.EAGAIN, "the peer does not read")
            sent += self._in_flight
            self._in_flight = 0
        return sent

    def _encrypt(self, tls: ssl.SSLObject, buffers: Sequence[Buffer], skip: int) -> int:
        """Encrypt up to WRITE_BYTES of `buffers`, after their first `skip` bytes; return how many."""
        pieces: list[memoryview] = []
        size = 0
        for buffer in buffers:
            if skip >= len(buffer):
                skip -= len(buffer)
                continue
            piece = memoryview(buffer)[skip : skip + WRITE_BYTES - size]
            pieces.append(piece)
            size += len(piece)
            skip = 0
            if size == WRITE_BYTES:
                break
        # Joined, because each call of `write` makes a record of its own, and a reply has several small buffers.
        rest = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        while len(rest):
            rest = rest[tls.write(rest) :]
        self._in_flight = size
        return size

    def _flush(self) -> bool:
        """Write ciphertext. Return whether the system has accepted all of it."""
        while self._ciphertext or self._outgoing.pending:
            if not self._ciphertext:
                self._ciphertext = memoryview(self._outgoing.read())
            try:
                sent = self.raw.send(self._ciphertext)
            except (BlockingIOError, InterruptedError):
                return False
            self._ciphertext = self._ciphertext[sent:]
        self._ciphertext = memoryview(b"")  # An empty part of it would keep all of it in memory.
        return True

    def _flush_answers(self) -> None:
        """Write what the TLS layer itself has to answer, for example to a change of keys."""
        if not self._outgoing.pending or self._flush():
            return
        if len(self._ciphertext) + self._outgoing.pending > OUTPUT_BYTES_MAX:
            raise ConnectionResetError("the peer does not read the answers of the TLS layer")

    def _create(self) -> ssl.SSLObject:
        self._ssl = self._context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=self._server_hostname is None,
            server_hostname=self._server_hostname,
        )
        return self._ssl

    def _shake_hands(self, tls: ssl.SSLObject) -> bool:
        """Continue the handshake; return whether it is complete. If it fails, send the alert, and raise the error."""
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError:
            self._failed = True
            with contextlib.suppress(OSError):
                self._flush()
            raise
        self.is_established = True
        self._flush()
        return True

    def shutdown(self, how: int) -> None:
        """End a direction of the connection; before the end of the output, tell the peer that it is complete."""
        if how != socket.SHUT_RD and self._ssl is not None and self.is_established and not self._in_flight:
            with contextlib.suppress(OSError):
                self._ssl.unwrap()
            with contextlib.suppress(OSError):
                self._flush()
        self.raw.shutdown(how)


# Contexts


def server_context(certificate: str, key: str = "", client_ca: str = "") -> ssl.SSLContext:
    """Return the context of a server, for TLS 1.2 and later, from the paths of PEM files.

    `client_ca`: the authorities of which each client must have a certificate; "": clients need none. Raises
    `ConfigError` with one sentence if a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Without tickets: no client of ours resumes a session, and one that did would not show its certificate again.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    _load_certificate(context, certificate, key, "server.tls_certificate", "server.tls_key")
    if client_ca:
        _load_authorities(context, client_ca, "server.tls_client_ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def certificate_trouble(context: ssl.SSLContext, certificate: str) -> str:
    """Return why clients may refuse the certificate of a `server_context` although it can be used; "" if nothing is
    known, for example "certificate has expired", of it or of one between it and its authority.

    The `ssl` module shows no dates of a context's own certificate. So a client that trusts just this file connects to
    it in memory, which is what other clients will do.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(certificate)
    except OSError:
        return ""  # the file was replaced since the context has read it
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(back, there)
    answers = context.wrap_bio(there, back, server_side=True)
    for side in (asks, answers, asks):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        except ssl.SSLError:
            break
    return ""


def client_context(ca: str = "", certificate: str = "", key: str = "") -> ssl.SSLContext:
    """Return the context of a client, which verifies the server's certificate and its name.

    `ca`: the authorities that the client trusts; "": those that the system trusts. `certificate` and `key`: its own, if
    the server asks for one. Raises `ConfigError` with one sentence if a file cannot be used.
    """
    if ca:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authorities(context, ca, "ca")
    else:
        context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate:
        _load_certificate(context, certificate, key, "certificate", "key")
    return context


def _load_certificate(
    context: ssl.SSLContext, certificate: str, key: str, certificate_name: str, key_name: str
) -> None:
    _check_pem(certificate, "CERTIFICATE-----", f"{certificate_name} is {certificate}", "certificate")
    where = f"{key_name} is {key}" if key else f"{key_name} is not set, and {certificate_name} is {certificate}"
    _check_pem(key or certificate, "PRIVATE KEY-----", where, "private key")

    def refuse_password() -> str:
        raise ConfigError(f"{where}: the private key is encrypted. Write it without a passphrase: openssl pkey -in ...")

    try:
        context.load_cert_chain(certificate, key or None, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{where}: the key does not belong to the certificate {certificate}.") from None
        raise ConfigError(f"{certificate_name} is {certificate}, which cannot be used: {_reason(error)}.") from None


def _load_authorities(context: ssl.SSLContext, path: str, name: str) -> None:
    _check_pem(path, "CERTIFICATE-----", f"{name} is {path}", "certificate")
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{name} is {path}, which cannot be used: {_reason(error)}.") from None


def _check_pem(path: str, mark: str, where: str, what: str) -> None:
    """Raise a `ConfigError` if the file cannot be read or has no such part. The errors of `ssl` name no file."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{where}: the file cannot be read: {getattr(error, 'strerror', error)}.") from None
    if mark not in text:
        raise ConfigError(f"{where}: the file has no {what} in the PEM form.")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")
