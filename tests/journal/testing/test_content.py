"""A simulated file: what readers see, what is on the platter, and every version between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from journal.testing.memory_disk import SECTOR_BYTES, FileContent

STEP = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 3000), st.binary(min_size=1, max_size=1500)),
    st.tuples(st.just("truncate"), st.integers(0, 3000), st.just(b"")),
    st.tuples(st.just("force"), st.just(0), st.just(b"")),
    st.tuples(st.just("lose"), st.just(0), st.just(b"")),
)


def live(steps: list[tuple[str, int, bytes]], *, with_losses: bool) -> tuple[FileContent, bytearray]:
    """A file after some steps, and what a plain array of bytes is after them."""
    content, model = FileContent(), bytearray()
    for number, (kind, position, data) in enumerate(steps, 1):
        if kind == "write":
            content.write(number, data, position)
            model.extend(bytes(max(0, position - len(model))))
            model[position : position + len(data)] = data
        elif kind == "truncate":
            content.truncate(number, position)
            model = model[:position].ljust(position, b"\0")
        elif kind == "force":
            content.fsync()
        elif with_losses:
            content.fail_fsync()
    return content, model


@given(st.lists(STEP, max_size=12))
def test_readers_see_every_write_at_once(steps: list[tuple[str, int, bytes]]) -> None:
    content, model = live(steps, with_losses=True)
    assert content.data == model


@given(st.lists(STEP, max_size=12))
def test_a_force_puts_on_the_platter_what_readers_see(steps: list[tuple[str, int, bytes]]) -> None:
    content, model = live(steps, with_losses=False)
    content.fsync()
    assert content.durable == model
    assert not content.pending


@given(st.lists(STEP, max_size=12))
def test_the_last_version_of_everything_is_what_readers_see(steps: list[tuple[str, int, bytes]]) -> None:
    content, model = live(steps, with_losses=False)
    image = content.image()
    assert image.sizes[-1][1] == len(model)
    assert image.sizes[0] == (0, len(content.durable))
    for sector, versions in image.versions.items():
        first = sector * SECTOR_BYTES
        assert versions[-1].data == bytes(model[first : first + SECTOR_BYTES]).ljust(SECTOR_BYTES, b"\0")
        forced = bytes(content.durable[first : first + SECTOR_BYTES])
        assert versions[0].data == forced.ljust(SECTOR_BYTES, b"\0")


def test_a_failed_force_loses_and_the_next_one_does_not_bring_back() -> None:
    content = FileContent()
    content.write(1, b"a" * 512, 0)
    content.fsync()
    content.write(2, b"b" * 1024, 512)
    content.fail_fsync()
    content.write(3, b"c" * 512, 1536)
    content.fsync()
    assert content.data == b"a" * 512 + b"b" * 1024 + b"c" * 512
    assert content.durable == b"a" * 512 + bytes(1024) + b"c" * 512


def test_a_lost_sector_that_is_written_again_is_on_the_platter_after_the_next_force() -> None:
    content = FileContent()
    content.write(1, b"b" * 1024, 0)
    content.fail_fsync()
    content.write(2, b"c", 600)
    content.fsync()
    assert content.durable == bytes(512) + b"b" * 88 + b"c" + b"b" * 423


def test_an_image_stays_as_it_was() -> None:
    content = FileContent(b"x" * 10)
    content.write(1, b"y", 3)
    image = content.image()
    content.write(2, b"z", 4)
    content.fsync()
    assert image.durable == b"x" * 10
    assert [change.number for change in image.pending] == [1]


def test_rot_changes_both_and_is_not_a_write() -> None:
    content = FileContent(b"x" * 10)
    content.damage(2, b"?")
    assert content.data == content.durable == b"xx?xxxxxxx"
    assert not content.pending
