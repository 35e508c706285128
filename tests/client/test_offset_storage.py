"""The argument `offsets` of a consumer: the words for each storage, and what is none."""

import subprocess
import sys
from pathlib import Path

import pytest

from tfmq.client.consumer.options import open_storage
from tfmq.errors import BadRequest
from tfmq.offsets.file import FileOffsets
from tfmq.offsets.sql import SqlOffsets
from tfmq.zookeeper.offsets import ZooKeeperOffsets


def test_the_words_for_a_storage(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    assert open_storage("broker") is None
    assert isinstance(open_storage(f"file:{path}"), FileOffsets)
    own = FileOffsets(str(path))
    assert open_storage(own) is own
    assert isinstance(open_storage(f"sql:sqlite:///{tmp_path / 'offsets.db'}"), SqlOffsets)
    assert isinstance(open_storage("zookeeper://127.0.0.1:2181/meta"), ZooKeeperOffsets)
    for wrong in ("disk", "file:", "sql:", "zookeeper:", "zookeeper://", 5):
        with pytest.raises(BadRequest):
            open_storage(wrong)  # type: ignore[arg-type]


def test_what_is_not_used_is_not_loaded() -> None:
    program = (
        "import sys, tfmq; tfmq.Consumer(topics='t', group='g', offsets='file:x');"
        " sys.exit(any(name in sys.modules for name in ('sqlalchemy', 'kazoo')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
