"""Names of an archive's files."""

from __future__ import annotations

from tfmq.spark.pipelines import archive_layout
from tfmq.spark.pipelines.archive_layout import ArchivePiece, file_path, hour_of

PIECE = ArchivePiece(3, 5, 83886083, 4096, 8192)
NINE = 1_763_715_600_000  # 2025-11-21T09:00:00Z


def test_a_file_is_named_by_topic_hour_and_range() -> None:
    assert file_path("orders", hour_of(NINE), PIECE) == (
        "topic=orders/date=2025-11-21/hour=09/"
        "00003-0000000005-00000000000000004096-00000000000000008192.parquet"
    )


def test_hours_are_those_of_utc() -> None:
    assert hour_of(NINE - 1) == hour_of(NINE) - 1
    assert hour_of(NINE + 3_599_999) == hour_of(NINE)


def test_readers_of_parquet_pass_over_the_archives_own_files() -> None:
    own = (
        archive_layout.plan_path("t", 1),
        archive_layout.manifest_path("t", 1),
        archive_layout.lock_path("t"),
        archive_layout.ARCHIVE_FILE,
    )
    assert all(path.startswith("_") for path in own)
    assert archive_layout.manifest_path("t", 7) == "_tfmq/t/00000007.json"
