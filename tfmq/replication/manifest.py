"""Manifests: the folder after an entry, as a list of its folders and files, whose bytes are in chunks.

A chunk is a part of a file, stored as an object of its own and named by the hash of its bytes. A manifest and the
chunks that it refers to are a snapshot. docs/formats/manifest.md describes the bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

from journal.crc32 import crc32
from tfmq.replication.entries import CHUNKS, Position, manifest_key
from tfmq.replication.errors import InvalidObject, NewerObject, ReplicationError
from tfmq.replication.operations import decode_path

FORMAT: Final = 1
MAGIC: Final = b"TFMM"
HEADER: Final = Struct(">4sBQQQII")
"""Magic, format, term, slot, time (ms since 1970), number of folders, number of files. Folders and files follow."""
FOLDER: Final = Struct(">H")
"""Size of the path in bytes. The path follows."""
FILE: Final = Struct(">HQI")
"""Size of the path, size of the file, number of chunks. The path follows, then the content or the chunks."""
CHUNK: Final = Struct(">I32s4s")
"""Size, hash, nonce."""
CRC: Final = Struct(">I")

MANIFEST_BYTES_MAX: Final = 64 << 20
"""No manifest is larger: one of a folder with 25 TB, or with 500,000 small files, fits."""
CHUNK_BYTES: Final = 16 << 20
"""Size of the chunks of a file. What is left at its end is stored in pieces of PIECE_BYTES and a smaller last one."""
PIECE_BYTES: Final = 1 << 20
INLINE_BYTES_MAX: Final = 1024
"""The content of files up to this size is in the manifest, because an object costs more than its bytes."""

Data: TypeAlias = bytes | bytearray | memoryview


class Chunk(NamedTuple):
    """A part of a file. Chunks of the same content may have different nonces: each is stored once, by one snapshot."""

    size: int
    digest: bytes
    nonce: bytes

    @property
    def key(self) -> str:
        return f"{CHUNKS}{self.digest.hex()}-{self.nonce.hex()}"

    def check(self, data: Data) -> None:
        """Raise InvalidObject unless `data` is the content of this chunk."""
        if len(data) != self.size:
            raise InvalidObject(f"{self.key} has {len(data):,} bytes instead of {self.size:,}")
        if hash_chunk(data) != self.digest:
            raise InvalidObject(f"{self.key} does not have the content that its name says")


def parse_chunk_name(key: str) -> tuple[bytes, bytes] | None:
    """Return hash and nonce in the key of a chunk; None for other keys."""
    match = _CHUNK_KEY.fullmatch(key)
    return None if match is None else (bytes.fromhex(match[1]), bytes.fromhex(match[2]))


_CHUNK_KEY: Final = re.compile(rf"{CHUNKS}([0-9a-f]{{64}})-([0-9a-f]{{8}})")


class ManifestFile(NamedTuple):
    """A file. `content`: its bytes, of a file of at most INLINE_BYTES_MAX; such a file has no chunks."""

    path: str
    size: int
    content: bytes
    chunks: tuple[Chunk, ...]

    def parts(self) -> Iterator[tuple[int, Chunk]]:
        """Yield each chunk with its position in the file."""
        position = 0
        for chunk in self.chunks:
            yield position, chunk
            position += chunk.size


class Content(NamedTuple):
    """The replicated folders and files of a data folder, sorted by path."""

    folders: tuple[str, ...]
    files: tuple[ManifestFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


class Manifest(NamedTuple):
    """The folder after the entry at `position`. `time_ms`: the time of that entry."""

    position: Position
    time_ms: int
    content: Content

    @property
    def key(self) -> str:
        return manifest_key(self.position)

    def chunks(self) -> Iterator[Chunk]:
        for file in self.content.files:
            yield from file.chunks


def hash_chunk(data: Data) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def is_inline(size: int) -> bool:
    """Return whether the content of a file of `size` bytes is in the manifest."""
    return size <= INLINE_BYTES_MAX


def split_file(size: int) -> Iterator[tuple[int, int]]:
    """Yield position and size of each chunk of a file of `size` bytes."""
    position = 0
    for limit in (CHUNK_BYTES, PIECE_BYTES):
        while size - position >= limit:
            yield position, limit
            position += limit
    if position < size:
        yield position, size - position


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest. Raises ReplicationError if it is too large."""
    folders, files = manifest.content
    parts = [HEADER.pack(MAGIC, FORMAT, *manifest.position, manifest.time_ms, len(folders), len(files))]
    for folder in folders:
        path = folder.encode()
        parts += (FOLDER.pack(len(path)), path)
    for file in files:
        path = file.path.encode()
        parts += (FILE.pack(len(path), file.size, len(file.chunks)), path, file.content)
        parts += (CHUNK.pack(*chunk) for chunk in file.chunks)
    data = b"".join(parts)
    if len(data) + CRC.size > MANIFEST_BYTES_MAX:
        raise ReplicationError(f"{manifest.key} would have {len(data):,} bytes, more than {MANIFEST_BYTES_MAX:,}")
    return data + CRC.pack(crc32(data))


