"""Planted bugs: records decoded into Arrow columns, and columns encoded as records."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

ATTRIBUTES: Final = "tests/arrow/test_attributes.py"
CHAIN: Final = "tests/arrow/test_decoder.py"
CHECKSUMS: Final = "tests/arrow/test_partitioner.py"
CONTROLS: Final = "tests/arrow/test_decoder.py"
DAMAGE: Final = "tests/arrow/test_decoder.py"
DECODER: Final = "tests/arrow/test_decoder.py"
ENCODER: Final = "tests/arrow/test_encoder.py"
FIELDS: Final = "tests/arrow/test_attributes.py"
LAYOUT: Final = "tests/arrow/test_attributes.py"
LOGS: Final = "tests/arrow/test_random_logs.py"
PARTITIONS: Final = "tests/arrow/test_partitioner.py"
PARTS: Final = "tests/arrow/test_encoder.py"

SAME: Final = "columns contain what the messages contain"
FOUND: Final = "a flipped bit is always found and reported"
SENT: Final = "rows are sent unchanged"

ARROW: Final = (
    Mutant(
        "short-block-trailer-read-beyond-its-end",
        FOUND,
        "tfmq/arrow/decoder.py",
        ("        if positions[-1] + TRAILER_SIZE > len(data):\n            return None\n"),
        "",
        [f"{DECODER}::test_a_last_block_trailer_that_is_too_short_is_damage"],
    ),
    Mutant(
        "row-of-records-one-too-long",
        SAME,
        "tfmq/arrow/decoder.py",
        "    return most if same[first] else first\n",
        "    return most if same[first] else first + 1\n",
        [CHAIN],
    ),
    Mutant(
        "bytes-after-the-last-record-forgotten",
        FOUND,
        "tfmq/arrow/decoder.py",
        "    if position != end:\n        raise BrokenChain\n",
        "",
        [CHAIN, LOGS],
    ),
    Mutant(
        "checksum-of-the-block-not-looked-at",
        FOUND,
        "tfmq/arrow/decoder.py",
        '        if self.verify != "none" and not controls.checksums_match():\n',
        '        if self.verify == "message" and not controls.checksums_match():\n',
        [LOGS, DAMAGE],
    ),
    Mutant(
        "checksum-of-the-record-not-looked-at",
        "with verify=message every record is verified by its own checksum",
        "tfmq/arrow/decoder.py",
        (
            '        if self.verify == "message" and not _checksums_match(\n'
            '            data, rows.positions + HEADER_SIZE, rows.ends, read_numbers(data, rows.positions + 4, "u4")\n'
            "        ):\n"
            "            return None\n"
        ),
        "",
        [DAMAGE],
    ),
    Mutant(
        "last-row-of-a-range-too-many",
        "a range contains the rows that begin in it",
        "tfmq/arrow/decoder.py",
        "int(np.searchsorted(rows.positions, end))",
        'int(np.searchsorted(rows.positions, end, "right"))',
        [DECODER, LOGS],
    ),
    Mutant(
        "tombstones-become-empty",
        SAME,
        "tfmq/arrow/decoder.py",
        "            valid = rows.flags & FLAG_TOMBSTONE == 0\n",
        "            valid = rows.flags & FLAG_TOMBSTONE >= 0\n",
        [DECODER, LOGS],
    ),
    Mutant(
        "fillers-count-as-one",
        "a filler counts as the number of messages that it states",
        "tfmq/arrow/decoder.py",
        '    counts[fillers] = read_numbers(data, positions[fillers] + 4, "u4")\n',
        "",
        [LOGS],
    ),
    Mutant(
        "record-without-id-taken",
        FOUND,
        "tfmq/arrow/decoder.py",
        '    if not read_numbers(data, positions + 8, "u8").all():\n',
        '    if not read_numbers(data, positions + 8, "u8").any():\n',
        [DAMAGE, LOGS],
        scale=0.2,
    ),
    Mutant(
        "times-of-the-first-block-for-all",
        SAME,
        "tfmq/arrow/decoder.py",
        '            made["timestamp"] = pa.array(times[rows.blocks]).view(_TIME)\n',
        '            made["timestamp"] = pa.array(times[rows.blocks * 0]).view(_TIME)\n',
        [LOGS],
    ),
    Mutant(
        "compressed-batch-taken-for-a-message",
        "records of a later release are refused",
        "tfmq/arrow/decoder.py",
        "KNOWN_FLAGS: Final = FLAG_ATTRIBUTE | FLAG_TOMBSTONE | FLAG_FILLER\n",
        "KNOWN_FLAGS: Final = FLAG_ATTRIBUTE | FLAG_TOMBSTONE | FLAG_FILLER | FLAG_CODEC_MASK\n",
        [DAMAGE],
    ),
    Mutant(
        "damage-ends-at-the-end-of-the-bytes",
        FOUND,
        "tfmq/arrow/decoder.py",
        "            following = begins if begins > block_offset else claim.trailer.next\n",
        "",
        [DAMAGE, LOGS],
    ),
    Mutant(
        "bad-record-not-named",
        FOUND,
        "tfmq/arrow/decoder.py",
        "                bad.append(offset + record.position)\n",
        "                bad.append(record.position)\n",
        [DAMAGE],
    ),
    Mutant(
        "block-trailer-of-another-offset-accepted",
        FOUND,
        "tfmq/arrow/decoder.py",
        '            and (self.column("offset") == (self.starts + offset).astype(np.uint64)).all()\n',
        "",
        [CONTROLS, DAMAGE],
    ),
    Mutant(
        "block-trailer-of-another-log-accepted",
        FOUND,
        "tfmq/arrow/decoder.py",
        '            and (self.column("id") == np.uint64(log_id)).all()\n',
        "",
        [CONTROLS, DAMAGE],
    ),
    Mutant(
        "ordinals-that-jump-hold",
        FOUND,
        "tfmq/arrow/decoder.py",
        "            and (first[1:] == first[:-1] + records[:-1]).all()\n",
        "",
        [CONTROLS, DAMAGE],
    ),
    Mutant(
        "columns-share-memory-with-the-fetch",
        "columns own their memory",
        "tfmq/arrow/attributes.py",
        "    found = alternating.filter(every_second_mask(2 * count - 1))\n",
        "    found = alternating[:1] if count == 1 else alternating.filter(every_second_mask(2 * count - 1))\n",
        [FIELDS],
    ),
    Mutant(
        "key-in-the-tags-place",
        SAME,
        "tfmq/arrow/attributes.py",
        "        there = (left > 0) & (self.bytes_at(cursor) == number)\n",
        "        there = (left > 0) & (self.bytes_at(cursor) <= number)\n",
        [LAYOUT, ATTRIBUTES],
    ),
    Mutant(
        "bytes-after-an-attribute-passed-over",
        SAME,
        "tfmq/arrow/attributes.py",
        "    plain &= (left == 0) & (cursor == ends)\n",
        "    plain &= (left == 0) & (cursor <= ends)\n",
        [LAYOUT, ATTRIBUTES],
    ),
    Mutant(
        "tag-of-bytes-taken-for-text",
        SAME,
        "tfmq/arrow/attributes.py",
        "    plain &= tags.text | ~tags.present\n",
        "",
        [LAYOUT, ATTRIBUTES],
    ),
    Mutant(
        "text-that-is-none-in-a-key",
        SAME,
        "tfmq/arrow/attributes.py",
        "        if not (_text_valid(self._data, layout.keys) and _text_valid(self._data, layout.tags)):\n",
        "        if not _text_valid(self._data, layout.tags):\n",
        [ATTRIBUTES],
    ),
    Mutant(
        "tag-of-a-record-with-properties-lost",
        SAME,
        "tfmq/arrow/attributes.py",
        "            if len(rest):\n",
        '            if len(rest) and name == "key":\n',
        [ATTRIBUTES],
    ),
    Mutant(
        "null-key-leaves-the-old-one",
        "the columns key and tag decide",
        "tfmq/arrow/attributes.py",
        "    changed = ~(same_key & same_tag)\n",
        "    changed = ~((same_key | key.is_null().to_numpy(zero_copy_only=False)) & same_tag)\n",
        [PARTS],
    ),
    Mutant(
        "same-key-packed-anew",
        "equal values leave the bytes as they are",
        "tfmq/arrow/attributes.py",
        "    changed = ~(same_key & same_tag)\n",
        "    changed = ~(same_key & same_tag) | old.plain & (old.birth_counts > 0)\n",
        [PARTS],
    ),
    Mutant(
        "hash-of-the-old-tag",
        "a broker filters by the tag that the message has",
        "tfmq/arrow/attributes.py",
        "    return AttributeParts([_with_size(new)], having, _tag_hashes(tag))\n",
        "    return AttributeParts([_with_size(new)], having, _tag_hashes(old.tags))\n",
        [PARTS],
    ),
    Mutant(
        "hash-of-no-tag-beside-a-key",
        "a broker filters by the tag that the message has",
        "tfmq/arrow/attributes.py",
        "        hashes = _tag_hashes(tag)\n",
        "        hashes = _tag_hashes(tag) if key is None else hashes\n",
        [PARTS],
    ),
    Mutant(
        "size-without-the-tag",
        "the columns key and tag decide",
        "tfmq/arrow/attributes.py",
        (
            "    rest = len(_field_header(TAG, tag)) + sum((each - 1) >> 1 for each in (key, tag) if"
            " each != _NULL_SHAPE)\n"
        ),
        "    rest = len(_field_header(TAG, tag)) + sum((each - 1) >> 1 for each in (key,) if each != _NULL_SHAPE)\n",
        [PARTS],
    ),
    Mutant(
        "shapes-of-two-rows-mixed",
        "the columns key and tag decide",
        "tfmq/arrow/attributes.py",
        "        shape = shape | tags << _TAG_SHIFT\n",
        "        shape = shape | tags\n",
        [PARTS],
    ),
    Mutant(
        "properties-lost-beside-a-new-key",
        "the other fields of an attribute are kept",
        "tfmq/arrow/attributes.py",
        "        fields = _attribute_fields(attribute, row)\n",
        "        fields: dict[Any, Any] = {}\n",
        [PARTS],
    ),
    Mutant(
        "text-key-becomes-bytes-beside-a-new-tag",
        "equal values leave the bytes as they are",
        "tfmq/arrow/attributes.py",
        "        text = np.where(same_key, old.text, pa.types.is_string(key.type))\n",
        "        text = np.full(len(key), pa.types.is_string(key.type))\n",
        [PARTS],
    ),
    Mutant(
        "no-utf-8-sent-as-text",
        "nothing is sent that a reader cannot decode",
        "tfmq/arrow/attributes.py",
        "            column.validate(full=True)\n",
        "            column.validate()\n",
        [PARTS],
    ),
    Mutant(
        "blocks-larger-than-allowed",
        "the broker accepts what the encoder makes",
        "tfmq/arrow/encoder.py",
        'start + limits.BLOCK_BYTES, "right")',
        'start + limits.BLOCK_BYTES + 64, "right")',
        [ENCODER],
    ),
    Mutant(
        "tombstones-sent-as-empty",
        SENT,
        "tfmq/arrow/encoder.py",
        "    if values.null_count:\n        flags",
        "    if values.null_count == len(values):\n        flags",
        [ENCODER],
    ),
    Mutant(
        "checksum-of-the-value-alone",
        "the checksum of each record covers its attribute",
        "tfmq/arrow/encoder.py",
        "map(crc32, bodies.to_numpy(zero_copy_only=False))",
        "map(crc32, payloads.to_numpy(zero_copy_only=False))",
        [ENCODER],
    ),
    Mutant(
        "sequences-beyond-the-last",
        "a batch never exceeds the last sequence of a producer id",
        "tfmq/arrow/encoder.py",
        "    if sequence + count > SEQUENCE_COUNT:\n",
        "    if sequence + count > SEQUENCE_COUNT + 1:\n",
        [ENCODER],
    ),
    Mutant(
        "keys-go-elsewhere-than-the-clients",
        "rows with the same key are sent to the partition that the client chooses for that key",
        "tfmq/arrow/partitioner.py",
        "np.where(lengths > step, following, found)",
        "np.where(lengths >= step, following, found)",
        [CHECKSUMS, PARTITIONS],
    ),
    Mutant(
        "rows-without-key-all-to-one",
        "rows without a key are sent to the partitions in turn",
        "tfmq/arrow/partitioner.py",
        "(first + np.arange(int(null.sum()))) % partitions",
        "first % partitions",
        [PARTITIONS],
    ),
)
