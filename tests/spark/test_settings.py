"""What options add up to."""

import pickle

import pytest

from tfmq.errors import BadRequest
from tfmq.spark.settings import SourceSettings, parse_source_settings

LEAST = {"servers": "127.0.0.1:8367", "subscribe": "orders"}


def settings(**options: str) -> SourceSettings:
    return parse_source_settings({**LEAST, **options}, streaming=True)


def test_what_holds_without_a_word() -> None:
    found = settings()
    assert found.address == ("127.0.0.1:8367", None, 30.0)
    assert found.fail_on_data_loss
    assert found.verify == "chunk"
    assert found.end is None
    assert (found.rows_max, found.bytes_max, found.rows_min, found.partitions_min) == (None, None, None, None)


def test_every_option_arrives() -> None:
    found = settings(
        failondataloss="false", maxOffsetsPerTrigger="10", minOffsetsPerTrigger="5", maxTriggerDelay="1m",
        minPartitions="3", maxRecordsPerPartition="7", groupId="g", verify="none", timeout="2s",
    )  # fmt: skip
    assert not found.fail_on_data_loss
    assert (found.rows_max, found.rows_min, found.trigger_delay) == (10, 5, 60.0)
    assert (found.partitions_min, found.rows_per_task) == (3, 7)
    assert (found.group, found.verify, found.address.timeout) == ("g", "none", 2.0)
    assert settings(maxBytesPerTrigger="1k").bytes_max == 1024


def test_a_folder_instead_of_a_broker() -> None:
    found = parse_source_settings({"path": "/var/lib/tfmq", "subscribe": "orders"}, streaming=False)
    assert found.address == (None, "/var/lib/tfmq", 30.0)


def test_settings_travel() -> None:
    found = settings(startingOffsets='{"orders": {"0": 5}}')
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": "/tmp"}, "servers and path exclude each other"),
        ({"maxOffsetsPerTrigger": "1", "maxBytesPerTrigger": "1"}, "exclude each other"),
        ({"maxOffsetsPerTrigger": "1", "minOffsetsPerTrigger": "2"}, "larger than maxOffsetsPerTrigger"),
        ({"path": "orders"}, r'topics are named by option\("subscribe", NAME\)'),
        ({"servers": "127.0.0.1:1,127.0.0.1:2"}, "servers must be one broker"),
        ({"servers": "127.0.0.1:99999"}, "'99999'.*is not a port"),
    ],
)
def test_what_does_not_fit_together(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence):
        settings(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": "30000"}, "timeout is 8.3 hours: a number without a unit is seconds"),
        ({"startingTimestamp": "1700000000"}, "startingTimestamp=1700000000 is in the year 1973 or before"),
        ({"timeout": "30s", "startingTimestamp": "1700000000000"}, ""),
    ],
)
def test_numbers_in_another_unit_are_said(
    options: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings(**options)
    assert said in caplog.text and bool(said) == bool(caplog.records)


def test_a_broker_or_a_folder_must_be_named() -> None:
    with pytest.raises(BadRequest, match="Give one of the options servers and path"):
        parse_source_settings({"subscribe": "orders"}, streaming=True)


def test_progress_is_the_brokers_and_a_folder_has_none() -> None:
    with pytest.raises(BadRequest, match="groupId and path exclude each other"):
        parse_source_settings({"path": "/tmp", "subscribe": "orders", "groupId": "g"}, streaming=True)
