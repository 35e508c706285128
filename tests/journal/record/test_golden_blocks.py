"""The record format against its golden files: what was written once is always read, and written the same.

The files in tests/golden were made by `make_golden` once and are not made again: a test that fails here means that
the format has changed, and logs on people's disks have not.
"""

from zlib import crc32

import crcmod.predefined

from journal.record.block import ProducerRun, blocks_of, producer_runs
from journal.record.block_trailer import SOURCE_SUCCESSION, SOURCE_TRANSACTION, BlockTrailer, encode_trailer
from journal.record.format import FLAG_TOMBSTONE, make_filler, make_id, make_log_id, make_record, tag_flag
from tests import paths

GOLDEN = paths.TESTS / "golden"
LOG_ID = make_log_id(3, 1)


def golden_block() -> bytes:
    """Every kind of record there is, and block trailers of three kinds."""
    group = b"".join(
        [
            make_record(b"hello", make_id(5, 0)),
            make_record(b"tagged", make_id(5, 1), tag_flag("orders"), attribute=bytes([0x81, 0x01, 0x2A])),
            make_record(b"", make_id(5, 2), FLAG_TOMBSTONE),
            make_filler(LOG_ID, 30, 2),
        ]
    )
    first = BlockTrailer(5, len(group), crc32(group), 1_700_000_000_000, 1, 0, 10, 4096, more_follows=True)
    second_group = make_record(b"applied", make_id(6, 0xFFFFFF))
    second = BlockTrailer(
        1, len(second_group), crc32(second_group), 1_700_000_000_000, 1, 0, 15, first.next,
        source_kind=SOURCE_TRANSACTION, source_id=8, source_high=70, source_low=2,
    )  # fmt: skip
    third = BlockTrailer(
        0, 0, 0, 1_700_000_000_001, 1, 4096, 16, second.next,
        source_kind=SOURCE_SUCCESSION, source_id=5, source_high=9, source_low=3,
    )  # fmt: skip
    parts = [group, encode_trailer(LOG_ID, first), second_group, encode_trailer(LOG_ID, second)]
    return b"".join([*parts, encode_trailer(LOG_ID, third)])


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / name).read_text())


def test_the_golden_blocks_are_written_as_ever() -> None:
    assert golden_block() == golden("record.hex")


def test_the_golden_blocks_are_read_as_ever() -> None:
    blocks = list(blocks_of(golden("record.hex"), 4096, LOG_ID))
    assert [block.control.records for block in blocks] == [5, 1, 0]
    assert [block.control.more_follows for block in blocks] == [True, False, False]
    assert [block.control.source_kind for block in blocks] == [0, 1, 4]
    assert [producer_runs(block) for block in blocks] == [
        [ProducerRun(5, 0, 3, 4096)],
        [ProducerRun(6, 0xFFFFFF, 1, blocks[1].offset)],
        [],
    ]


def test_the_checksums_in_the_golden_file_are_crcmods() -> None:
    crc = crcmod.predefined.mkPredefinedCrcFun("crc-32")
    for block in blocks_of(golden("record.hex"), 4096, LOG_ID):
        assert crc(bytes(block.data)) == block.control.crc
