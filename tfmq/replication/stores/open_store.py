"""Opens the store that a URL names, and tries whether a store keeps the promises that the replication relies on."""

from __future__ import annotations

import os.path
import secrets
from typing import Final
from urllib.parse import unquote, urlsplit

from tfmq.databases import url_without_passwords
from tfmq.replication.errors import StoreRefused
from tfmq.replication.store import URL_FORMS, Store
from tfmq.replication.stores.file_store import FileStore

OBJECT_STORES: Final = ("s3", "gs", "az")
PROBES: Final = "probe/"
"""Prefix of the objects of `probe`, which removes them."""
LEFTOVER_SECONDS: Final = 3600.0
"""Age at which the object of an earlier probe, which did not come to its end, is removed."""


def open_store(url: str, *, must_exist: bool = False) -> Store:
    """Return the store that `url` names. Its libraries are imported here. Sends nothing to a server.

    `must_exist`: for programs that read, whose URL may be misspelled: a database without the table of objects is
    refused, and neither it nor a file is created.

    Raises StoreRefused for an invalid URL, a missing library, and a folder that does not exist. No text of an error
    has a password.
    """
    scheme, found, _ = url.partition("://")
    if not found or not scheme:
        raise StoreRefused(f"{url_without_passwords(url)!r} is no URL of a store: write {URL_FORMS}.")
    if scheme == "file":
        return FileStore(_folder(url))
    if scheme in OBJECT_STORES:
        try:
            from tfmq.replication.stores.object_store import ObjectStore
        except ImportError as error:
            raise StoreRefused(
                f'Stores of the kind {scheme}:// need obstore ({error}): pip install "tfmq[replication]".'
            ) from error
        return ObjectStore(url)
    from tfmq.replication.stores.sql_store import SqlStore

    return SqlStore(url, must_exist=must_exist)


def _folder(url: str) -> str:
    """Return the path in a file URL. Raises StoreRefused."""
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise StoreRefused(f"{url!r} has options, which a folder has not: in its name write %3F for ? and %23 for #.")
    if parts.netloc not in ("", "localhost") or not parts.path or "\0" in parts.path:
        raise StoreRefused(f"{url!r} is no URL of a folder: write file:///FOLDER, with three slashes.")
    folder = unquote(parts.path)
    if not os.path.normpath(folder).strip("/"):  # the name of the folder may be an empty variable of a script
        raise StoreRefused(f"{url!r} names the root of the file system: write file:///FOLDER.")
    return folder


def probe(store: Store, token: str | None = None) -> None:
    """Try whether the store has what the replication needs. Leaves nothing in it. `token`: a new name, else random.

    A store that replaces an object although it was asked not to would let two servers be primary at the same time.
    Raises StoreRefused for such a store, and as its calls do. It cannot tell what a store does under load.
    """
    key = f"{PROBES}{token or secrets.token_hex(8)}"
    first, second = b"first " + key.encode(), b"second " + key.encode()
    if not store.put_new(key, first):
        raise StoreRefused(
            f"The store {store.name} says that it has the object {key}, which nobody has stored: it is not usable."
        )
    if store.put_new(key, second) or store.get(key) == second:
        raise StoreRefused(
            f"The store {store.name} replaces objects that it was asked to keep (it ignores the condition of a put), so"
            " two servers could both be primary: use a store with conditional puts."
        )
    if store.get(key) != first:
        raise StoreRefused(f"The store {store.name} does not return what was stored: it is not usable.")
    known = {each.key: each for each in store.list(PROBES)}
    own = known.pop(key, None)
    if own is None or own.size_bytes != len(first):
        raise StoreRefused(f"The store {store.name} does not list what was stored: it is not usable.")
    for each in (own, *(other for other in known.values() if other.modified < own.modified - LEFTOVER_SECONDS)):
        store.delete(each.key)
    if store.get(key) is not None:
        raise StoreRefused(f"The store {store.name} has an object that was deleted: it is not usable.")
