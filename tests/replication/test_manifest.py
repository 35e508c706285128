"""The format of manifests: what is encoded is decoded, and nothing else is accepted."""

import contextlib
import random
import re
from struct import Struct

import pytest

from journal.crc32 import crc32
from tests import paths
from tests.scale import seeded
from tfmq.replication import manifest as module
from tfmq.replication.entries import Position
from tfmq.replication.errors import InvalidObject, NewerObject, ReplicationError
from tfmq.replication.manifest import (
    CHUNK_BYTES,
    PIECE_BYTES,
    Chunk,
    Content,
    Manifest,
    ManifestFile,
    decode_manifest,
    encode_manifest,
    hash_chunk,
    parse_chunk_name,
    split_file,
)

AT = Position(3, 41)
LARGE = ManifestFile(
    "orders-0/00000000000000000000000000000000.zxQueue",
    2100,
    b"",
    (Chunk(2000, bytes(range(32)), b"abcd"), Chunk(100, bytes(32), b"efgh")),
)
SMALL = ManifestFile("meta/version", 4, b"here", ())
EMPTY = ManifestFile("meta/empty", 0, b"", ())
WHOLE = Manifest(AT, 1_700_000_000_000, Content(("meta", "orders-0"), (EMPTY, SMALL, LARGE)))


def test_what_is_encoded_is_decoded() -> None:
    assert decode_manifest(encode_manifest(WHOLE), AT) == WHOLE
    nothing = Manifest(Position(1, 0), 0, Content((), ()))
    assert decode_manifest(encode_manifest(nothing), Position(1, 0)) == nothing


def test_each_changed_bit_and_each_cut_is_noticed() -> None:
    data = encode_manifest(WHOLE)
    for size in range(len(data)):
        with pytest.raises(InvalidObject):
            decode_manifest(data[:size], AT)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        with pytest.raises(InvalidObject):
            decode_manifest(bytes(changed), AT)


def test_a_newer_format_is_no_damage() -> None:
    data = bytearray(encode_manifest(WHOLE))
    data[4] = 2
    with pytest.raises(NewerObject, match="has format 2, this version knows up to 1"):
        decode_manifest(bytes(data), AT)


def test_a_manifest_under_another_name_is_refused() -> None:
    with pytest.raises(InvalidObject, match=r"manifests/0+3-0+42 is the manifest at 3-41"):
        decode_manifest(encode_manifest(WHOLE), Position(3, 42))


def replaced(**changes: object) -> Manifest:
    return Manifest(AT, 0, WHOLE.content._replace(**changes))


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        (replaced(files=(LARGE._replace(size=2101),)), "do not add up to its size"),
        (replaced(files=(LARGE._replace(chunks=()),)), "do not add up to its size"),
        (replaced(files=(LARGE._replace(size=2**60, chunks=(Chunk(2**31, b"", b""),)),)), "do not add up to its size"),
        (replaced(files=(SMALL._replace(chunks=LARGE.chunks),)), "the small file meta/version has chunks"),
        (replaced(files=(SMALL, EMPTY)), "not in order"),
        (replaced(files=(SMALL, SMALL)), "not in order, or there twice"),
        (replaced(folders=("orders-0", "meta")), "not in order"),
        (replaced(folders=("meta",)), "orders-0/0+.zxQueue is in no folder"),
        (replaced(folders=("a/b", "meta", "orders-0")), "the path a/b is in no folder"),
        (replaced(files=(SMALL._replace(path="meta"),)), "there twice"),
        (replaced(files=(SMALL._replace(path="../passwd"),)), "does not name a file in the data folder"),
        (replaced(files=(SMALL._replace(path="/etc/passwd"),)), "does not name a file in the data folder"),
        (replaced(files=(SMALL._replace(path="replica/state"),)), "is one that is not replicated"),
        (replaced(folders=("lock", "meta", "orders-0")), "is one that is not replicated"),
    ],
)
def test_a_forged_manifest_is_refused(forged: Manifest, why: str) -> None:
    with pytest.raises(InvalidObject, match=why):
        decode_manifest(encode_manifest(forged), AT)


def test_counts_are_compared_with_the_bytes_before_memory_is_allocated() -> None:
    for position in (30, 34):  # the number of folders, the number of files
        data = bytearray(encode_manifest(Manifest(AT, 0, Content((), ())))[:-4])
        data[position - 1 : position + 3] = b"\xff\xff\xff\xff"
        with pytest.raises(InvalidObject, match="it announces more than it has"):
            decode_manifest(bytes(data) + Struct(">I").pack(crc32(data)), AT)


def test_random_changes_with_a_right_checksum_raise_nothing_else() -> None:
    generator, sound = seeded("manifest"), encode_manifest(WHOLE)[:-4]
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(generator.randrange(1, 4)):
            data[generator.randrange(29, len(data))] = generator.randrange(256)
        with contextlib.suppress(InvalidObject):
            decode_manifest(bytes(data) + Struct(">I").pack(crc32(data)), AT)


def test_a_manifest_that_no_reader_would_accept_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_manifest(WHOLE)
    monkeypatch.setattr(module, "MANIFEST_BYTES_MAX", len(data) - 1)
    with pytest.raises(ReplicationError, match="more than"):
        encode_manifest(WHOLE)
    with pytest.raises(InvalidObject, match="more than"):
        decode_manifest(data, AT)


def test_a_file_is_split_into_chunks_and_smaller_pieces_at_its_end() -> None:
    sizes = [size for _, size in split_file(2 * CHUNK_BYTES + 3 * PIECE_BYTES + 5)]
    assert sizes == [CHUNK_BYTES] * 2 + [PIECE_BYTES] * 3 + [5]
    generator = random.Random(1)
    for size in (0, 1, PIECE_BYTES, CHUNK_BYTES - 1, CHUNK_BYTES, *(generator.randrange(1 << 40) for _ in range(3))):
        end = 0
        for position, length in split_file(size):
            assert position == end
            end += length
        assert end == size


def test_a_chunk_is_checked_against_its_name() -> None:
    chunk = Chunk(5, hash_chunk(b"right"), b"\0\1\2\3")
    chunk.check(b"right")
    with pytest.raises(InvalidObject, match="does not have the content"):
        chunk.check(b"wrong")
    with pytest.raises(InvalidObject, match="has 4 bytes instead of 5"):
        chunk.check(b"righ")
    assert parse_chunk_name(chunk.key) == (chunk.digest, chunk.nonce)
    assert chunk.key.endswith("-00010203")
    assert parse_chunk_name(chunk.key + "0") is None


def test_the_example_of_the_page_is_what_is_stored() -> None:
    content = Content(
        ("a",),
        (
            ManifestFile("a/b", 2, b"hi", ()),
            ManifestFile("a/c", 1025, b"", (Chunk(1025, hash_chunk(b"x" * 1025), b"\1\2\3\4"),)),
        ),
    )
    page = (paths.TESTS.parent / "docs" / "formats" / "manifest.md").read_text()
    (example,) = re.findall(r"```hex\n(.*?)```", page, re.DOTALL)
    assert encode_manifest(Manifest(Position(2, 5), 1_700_000_000_000, content)) == bytes.fromhex(example)
