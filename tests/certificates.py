"""Certificates for the tests of TLS: an authority, and what it signs, as PEM files in a folder."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import trustme

DAY = timedelta(days=1)


class Pair(NamedTuple):
    """The paths of a certificate and its private key."""

    certificate: str
    key: str

    @property
    def settings(self) -> tuple[str, ...]:
        """Options for a server with this certificate."""
        return "--set", f"server.tls_certificate={self.certificate}", "--set", f"server.tls_key={self.key}"


class Authority:
    """An authority that signs certificates. `ca`: the path of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._issuer = trustme.CA()
        self._count = 0
        self.ca = str(folder / "ca.pem")
        self._issuer.cert_pem.write_to_path(self.ca)

    def issue(self, *names: str, days: int = 30) -> Pair:
        """Issue a certificate for these names that ends in `days`; it has expired if they are negative."""
        self._count += 1
        now = datetime.now(UTC)
        issued = self._issuer.issue_cert(*names, not_before=now - 90 * DAY, not_after=now + days * DAY)
        pair = Pair(str(self._folder / f"{self._count}.pem"), str(self._folder / f"{self._count}.key"))
        Path(pair.certificate).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(pair.key)
        return pair
