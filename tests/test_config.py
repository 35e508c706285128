"""The configuration: which source has precedence, and the errors of wrong values."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import scaled
from tfmq import limits
from tfmq.config import (
    VARIABLES,
    Config,
    check_topic_settings,
    config_rows,
    describe,
    is_loopback,
    load,
    merge_reload,
    split_address,
)
from tfmq.errors import BadRequest, ConfigError
from tfmq.settings_table import RELOADED, SETTINGS

CONF = Path(__file__).resolve().parent.parent / "conf"


@pytest.fixture
def file(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str) -> str:
        path = tmp_path / "server.toml"
        path.write_text(text)
        return str(path)

    return write


def test_without_anything_all_is_default() -> None:
    assert load() == Config()
    assert Config().server.listen == "127.0.0.1:8367" and Config().server.acks == "synced"
    assert {origin for _, _, origin in config_rows(Config())} == {"default"}


def test_set_beats_environment_beats_file_beats_default(file) -> None:  # type: ignore[no-untyped-def]
    path = file("[flush]\nmessages = 1\nseconds = 2\n[retention]\nseconds = 3\n[server]\ndata = 'there'\n")
    environment = {"TFMQ_FLUSH_MESSAGES": "10", "TFMQ_FLUSH_SECONDS": "20"}
    config = load(path, environment=environment, sets=["flush.messages=100"], flags={"server.data": "here"})
    assert (config.flush.messages, config.flush.seconds, config.retention.seconds) == (100, 20, 3)
    assert config.server.data == "here" and config.flush.method == "auto"
    origins = {key: origin for key, _, origin in config_rows(config)}
    assert origins["flush.messages"] == "--set flush.messages"
    assert origins["flush.seconds"] == "TFMQ_FLUSH_SECONDS"
    assert origins["retention.seconds"] == path
    assert origins["server.data"] == "--data"
    assert origins["flush.method"] == "default"


def test_a_flag_that_was_not_given_says_nothing() -> None:
    assert load(flags={"server.data": None}).server.data == "./tfmq-data"


def test_topics_have_keys_of_their_own(file) -> None:  # type: ignore[no-untyped-def]
    path = file(
        '[topic."orders"]\nflush.messages = 1\nretention.seconds = "7d"\n[topic.logs.retention]\nbytes = "1GiB"\n'
    )
    config = load(path, sets=['topic."a.b".topics.partitions=4'])
    assert config.topic == {
        "orders": {"flush.messages": 1, "retention.seconds": 604_800},
        "logs": {"retention.bytes": 1 << 30},
        "a.b": {"topics.partitions": 4},
    }
    assert ('topic."orders".flush.messages', 1, path) in config_rows(config)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[flush]\nmesages = 1", 'no key flush.mesages .*did you mean "flush.messages"'),
        ('[server]\ntls_cert = "a.pem"', 'did you mean "server.tls_certificate"'),
        ("[flsh]\nmessages = 1", 'did you mean "flush.messages"'),
        ("[storage]\nsegment_bytes = 1", 'did you mean "log.segment_bytes"'),
        ("[zzz]\nqqq = 1", r"no key zzz.qqq \(.*\)\.$"),
        ("listen = 'x'", "no key listen"),
        ("[flush]\nmessages = 'many'", "flush.messages must be a whole number from 0"),
        ("[flush]\nmessages = '5'", "flush.messages must be a whole number .*, written without quotes, not '5'"),
        ("[topic.orders]\nflush.messages = '5'", "written without quotes"),
        ("[limits]\nconnections = '5'", "written without quotes"),
        ("[server]\ninsecure = 'yes'", "server.insecure must be true or false, written without quotes, not 'yes'"),
        ("[server]\ninsecure = 'no'", "written without quotes"),
        ("[flush]\nmessages = -1", "must be a whole number"),
        ("[flush]\nmessages = 1.5", "must be a whole number"),
        ("[flush]\nmessages = true", "must be a whole number"),
        ("[flush]\nmessages = nan", "must be a whole number"),
        ("[flush]\nseconds = inf", "must be a time"),
        ("[flush]\nseconds = '5 years'", "must be a time"),
        ("[flush]\nmethod = 'fsync'", 'must be one of "auto", "fdatasync", "syncfs", not \'fsync\''),
        ("[server]\nacks = 1", "must be one of"),
        ("[server]\ninsecure = 'perhaps'", "must be true or false"),
        ("[server]\nlisten = '127.0.0.1'", "must be HOST:PORT"),
        ("[server]\nlisten = '127.0.0.1:70000'", "must be HOST:PORT"),
        ("[server]\ndata = ''", "must be the path"),
        ("[server]\ndata = 5", "must be the path"),
        ("[log]\nsegment_bytes = 10", "a size in bytes"),
        ("[limits]\nframe_bytes = 1000000000", "limits.frame_bytes must be"),
        ("[limits]\nname_length = 10", "no key limits.name_length"),
        ("[topic.orders]\nserver.data = 'x'", 'no key topic."orders".server.data'),
        ("[topic.orders]\nflush.mesages = 5", 'did you mean "flush.messages"'),
        ("[topic.'a/b']\nflush.messages = 5", "cannot name a topic"),
        ("topic = 5", r'written as \[topic."NAME"\]'),
        ("[topic]\norders = 5", r'written as \[topic."NAME"\]'),
        ("[flush", "is not TOML"),
        ("[flush]\nmessages = {a = 1}", "no key flush.messages.a"),
    ],
)
def test_a_wrong_file_is_reported_in_one_sentence(file, text: str, sentence: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(file(text))
    assert "\n" not in str(caught.value) and "server.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"/none.toml cannot be read: No such file"):
        load("/none.toml")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("flush.messages", "SECTION.KEY=VALUE"),
        ("flush messages=1", "is no key"),
        ("flush.mesages=1", "--set flush.mesages"),
        ("flush=1", "no key flush"),
        ("=1", "is no key"),
        ("a=1\nb=2", "no key a"),
        ("topic.orders=5", "topic"),
        ("topic=5", "topic"),
    ],
)
def test_a_wrong_set_is_reported(given: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(sets=[given])


def test_a_wrong_variable_is_reported_and_strangers_are_left_alone() -> None:
    with pytest.raises(ConfigError, match=r'TFMQ_FLUSH_MESAGES.*did you mean "flush.messages"'):
        load(environment={"TFMQ_FLUSH_MESAGES": "1"})
    load(environment={"TFMQ_SERVERS": "a:1", "TFMQ_TEST_SCALE": "1", "PATH": "x"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TFMQ_RETENTON_SECONDS", '"retention.seconds", TFMQ_RETENTION_SECONDS'),
        ("TFMQ_TOPIC_AUTO_CREATE", '"topics.auto_create", TFMQ_TOPICS_AUTO_CREATE'),
        ("TFMQ_DATA", '"server.data", TFMQ_SERVER_DATA'),
        ("TFMQ_LISTEN", '"server.listen", TFMQ_SERVER_LISTEN'),
        ("TFMQ_RETENTION", '"retention.seconds", TFMQ_RETENTION_SECONDS'),
        ("TFMQ_SERVER", "TFMQ_SERVERS"),
        ("TFMQ_PORT", ""),
        ("TFMQ_NOSUCH", ""),
    ],
)
def test_a_variable_that_is_no_setting_is_refused_without_its_value(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environment={name: "secret"})
    assert name in caught.value.sentence and "secret" not in caught.value.sentence
    assert not meant or f"did you mean {meant}?" in caught.value.sentence


def test_variables_of_clients_tests_tools_and_of_kubernetes_are_no_settings() -> None:
    root = CONF.parent
    files = [path for name in ("tfmq", "tools") for path in (root / name).rglob("*.py")]
    text = "".join(path.read_text() for path in [*files, root / "tests" / "scale.py"])
    names = set(re.findall(r"\bTFMQ_[A-Z_]*[A-Z]\b", text)) - {"TFMQ_SECTION_KEY", "TFMQ_SERVER", "TFMQ_PORT"}
    assert {"TFMQ_SERVERS", "TFMQ_TEST_SCALE", "TFMQ_BENCH_SCALE", "TFMQ_MUTANTS_MAP"} <= names
    load(environment={name: "1" for name in names if name not in VARIABLES})
    address = "tcp://10.0.0.1:8367"
    load(environment={"TFMQ_PORT": address, "TFMQ_SERVICE_HOST": "10.0.0.1", "TFMQ_SERVICE_PORT_CLIENTS": "8367"})
    load(environment={"TFMQ_SERVER_PORT_8367_TCP": address, "TFMQ_SERVER_PORT_8367_TCP_ADDR": "10.0.0.1"})


def test_a_time_that_holds_by_default_is_one_that_a_client_could_ask_for() -> None:
    for key, limit, seconds in (
        ("transaction.timeout_seconds", "limits.transaction_seconds", 2000),
        ("transaction.group_ttl_seconds", "limits.transaction_ttl_seconds", 40 * 86_400),
    ):
        with pytest.raises(ConfigError, match=rf"{key} is {seconds} s \(--set {key}\), more than {limit}"):
            load(sets=[f"{key}={seconds}"])
        load(sets=[f"{key}={seconds}", f"{limit}={seconds}"])


@pytest.mark.parametrize("key", ["server.listen", "http.listen"])
def test_listening_outside_of_this_machine_must_be_wanted(key: str) -> None:
    for address in ("0.0.0.0:8367", "[::]:8367", "192.168.1.5:8367", "example.org:8367", ":8367"):
        with pytest.raises(ConfigError, match=f"{key} .*outside of this machine"):
            load(flags={key: address})
        load(flags={key: address}, sets=["server.insecure=true"])
        certificates = ["server.tls_certificate=c.pem", "server.tls_key=c.key"]
        with pytest.raises(ConfigError, match="outside of this machine"):
            load(flags={key: address}, sets=certificates)
        load(flags={key: address}, sets=[*certificates, "server.tls_client_ca=ca.pem"])
    for address in ("127.0.0.1:0", "127.1.2.3:5", "[::1]:8367", "localhost:8367"):
        load(flags={key: address})
    load(flags={"http.listen": ""})


def test_addresses_come_apart() -> None:
    assert split_address("[::1]:8367") == ("::1", 8367) and split_address(":5") == ("", 5)
    assert not is_loopback("") and is_loopback("::1")


def test_a_frame_must_carry_the_largest_message() -> None:
    with pytest.raises(ConfigError, match=r"limits.frame_bytes.*at least"):
        load(sets=["limits.frame_bytes=1MiB"])
    with pytest.raises(ConfigError, match=r"limits.fetch_bytes"):
        load(sets=["limits.fetch_bytes=16MiB"])
    config = load(sets=["limits.message_bytes=16MiB", "limits.frame_bytes=32MiB"])
    assert config.limits["message_bytes"] == 16 << 20 and config.limits["groups"] == limits.GROUPS


def test_settings_of_a_new_topic_are_checked_the_same_way() -> None:
    assert check_topic_settings({"retention.seconds": "1h"}) == {"retention.seconds": 3600}
    with pytest.raises(BadRequest, match=r'no key flush.mesages .*did you mean "flush.messages"'):
        check_topic_settings({"flush.mesages": 1})
    with pytest.raises(BadRequest) as caught:
        check_topic_settings({"flush.messages": ["x" * 10_000]})
    assert len(str(caught.value)) < 300


def test_check_config_shows_every_key_its_value_and_its_origin() -> None:
    config = load(sets=["flush.messages=5", 'topic."o".flush.messages=1'])
    table, rows = describe(config), {key: (value, origin) for key, value, origin in config_rows(config)}
    for key in SETTINGS:
        assert key in table and key in rows
    assert rows["flush.messages"] == (5, "--set flush.messages")
    assert rows['topic."o".flush.messages'][0] == 1


@settings(max_examples=scaled(2000))
@given(st.sampled_from([*SETTINGS, "x.y"]), st.text(max_size=30).filter(lambda text: "\0" not in text))
def test_any_text_is_a_value_or_a_config_error(key: str, value: str) -> None:
    variable = f"TFMQ_{key.replace('.', '_').upper()}"
    try:
        load(environment={variable: value})
    except ConfigError as error:
        assert (key if key in SETTINGS else variable) in str(error)


def test_the_shipped_file_says_nothing_but_the_defaults() -> None:
    config = load(str(CONF / "server.toml"))
    assert {key: config.value(key) for key in SETTINGS} == Config().values
    assert set(config.origins) == set(SETTINGS), "every key stands in it"


def test_a_configuration_that_is_read_again_changes_what_can_change_and_names_the_rest() -> None:
    old = load(flags={"server.data": "here"}, sets=["retention.seconds=7d", 'topic."o".flush.messages=1'])
    new = load(
        flags={"server.data": "there"},
        sets=["retention.seconds=1d", 'topic."p".retention.bytes=9', "limits.topics=5", "limits.frame_bytes=32MiB"],
    )
    config, changed, later = merge_reload(old, new)
    assert changed == [
        "retention.seconds = 86400 (was 604800)",
        "limits.topics = 5 (was 20000)",
        'topic."o".flush.messages = not set (was 1)',
        'topic."p".retention.bytes = 9 (was not set)',
    ]
    assert later == ["server.data", "limits.frame_bytes"]
    assert config.server.data == "here" and config.limits["frame_bytes"] == limits.FRAME_BYTES
    assert config.retention.seconds == 86_400 and config.limits["topics"] == 5
    assert config.topic == {"p": {"retention.bytes": 9}}
    assert config.origins["server.data"] == "--data" and "limits.frame_bytes" not in config.origins
    assert merge_reload(config, new).changed == []


def test_what_is_read_again_must_fit_what_stays() -> None:
    old, new = load(), load(sets=["limits.fetch_bytes=64MiB", "limits.frame_bytes=128MiB"])
    with pytest.raises(ConfigError, match=r"limits.fetch_bytes must be 4 MiB less"):
        merge_reload(old, new)


def test_what_can_be_read_again_are_keys() -> None:
    assert set(SETTINGS) >= RELOADED


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, ".".join("a" * 5000) + " = 1", "[limits]\nx = " + "9" * 5000])
def test_what_no_parser_takes_is_one_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not TOML"):
        load(str(file))


def test_a_pipe_is_not_read_again(tmp_path: Path) -> None:
    """A server that runs would wait for it."""
    file = tmp_path / "server.toml"
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="no regular file"):
        load(str(file), again=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(str(tmp_path / "missing"), again=True)
