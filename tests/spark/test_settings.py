"""What options add up to."""

from __future__ import annotations

import pickle

import pytest

from tfmq.client.connection.addresses import parse_servers
from tfmq.errors import BadRequest, ConfigError
from tfmq.limits import is_valid_name
from tfmq.spark.settings import (
    SinkSettings,
    SourceSettings,
    commit_group_name,
    parse_broker,
    parse_sink_settings,
    parse_source_settings,
)

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
def test_numbers_in_another_unit_are_said(options: dict[str, str], said: str, caplog: pytest.LogCaptureFixture) -> None:
    settings(**options)
    assert said in caplog.text and bool(said) == bool(caplog.records)


def test_a_broker_or_a_folder_must_be_named() -> None:
    with pytest.raises(BadRequest, match="Give one of the options servers and path"):
        parse_source_settings({"subscribe": "orders"}, streaming=True)


def test_progress_is_the_brokers_and_a_folder_has_none() -> None:
    with pytest.raises(BadRequest, match="groupId and path exclude each other"):
        parse_source_settings({"path": "/tmp", "subscribe": "orders", "groupId": "g"}, streaming=True)


# One broker, with all its servers.


@pytest.mark.parametrize("servers", ["127.0.0.1:8367", "tfmq://broker", "localhost,", "a:1,b:2,c:3"])
def test_the_addresses_of_a_broker(servers: str) -> None:
    assert parse_broker({"servers": servers}) == servers


def test_a_user_of_several_servers_has_the_password_at_all() -> None:
    found = parse_broker({"servers": "tfmq://me@a:1,b:2,c:3", "password": "x"})
    assert [each.credentials and each.credentials.password for each in parse_servers(found)] == ["x", "x", "x"]


def test_what_is_no_address() -> None:
    with pytest.raises(BadRequest):
        parse_broker({"servers": "127.0.0.1:99999"})


def test_a_password_is_an_option_or_in_the_environment_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    user = "tfmqs://me@broker"
    assert settings(servers=user, PASSWORD="s:c/r@t").address.servers == "tfmqs://me:s%3Ac%2Fr%40t@broker"
    assert parse_sink_settings({"servers": user, "password": "x"}, streaming=False).servers == "tfmqs://me:x@broker"
    monkeypatch.setenv("TFMQ_PASSWORD", "y")
    assert parse_broker({"servers": user}) == "tfmqs://me:y@broker"
    assert parse_broker({"servers": "broker"}) == "broker"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"servers": "tfmq://me:secret@broker"}, "servers has a password, which Spark would show in plans: write"),
        ({"servers": "tfmq://me:secret@broker", "password": "secret"}, "servers has a password"),
        ({"servers": "tfmq://me@broker"}, "has no password"),
        ({"servers": "broker", "password": "secret"}, "password needs a user"),
    ],
)
def test_a_password_in_another_place_is_refused_and_not_shown(
    options: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TFMQ_PASSWORD", raising=False)
    with pytest.raises(BadRequest, match=sentence) as caught:
        parse_broker(options)
    assert "secret" not in str(caught.value)


# Options of a sink, checked.

SERVERS = {"servers": "127.0.0.1:8367"}


def test_options_become_settings() -> None:
    given = {**SERVERS, "topic": "orders", "timeout": "5s", "transactionTTL": "2h", "allowOtherTotal": "true"}
    assert parse_sink_settings(given, streaming=True) == SinkSettings("127.0.0.1:8367", "orders", 5.0, 7_200_000, True)
    assert parse_sink_settings(SERVERS, streaming=True) == SinkSettings("127.0.0.1:8367")


def test_an_application_and_its_version_name_a_commit_group() -> None:
    for version in (0, 7):
        given = {**SERVERS, "txnAppId": "nightly", "txnVersion": str(version)}
        settings = parse_sink_settings(given, streaming=False)
        assert (settings.group, settings.sequence) == ("spark-batch-nightly", version)
    assert commit_group_name("stream", "nightly") != settings.group


def test_each_topic_of_an_application_is_a_commit_group_of_its_own() -> None:
    def group(name: str, topic: str) -> str:
        given = {**SERVERS, "topic": topic, "txnAppId": name, "txnVersion": "1"}
        return parse_sink_settings(given, streaming=False).group

    assert group("nightly", "orders") == "spark-batch-nightly..orders"
    pairs = [("a", "b-c"), ("a-b", "c"), ("a", ".b"), ("a.b", "c"), ("a", "b..c"), ("n" * 200, "t" * 249)]
    pairs += [("n" * 200, "t" * 248), ("n" * 199, "nt" * 100), ("a", "x" * 249), ("a", "x" * 248)]
    names = [group(*each) for each in pairs]
    assert len(set(names)) == len(pairs) and all(is_valid_name(name) for name in names)
    assert is_valid_name(commit_group_name("stream", "0" * 36, "t" * 249))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, 'Give the broker to write to: option("servers", "HOST:PORT").'),
        ({**SERVERS, "topic": "a/b"}, "'a/b' in the option topic cannot be a topic: a name has 1 to 249 letters"),
        ({**SERVERS, "transactionTtl": "1000d"}, "transactionTtl must be at most 365 days"),
        ({**SERVERS, "txnAppId": "x"}, "txnAppId needs txnVersion, too: give both, or none."),
        ({**SERVERS, "txnVersion": "1"}, "txnVersion needs txnAppId, too: give both, or none."),
        (
            {**SERVERS, "txnAppId": "my app", "txnVersion": "1"},
            "txnAppId must be a name, 1 to 200 of A-Z a-z 0-9 . _ -, without '..' and not with a '.' at its end, not"
            " 'my app'.",
        ),
        ({**SERVERS, "txnAppId": "a..b", "txnVersion": "1"}, "txnAppId must be a name, 1 to 200 of"),
        ({**SERVERS, "txnAppId": "a.", "txnVersion": "1"}, "txnAppId must be a name, 1 to 200 of"),
        ({**SERVERS, "txnAppId": "a" * 201, "txnVersion": "1"}, "txnAppId must be a name, 1 to 200 of"),
        ({**SERVERS, "txnAppId": "x", "txnVersion": "-1"}, "txnVersion must be a whole number from 0 on, not '-1'."),
        ({**SERVERS, "transactionTtl": "long"}, "transactionTtl must be a time in seconds above 0, or like"),
        ({**SERVERS, "transactionTtl": "10000h"}, "transactionTtl must be at most 365 days, 3.6e+07 s are more."),
        ({**SERVERS, "subscribe": "orders"}, "subscribe is an option of the source, not of the sink"),
        ({**SERVERS, "topik": "orders"}, "tfmq has no option 'topik'. Did you mean 'topic'?"),
    ],
)
def test_what_is_wrong_is_reported_in_a_sentence(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_sink_settings(given, streaming=False)
    assert sentence in str(caught.value)


def test_versions_are_of_batch_writes_only() -> None:
    with pytest.raises(BadRequest, match="txnAppId is an option of"):
        parse_sink_settings({**SERVERS, "txnAppId": "x", "txnVersion": "1"}, streaming=True)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises((BadRequest, ConfigError)):
        parse_sink_settings({"servers": "::nowhere::"}, streaming=True)


def test_a_name_is_so_long_at_most_that_a_topic_fits_beside_it() -> None:
    given = {**SERVERS, "txnAppId": "x" * 200, "txnVersion": "1"}
    assert parse_sink_settings(given, streaming=False).group.endswith("x" * 200)
    with pytest.raises(BadRequest):
        parse_sink_settings({**given, "txnAppId": "x" * 201}, streaming=False)
