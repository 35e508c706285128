"""Logins by SCRAM-SHA-256 (RFC 5802, RFC 7677), by the library scramp: neither side sends the password.

The broker keeps `Keys`, from which the password cannot be computed. The client proves that it knows the password, and
the broker proves that it knows the keys. The nonces of both ends are in the proof, so one that was recorded is useless
later. SCRAM-SHA-256 is the only mechanism, so that nobody in between can choose a weaker one. The library compares
the proof in constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from scramp import ScramClient, ScramException, ScramMechanism

from tfmq.errors import BadRequest, LoginFailed
from tfmq.protocol.commands import MECHANISM_SCRAM

MECHANISM: Final = MECHANISM_SCRAM
ITERATIONS: Final = 10_000
"""Iterations of PBKDF2 for a new password: about 5 ms for each login of a client, and for each guess of an attacker."""
ITERATIONS_MIN: Final = 4096
"""What RFC 7677 asks for at least."""
ITERATIONS_MAX: Final = 1_000_000
SALT_BYTES: Final = 16
KEY_BYTES: Final = 32


BAD_PASSWORD: Final = "The password has characters that none can have, such as control characters: choose another."


class Keys(NamedTuple):
    """What the broker keeps of a password: salt and iterations, StoredKey and ServerKey of RFC 5802."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    def checked(self, name: str) -> Keys:
        """Return these keys. Raises `BadRequest` if they cannot be keys of this mechanism."""
        sizes = len(self.stored_key), len(self.server_key)
        if sizes != (KEY_BYTES, KEY_BYTES) or not self.salt:
            raise BadRequest(f"the keys of {name} are not of {MECHANISM}")
        if not ITERATIONS_MIN <= self.iterations <= ITERATIONS_MAX:
            raise BadRequest(f"the iterations of {name} must be from {ITERATIONS_MIN} to {ITERATIONS_MAX}")
        return self


def make_keys(password: str, randomness: Callable[[int], bytes], iterations: int = ITERATIONS) -> Keys:
    """Return the keys of a password. `randomness(n)` returns n random bytes.

    Raises `BadRequest` if the password has characters that RFC 4013 (SASLprep) prohibits, such as control characters.
    """
    try:
        salt, stored, server, count = ScramMechanism(MECHANISM).make_auth_info(
            password, iteration_count=iterations, salt=randomness(SALT_BYTES)
        )
    except ScramException:
        raise BadRequest(BAD_PASSWORD) from None
    return Keys(salt, count, stored, server)


def is_password(keys: Keys, password: str) -> bool:
    """Return whether these are keys of the password. This takes as long for a wrong password as for the right one."""
    try:
        _, stored, _, _ = ScramMechanism(MECHANISM).make_auth_info(
            password, iteration_count=keys.iterations, salt=keys.salt
        )
    except ScramException:  # SASLprep forbids some characters, such as control characters
        return False
    return hmac.compare_digest(stored, keys.stored_key)


class Login:
    """The broker's end of one login: two messages of the client, each with an answer.

    A user who does not exist gets a salt and a refusal like one with a wrong password: `decoy(name)` returns keys that
    are always the same for the name, and belong to no password.
    """

    def __init__(self, find: Callable[[str], Keys | None], decoy: Callable[[str], Keys]) -> None:
        self._find, self._decoy = find, decoy
        self._server = ScramMechanism(MECHANISM).make_server(self._keys_of)
        self._step = 0
        self.name = ""
        """The user name that the client has sent."""
        self.keys: Keys | None = None
        """The keys with which the proof of the client is compared."""
        self.is_over = False
        """Whether the login is complete, or has failed."""

    def answer(self, message: bytes) -> tuple[bytes, bool]:
        """Return the answer to a message of the client, and whether the login is complete.

        Raises `LoginFailed`, always with the same sentence.
        """
        self._step += 1
        self.is_over = self._step > 1
        try:
            text = message.decode()
            if self._step == 1:
                self._server.set_client_first(text)
                return self._server.get_server_first().encode(), False
            if self._step == 2:
                self._server.set_client_final(text)
                return self._server.get_server_final().encode(), True
        except (ScramException, ValueError, KeyError, IndexError):
            pass
        self.is_over = True
        raise LoginFailed()

    def _keys_of(self, name: str) -> tuple[bytes, bytes, bytes, int]:
        self.name = name
        self.keys = keys = self._find(name) or self._decoy(name)
        return keys.salt, keys.stored_key, keys.server_key, keys.iterations


def decoys(secret: bytes) -> Callable[[str], Keys]:
    """Return a function that makes up keys for a name, always the same while `secret` is."""

    def decoy(name: str) -> Keys:
        def derive(purpose: bytes) -> bytes:
            return hmac.digest(secret, purpose + name.encode(), "sha256")

        return Keys(derive(b"salt")[:SALT_BYTES], ITERATIONS, derive(b"stored"), derive(b"server"))

    return decoy


class ClientLogin:
    """The client's end of one login. Raises `LoginFailed` for a password that no user can have."""

    def __init__(self, name: str, password: str) -> None:
        self.has_proof = False
        """Whether `final` has returned the proof, so that the broker's next answer must have its own."""
        try:
            self._client: Any = ScramClient([MECHANISM], name, password)
        except ScramException:
            raise LoginFailed(BAD_PASSWORD) from None

    def first(self) -> bytes:
        return bytes(self._client.get_client_first().encode())

    def final(self, answer: bytes) -> bytes:
        """Return the proof. Raises `LoginFailed` if the broker's answer is none, or asks for too much work."""
        text = self._text(answer)
        iterations = text.rpartition("i=")[2]
        if not iterations.isdecimal() or not ITERATIONS_MIN <= int(iterations) <= ITERATIONS_MAX:
            raise LoginFailed("The broker asks for a login in a way that is not accepted: the iterations are wrong.")
        try:
            self._client.set_server_first(text)
            proof = bytes(self._client.get_client_final().encode())
            self.has_proof = True
            return proof
        except (ScramException, ValueError, KeyError, IndexError):
            raise LoginFailed("The broker's answer to the login is none of SCRAM-SHA-256.") from None

    def check(self, answer: bytes) -> None:
        """Raises `LoginFailed` if the broker does not know the keys of the password: it is another program."""
        try:
            self._client.set_server_final(self._text(answer))
        except (ScramException, ValueError, KeyError, IndexError):
            raise LoginFailed(
                "The broker could not prove that it knows this user: it may be another program."
            ) from None

    def _text(self, answer: bytes) -> str:
        try:
            return answer.decode()
        except UnicodeDecodeError:
            raise LoginFailed("The broker's answer to the login is none of SCRAM-SHA-256.") from None
