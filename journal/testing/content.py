"""What a simulated file holds: the bytes that readers see, the bytes on the platter, and the way between.

A disk writes whole sectors of 512 bytes, each of them when it likes, as the page cache held it at that
moment. So what a power cut leaves of a sector is one of its *versions*: as it was forced last, or as it stood
after any later write. The size is one of those that the file had since. Nothing is assumed about order.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

SECTOR_BYTES = 512
PAGE_BYTES = 4096
"""A growing write moves the file's size page by page, so a cut may leave any of those sizes."""

Data: TypeAlias = bytes | bytearray


class Change(NamedTuple):
    """One unforced call on a file: `data` written at `position`, or (None) the file set to that size."""

    number: int
    position: int
    data: bytes | None


class Version(NamedTuple):
    """A sector's 512 bytes as they stood after change `number` (0: as forced last)."""

    number: int
    data: bytes


class Content:
    """The bytes of one file.

    `data` is what readers see. `durable` is what is on the platter. `pending` are the changes since the last
    force. `lost` are the sectors whose force failed: readers see one thing, the platter holds another, and
    the system calls them clean.
    """

    __slots__ = ("_image", "data", "durable", "errors", "lost", "pending", "reported")

    def __init__(self, durable: bytes = b"") -> None:
        self.data: Data = durable
        self.durable: Data = durable
        self.pending: list[Change] = []
        self.lost: set[int] = set()
        self.errors = 0
        """Forces that lost bytes."""
        self.reported = 0
        """Of those, how many somebody was told of: who opens the file later hears only of the others."""
        self._image: ContentImage | None = None

    def write(self, number: int, data: bytes, position: int) -> None:
        """Readers see `data` at `position` from now on; between the old end and `position` are zeros."""
        content = self._own()
        if position > len(content):
            content.extend(bytes(position - len(content)))
        content[position : position + len(data)] = data
        self.pending.append(Change(number, position, data))
        self._image = None

    def truncate(self, number: int, size: int) -> None:
        """Readers see `size` bytes from now on: cut, or grown with zeros."""
        _resize(self._own(), size)
        self.pending.append(Change(number, size, None))
        self._image = None

    def force(self) -> None:
        """Everything pending reaches the platter. Sectors lost before do only if they were written again."""
        if not self.pending:
            return
        self._image = None
        if not self.lost:
            self.durable = self.data = bytes(self.data)
            self.pending = []
            return
        touched = _touched(len(self.durable), self.pending)
        old = self.durable
        self.durable = bytearray(self.data)
        for sector in self.lost - touched:
            first = sector * SECTOR_BYTES
            kept = bytes(old[first : first + SECTOR_BYTES]).ljust(SECTOR_BYTES, b"\0")
            room = max(0, min(SECTOR_BYTES, len(self.durable) - first))
            self.durable[first : first + room] = kept[:room]
        self.lost -= touched
        self.pending = []

    def lose(self) -> None:
        """A force fails: nothing pending reaches the platter, and the system calls it clean all the same."""
        self.lost |= _touched(len(self.durable), self.pending)
        self.pending = []
        self.errors += 1
        self._image = None

    def image(self) -> ContentImage:
        """This moment, kept: it does not change when the file goes on."""
        if self._image is None:
            self.durable = bytes(self.durable)
            seen = bytes(self.data) if self.lost and self.pending else b""
            self._image = ContentImage(self.durable, tuple(self.pending), frozenset(self.lost), seen)
        return self._image

    def damage(self, position: int, data: bytes) -> None:
        """Rot: the bytes change on the platter and for readers, and nobody is told."""
        for name in ("data", "durable"):
            content = bytearray(getattr(self, name))
            content[position : position + len(data)] = data
            setattr(self, name, content)
        self._image = None

    def _own(self) -> bytearray:
        if not isinstance(self.data, bytearray):
            self.data = bytearray(self.data)
        return self.data


class ContentImage:
    """A file at one moment, and what a power cut then could leave of it."""

    def __init__(
        self,
        durable: bytes,
        pending: tuple[Change, ...],
        lost: frozenset[int] = frozenset(),
        seen: bytes = b"",
    ) -> None:
        self.durable = durable
        self.pending = pending
        self._lost = lost
        self._seen = seen
        self._versions: dict[int, list[Version]] | None = None
        self._sizes: list[tuple[int, int]] = []
        self.contents: dict[tuple[int, ...], tuple[bytes, bytes]] = {}
        """Contents built before, by their choices, with their digests: the enumerator's memory."""

    @property
    def versions(self) -> dict[int, list[Version]]:
        """The versions of every sector that has more than one, in the order in which they came to be."""
        if self._versions is None:
            self._versions, self._sizes = self._replay()
        return self._versions

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(change number, size in bytes) of every size that a cut may leave, the forced one first."""
        if self._versions is None:
            self._versions, self._sizes = self._replay()
        return self._sizes

    def _replay(self) -> tuple[dict[int, list[Version]], list[tuple[int, int]]]:
        cache = bytearray(self.durable)
        if self._lost and self.pending:
            self._show_lost(cache)
        versions: dict[int, list[Version]] = {}
        sizes = [(0, len(self.durable))]
        for change in self.pending:
            before = len(cache)
            if change.data is None:
                _resize(cache, change.position)
            else:
                if change.position > before:
                    cache.extend(bytes(change.position - before))
                cache[change.position : change.position + len(change.data)] = change.data
            for sector in _sectors(before, change):
                self._add_version(versions, sector, change.number, cache)
            sizes.extend((change.number, size) for size in _pages_between(before, len(cache)))
            sizes.append((change.number, len(cache)))
        return {sector: list_ for sector, list_ in versions.items() if len(list_) > 1}, _distinct(sizes)

    def _show_lost(self, cache: bytearray) -> None:
        """Sectors that a failed force lost stand in the cache as they were written, under what came later."""
        for sector in self._lost:
            first = sector * SECTOR_BYTES
            shown = self._seen[first : first + SECTOR_BYTES]
            if first + len(shown) > len(cache):
                cache.extend(bytes(first + len(shown) - len(cache)))
            cache[first : first + len(shown)] = shown

    def _add_version(
        self, versions: dict[int, list[Version]], sector: int, number: int, cache: bytearray
    ) -> None:
        first = sector * SECTOR_BYTES
        known = versions.get(sector)
        if known is None:
            forced = self.durable[first : first + SECTOR_BYTES].ljust(SECTOR_BYTES, b"\0")
            known = versions[sector] = [Version(0, forced)]
        now = bytes(cache[first : first + SECTOR_BYTES]).ljust(SECTOR_BYTES, b"\0")
        if known[-1].data != now:
            known.append(Version(number, now))


def _pages_between(before: int, after: int) -> range:
    """The page boundaries that a file passes as it grows."""
    return range((before // PAGE_BYTES + 1) * PAGE_BYTES, after, PAGE_BYTES)


def _distinct(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    kept = [sizes[0]]
    for number, size in sizes[1:]:
        if size != kept[-1][1]:
            kept.append((number, size))
    return kept


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _sectors(size_before: int, change: Change) -> range:
    """The sectors whose bytes a change may alter."""
    if change.data is None:
        return range(change.position // SECTOR_BYTES, -(-size_before // SECTOR_BYTES))
    return range(change.position // SECTOR_BYTES, -(-(change.position + len(change.data)) // SECTOR_BYTES))


def _touched(size: int, changes: list[Change]) -> set[int]:
    touched: set[int] = set()
    for change in changes:
        touched.update(_sectors(size, change))
        size = change.position if change.data is None else max(size, change.position + len(change.data))
    return touched
