"""Planted bugs: TLS: who is trusted, what is sent in plaintext, what is forgotten in a buffer."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

SOCKET: Final = "tests/test_tls.py"
CONNECTION: Final = "tests/server/test_tls_connection.py"
PROCESSES: Final = "tests/e2e/test_tls.py"

TLS: Final = (
    Mutant(
        "any-server-is-trusted",
        "a client verifies the certificate of the server",
        "tfmq/tls.py",
        "    if certificate:\n        _load_certificate(context, certificate, key,",
        "    context.check_hostname = False\n    context.verify_mode = ssl.CERT_NONE\n"
        "    if certificate:\n        _load_certificate(context, certificate, key,",
        [PROCESSES],
    ),
    Mutant(
        "any-name-is-trusted",
        "the server's certificate must have the host of the address",
        "tfmq/tls.py",
        "    if certificate:\n        _load_certificate(context, certificate, key,",
        "    context.check_hostname = False\n    if certificate:\n        _load_certificate(context, certificate, key,",
        [PROCESSES],
    ),
    Mutant(
        "any-client-is-trusted",
        "with server.tls_client_ca each client must show a certificate",
        "tfmq/tls.py",
        "context.verify_mode = ssl.CERT_REQUIRED",
        "context.verify_mode = ssl.CERT_OPTIONAL",
        [PROCESSES],
    ),
    Mutant(
        "an-expired-certificate-is-no-matter",
        "a server whose certificate has expired says so",
        "tfmq/tls.py",
        "            return error.verify_message\n",
        "            break\n",
        [SOCKET],
    ),
    Mutant(
        "old-tls-versions",
        "TLS before 1.2 is refused",
        "tfmq/tls.py",
        "    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\n    context.minimum_version = ssl.TLSVersion.TLSv1_2\n",
        "    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\n    context.minimum_version = ssl.TLSVersion.TLSv1\n"
        '    context.set_ciphers("DEFAULT:@SECLEVEL=0")\n',
        [SOCKET, CONNECTION],
    ),
    Mutant(
        "server-certificate-alone-opens-the-broker",
        "without certificates of clients, others are kept out",
        "tfmq/config.py",
        "    is_closed = server.tls_certificate and (server.users or server.tls_client_ca)\n",
        "    is_closed = server.tls_certificate\n",
        ["tests/test_config.py"],
    ),
    Mutant(
        "certificates-are-not-read-again",
        "SIGHUP reads the certificates again",
        "tfmq/server/server.py",
        "        self._tls_context = context\n",
        "",
        [PROCESSES],
    ),
    Mutant(
        "decrypted-bytes-are-forgotten",
        "what is decrypted is handled without waiting for more bytes",
        "tfmq/server/tls_connection.py",
        "            if tls.is_buffered:\n                self._read_again()\n",
        "            if tls.is_buffered:\n                pass\n",
        [CONNECTION],
    ),
    Mutant(
        "decrypted-bytes-are-forgotten-after-a-pause",
        "a connection that is resumed goes on with what it has decrypted",
        "tfmq/server/tls_connection.py",
        "        if self._tls is not None and self._tls.is_buffered:\n            self._read_again()\n",
        "",
        [CONNECTION],
    ),
    Mutant(
        "writing-before-the-handshake-spins",
        "before the handshake nothing waits for a writable socket",
        "tfmq/server/tls_connection.py",
        "if self._tls is None or self._tls.is_established:\n            super().startWriting()",
        "if True:\n            super().startWriting()",
        [CONNECTION],
    ),
    Mutant(
        "plaintext-after-a-failed-handshake",
        "nothing but the alert is sent after a failed handshake",
        "tfmq/server/tls_connection.py",
        "            self._discard_queue()\n            self.end()\n",
        "            self.socket, self._tls = tls.raw, None\n            self.startWriting()\n            self.end()\n",
        [CONNECTION],
    ),
    Mutant(
        "bytes-are-encrypted-twice",
        "what is encrypted is not encrypted again after a full socket",
        "tfmq/tls.py",
        "while self._in_flight or self._encrypt(tls, buffers, sent):",
        "while self._encrypt(tls, buffers, sent):",
        [SOCKET],
    ),
    Mutant(
        "encrypted-bytes-count-as-sent",
        "plaintext counts as sent when the system has accepted its ciphertext",
        "tfmq/tls.py",
        "            if not self._flush():\n                if sent:",
        "            if not self._flush():\n                sent += self._in_flight\n"
        "                self._in_flight = 0\n                if sent:",
        [SOCKET, CONNECTION],
    ),
    Mutant(
        "the-rest-of-a-chain-waits-for-the-client",
        "a chain of certificates that the system does not accept at once is sent without more bytes of the client",
        "tfmq/server/tls_connection.py",
        "                self._flushes_handshake = True\n                super().startWriting()\n",
        "                self._flushes_handshake = True\n",
        [CONNECTION],
    ),
    Mutant(
        "a-flushed-handshake-spins",
        "after its part of the handshake is sent, a connection does not wait for a writable socket",
        "tfmq/server/tls_connection.py",
        "                self.stopWriting()\n                self._writes_after_handshake = self.is_waiting\n",
        "                self._writes_after_handshake = self.is_waiting\n",
        [CONNECTION],
    ),
    Mutant(
        "decrypting-is-free",
        "the time of decrypting is charged to its connection",
        "tfmq/server/tls_connection.py",
        "why = self._charged(super().doRead)",
        "why = super().doRead()",
        [CONNECTION],
    ),
    Mutant(
        "encrypting-is-free",
        "the time of encrypting is charged to its connection",
        "tfmq/server/tls_connection.py",
        "return self._charged(self._do_write)",
        "return self._do_write()",
        [CONNECTION],
    ),
    Mutant(
        "one-byte-begins-a-handshake",
        "a part of a record costs no object of OpenSSL",
        "tfmq/tls.py",
        "        if self._ssl is None and self._has_first_record():\n",
        "        if self._ssl is None:\n",
        [SOCKET],
    ),
    Mutant(
        "a-record-that-is-too-long-is-waited-for",
        "a first record that is longer than any is refused by OpenSSL at once",
        "tfmq/tls.py",
        "size > RECORD_BYTES_MAX or self._incoming.pending",
        "self._incoming.pending",
        [SOCKET],
    ),
    Mutant(
        "openssl-waits-for-the-garbage-collection",
        "a lost connection keeps nothing of OpenSSL",
        "tfmq/server/tls_connection.py",
        "        super().connectionLost(reason)\n",
        "        super().connectionLost(reason)\n        return\n",
        [f"{CONNECTION}::test_a_lost_connection_keeps_nothing_of_openssl"],
    ),
    Mutant(
        "an-error-keeps-its-connection",
        "a connection that was reset keeps nothing of OpenSSL",
        "tfmq/tls.py",
        "                del error\n",
        "                pass\n",
        [f"{CONNECTION}::test_a_lost_connection_keeps_nothing_of_openssl"],
    ),
)
