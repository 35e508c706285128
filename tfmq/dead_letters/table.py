"""The table of dead letters, one row a letter: docs/dead-letters.md has its columns. Rows to letters and back.

The primary key is the letter's id, made of what the message is; the unique constraint says the same in words that a
person can query. Times are ms since 1970; 0 and -1 stand for none where a letter has them so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.mysql import LONGTEXT

from tfmq.client.dead_letters import Failure
from tfmq.dead_letters.letter import ID_CHARACTERS, Body, Journey, Letter
from tfmq.dead_letters.selection import key_text

NAME: Final = "tfmq_dead_letters"
NAME_CHARACTERS: Final = 249
STATE_CHARACTERS: Final = 16
TOKEN_CHARACTERS: Final = 40
BROKER_CHARACTERS: Final = 64
LARGE_BYTES: Final = 1 << 31
"""MySQL chooses the kind of a column by it; a payload has at most 63 MiB."""

LONG: Final = Text().with_variant(LONGTEXT(), "mysql", "mariadb")
"""MySQL's TEXT ends at 64 KiB."""

METADATA: Final = MetaData()
TABLE: Final = Table(
    NAME,
    METADATA,
    Column("id", String(ID_CHARACTERS), primary_key=True),
    Column("group_name", String(NAME_CHARACTERS), nullable=False),
    Column("topic", String(NAME_CHARACTERS), nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("partition_number", Integer, nullable=False),
    Column("message_offset", BigInteger, nullable=False),
    Column("next_offset", BigInteger, nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("message_id", String(ID_CHARACTERS), nullable=False),
    Column("appended_ms", BigInteger, nullable=False),
    Column("log_epoch", BigInteger, nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    Column("state", String(STATE_CHARACTERS), nullable=False),
    Column("calls", Integer, nullable=False),
    Column("calls_left", Integer, nullable=False),
    Column("put_offs", Integer, nullable=False),
    Column("redrives", Integer, nullable=False),
    Column("next_ms", BigInteger, nullable=False),
    Column("kept_ms", BigInteger, nullable=False),
    Column("changed_ms", BigInteger, nullable=False),
    Column("token", String(TOKEN_CHARACTERS), nullable=False),
    Column("lease_ms", BigInteger, nullable=False),
    Column("key_text", LONG),
    Column("key_is_text", Integer, nullable=False),
    Column("tag", Text),
    Column("error", Text, nullable=False),
    Column("failures", LONG, nullable=False),
    Column("journey", Text),
    Column("sent_offset", BigInteger, nullable=False),
    Column("broker", String(BROKER_CHARACTERS), nullable=False, server_default=""),
    Column("attribute", LargeBinary(LARGE_BYTES)),
    Column("payload", LargeBinary(LARGE_BYTES)),
    UniqueConstraint(
        "group_name",
        "incarnation",
        "partition_number",
        "message_offset",
        "appended_ms",
        name="tfmq_dead_letters_message",
    ),
    Index("tfmq_dead_letters_due", "group_name", "state", "next_ms"),
    Index("tfmq_dead_letters_kept", "kept_ms", "id"),
)
ADDED: Final = (TABLE.c.broker,)
"""Columns that tables of earlier releases do not have; each has a default, with which these go on writing."""
BODY: Final = (TABLE.c.attribute, TABLE.c.payload)
BRIEF: Final = tuple(column for column in TABLE.c if column.name not in ("attribute", "payload"))
"""All columns but those that may be large."""

_SAME: Final = (
    "id topic incarnation next_offset ordinal appended_ms payload_bytes state calls calls_left put_offs redrives"
    " next_ms kept_ms changed_ms token lease_ms tag sent_offset broker"
).split()


def row_of(letter: Letter) -> dict[str, Any]:
    """The row; its body only where the letter has one."""
    row: dict[str, Any] = {name: getattr(letter, name) for name in _SAME}
    row.update(
        group_name=letter.group,
        partition_number=letter.partition,
        message_offset=letter.offset,
        message_id=f"{letter.message_id:016x}",
        log_epoch=letter.epoch,
        key_text=_storable(key_text(letter.key)),
        key_is_text=int(isinstance(letter.key, str)),
        failures=json.dumps(letter.failures, ensure_ascii=True),
        tag=_storable(letter.tag),
        error=_storable(letter.error),
        journey=None if letter.journey is None else json.dumps(letter.journey),
    )
    if letter.body is not None:
        row.update(attribute=letter.body.attribute, payload=letter.body.payload)
    return row


def letter_of_row(row: Mapping[Any, Any]) -> Letter:
    """The letter in a row, with its body where the row has it. Raises `ValueError`, `TypeError` for one that no store
    of ours wrote."""
    key: bytes | str | None = row["key_text"]
    if key is not None and not row["key_is_text"]:
        key = str(key).encode()
    body = Body(_bytes(row["payload"]), _bytes(row["attribute"])) if "payload" in row else None
    fields = {name: row[name] for name in _SAME}
    return Letter(
        **fields,
        group=row["group_name"],
        partition=row["partition_number"],
        offset=row["message_offset"],
        message_id=int(row["message_id"], 16),
        epoch=row["log_epoch"],
        key=key,
        failures=tuple(Failure(*each) for each in json.loads(row["failures"])),
        journey=None if row["journey"] is None else Journey(*json.loads(row["journey"])),
        body=body,
    )


def _storable(text: str | None) -> str | None:
    """Text as every database takes it: PostgreSQL has no NUL, and none has half of a surrogate."""
    return None if text is None else text.replace("\0", "\ufffd").encode(errors="replace").decode()


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)