def decode_manifest(data: bytes, position: Position) -> Manifest:
    """Decode what is stored as the manifest at `position`. Raises InvalidObject, NewerObject."""
    key, end = manifest_key(position), len(data) - CRC.size
    if end < HEADER.size or data[:4] != MAGIC:
        raise InvalidObject(f"{key} is no manifest")
    _, version, term, slot, time_ms, folder_count, file_count = HEADER.unpack_from(data)
    if version > FORMAT:
        raise NewerObject(f"{key} has format {version}, this version knows up to {FORMAT}")
    if len(data) > MANIFEST_BYTES_MAX:
        raise InvalidObject(f"{key} has more than {MANIFEST_BYTES_MAX:,} bytes")
    if crc32(memoryview(data)[:end]) != CRC.unpack_from(data, end)[0]:
        raise InvalidObject(f"{key} fails its checksum")
    if Position(term, slot) != position:
        raise InvalidObject(f"{key} is the manifest at {term}-{slot}")
    reader = _Reader(data, HEADER.size, end)
    try:
        folders = tuple(reader.read_path(FOLDER.size) for _ in reader.count(folder_count, FOLDER.size))
        files = tuple(_read_file(reader) for _ in reader.count(file_count, FILE.size))
        if reader.position != end:
            raise InvalidObject("there are bytes after its last file")
        _check_tree(folders, [file.path for file in files])
    except InvalidObject as error:
        raise InvalidObject(f"{key} is invalid: {error}") from None
    return Manifest(position, time_ms, Content(folders, files))


class _Reader:
    """Reads fields of a manifest, never beyond its end."""

    def __init__(self, data: bytes, position: int, end: int) -> None:
        self.data, self.position, self._end = data, position, end

    def count(self, number: int, size: int) -> range:
        """Return a range of `number`, which must have at least `size` bytes each."""
        if number * size > self._end - self.position:
            raise InvalidObject("it announces more than it has")
        return range(number)

    def take(self, size: int) -> bytes:
        first = self.position
        if size > self._end - first:
            raise InvalidObject("it ends in the middle of a file")
        self.position += size
        return self.data[first : first + size]

    def read_path(self, head_size: int) -> str:
        (size,) = FOLDER.unpack_from(self.take(head_size))
        return decode_path(self.take(size))


def _read_file(reader: _Reader) -> ManifestFile:
    path_size, size, count = FILE.unpack(reader.take(FILE.size))
    path = decode_path(reader.take(path_size))
    if is_inline(size):
        if count:
            raise InvalidObject(f"the small file {path} has chunks")
        return ManifestFile(path, size, reader.take(size), ())
    chunks = tuple(Chunk(*CHUNK.unpack(reader.take(CHUNK.size))) for _ in reader.count(count, CHUNK.size))
    if any(not 0 < chunk.size <= CHUNK_BYTES for chunk in chunks) or sum(chunk.size for chunk in chunks) != size:
        raise InvalidObject(f"the sizes of the chunks of {path} do not add up to its size")
    return ManifestFile(path, size, b"", chunks)


def _check_tree(folders: Iterable[str], files: Iterable[str]) -> None:
    """Raise InvalidObject unless each path is there once, in order, in a folder that is there."""
    known = {""}
    for paths, are_folders in ((folders, True), (files, False)):
        last = ""
        for path in paths:
            if path <= last or path in known:
                raise InvalidObject(f"the path {path} is not in order, or there twice")
            if path.rpartition("/")[0] not in known:
                raise InvalidObject(f"the path {path} is in no folder")
            if are_folders:
                known.add(path)
            last = path
