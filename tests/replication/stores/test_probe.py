"""The probe at a start: stores that break their promises are refused, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.replication.stores.conftest import Place
from tfmq.replication.errors import StoreRefused
from tfmq.replication.store import Store, StoredObject
from tfmq.replication.stores.open_store import open_store, probe
from tfmq.testing.clock import VirtualClock
from tfmq.testing.memory_store import MemoryStore
from tools.rigs.proxy import proxied
from tools.rigs.s3 import OPEN_BUCKET, S3Server


def test_a_store_that_keeps_its_promises_passes_and_stays_as_it_was(place: Place) -> None:
    store = place.open()
    probe(store)
    assert store.put_new("replica", b"1")
    probe(store)
    assert [each.key for each in store.list("")] == ["replica"]


def test_what_earlier_probes_left_is_removed_after_an_hour() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock.time)
    store.put_new("probe/old", b"")
    clock.advance(minutes=30)
    store.put_new("probe/of-another-that-runs-now", b"")
    clock.advance(minutes=45)
    probe(store, "token")
    assert [each.key for each in store.list("")] == ["probe/of-another-that-runs-now"]


class Replacing(MemoryStore):
    """Ignores the condition of a put. `says`: what it answers."""

    says = True

    def put_new(self, key: str, data: bytes) -> bool:
        self.delete(key)
        return super().put_new(key, data) and self.says


class Lying(Replacing):
    """Replaces, and says that it did not."""

    def put_new(self, key: str, data: bytes) -> bool:
        return super().put_new(key, data) and data.startswith(b"first")


class Forgetful(MemoryStore):
    def get(self, key: str) -> bytes | None:
        return None


class Occupied(MemoryStore):
    def put_new(self, key: str, data: bytes) -> bool:
        return False


class Blind(MemoryStore):
    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        return iter(())


class Keeping(MemoryStore):
    def delete(self, *keys: str) -> None:
        """Keeps them."""


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Replacing, r"The store memory:// replaces objects .* use a store with conditional puts\."),
        (Lying, r"The store memory:// replaces objects .* use a store with conditional puts\."),
        (Forgetful, r"The store memory:// does not return what was stored"),
        (Occupied, r"says that it has the object probe/t, which nobody has stored"),
        (Blind, r"does not list what was stored"),
        (Keeping, r"has an object that was deleted"),
    ],
)
def test_a_store_that_breaks_a_promise_is_refused(kind: type[MemoryStore], sentence: str) -> None:
    store: Store = kind(VirtualClock().time)
    with pytest.raises(StoreRefused, match=sentence):
        probe(store, "t")


def test_an_s3_server_that_never_sees_the_condition_is_refused(s3: S3Server, credentials: None) -> None:
    """As behind a gateway that drops headers which it does not know."""
    with proxied(s3.endpoint.removeprefix("http://")) as proxy:
        url = f"s3://{OPEN_BUCKET}/lying?endpoint=http://{proxy.address}&skip_signature=true"
        probe(open_store(url))
        proxy.cut_when_short = False
        proxy.up = lambda data: data.replace(b"if-none-match: *\r\n", b"")
        with pytest.raises(StoreRefused, match=r"replaces objects that it was asked to keep"):
            probe(open_store(url))
