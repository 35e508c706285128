import pytest

from tfmq.replication import manifest


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4,096 and 512 bytes; files of at most 64 bytes are in the manifest."""
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(manifest, "PIECE_BYTES", 512)
    monkeypatch.setattr(manifest, "INLINE_BYTES_MAX", 64)
