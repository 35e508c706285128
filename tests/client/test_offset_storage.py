"""The argument `offsets` of a consumer: the words for each storage, and what is none."""

from pathlib import Path

import pytest

from tfmq.client.offset_storage import FileOffsets, open_storage
from tfmq.errors import BadRequest, NotSupported


def test_the_words_for_a_storage(tmp_path: Path) -> None:
    path = tmp_path / "offsets.json"
    assert open_storage("broker") is None
    assert isinstance(open_storage(f"file:{path}"), FileOffsets)
    own = FileOffsets(str(path))
    assert open_storage(own) is own
    for later in ("zookeeper://host", "sql:sqlite://"):
        with pytest.raises(NotSupported, match="later release"):
            open_storage(later)
    for wrong in ("disk", "file:", 5):
        with pytest.raises(BadRequest):
            open_storage(wrong)  # type: ignore[arg-type]
