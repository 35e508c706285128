"""The table of keys: every key explains itself, every default is a value that the key takes."""

import pytest

from tfmq.settings_table import SETTINGS, TOPIC_KEYS, Address, Boolean, Duration, Integer, ZooKeeperAddress

every_key = pytest.mark.parametrize("key", SETTINGS)

# Names that programs outside of the project use.
SETTLED = """
    server.data server.listen server.acks server.insecure server.zookeeper flush.messages flush.seconds flush.method
    log.segment_bytes log.segment_seconds retention.seconds retention.bytes retention.action topics.auto_create
    topics.partitions
    transaction.timeout_seconds delay.tick_ms delay.levels server.tls_certificate server.tls_key server.users
    http.listen
""".split()


@every_key
def test_a_key_explains_itself_in_one_line(key: str) -> None:
    setting, default = SETTINGS[key]
    assert setting.line.endswith(".") and "\n" not in setting.line and setting.kind.text
    assert setting.kind.read(default) == default


@pytest.mark.parametrize("key", SETTLED)
def test_settled_names_stay(key: str) -> None:
    assert key in SETTINGS


def test_keys_of_topics_are_keys_of_the_server() -> None:
    assert set(TOPIC_KEYS) <= set(SETTINGS)


@pytest.mark.parametrize(
    ("text", "number"),
    [("5", 5), (" 5 KiB ", 5120), ("1.5MiB", 3 << 19), ("1kb", 1000), ("2 GB", 2_000_000_000), (7, 7)],
)
def test_sizes_have_units(text: object, number: int) -> None:
    assert Integer(0, 1 << 40, is_size=True).read(text) == number


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5), ("250ms", 0.25), ("1.5h", 5400), ("7d", 604_800), (0.5, 0.5), ("2 min", 120)]
)
def test_times_have_units(text: object, seconds: float) -> None:
    assert Duration(0, 1e9).read(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "KiB", "5 parsec", "-5", "1e5", "5KiBx", "9" * 400, None, True, [5], float("nan")]
)
def test_other_texts_are_no_measures(text: object) -> None:
    with pytest.raises(ValueError, match="a size in bytes"):
        Integer(0, 1 << 40, is_size=True).read(text)


def test_switches_take_words() -> None:
    assert Boolean().read("Yes") is True and Boolean().read("0") is False and Boolean().read(True) is True
    with pytest.raises(ValueError, match="true or false"):
        Boolean().read(1)


@pytest.mark.parametrize("address", ["127.0.0.1:8367", "[::1]:0", "localhost:65535", ":1"])
def test_addresses_are_host_and_port(address: str) -> None:
    assert Address().read(address) == address


@pytest.mark.parametrize("address", ["", "a", "a:", "a:65536", "::1:5", "a b:5", "a:-1", "a:5/", None])
def test_other_texts_are_no_addresses(address: object) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        Address().read(address)


@pytest.mark.parametrize("text", ["", "127.0.0.1:2181", "a:1,b:2/meta", "zookeeper://a/x/y", "[::1]:2181/meta"])
def test_an_ensemble_is_hosts_and_a_path(text: str) -> None:
    assert ZooKeeperAddress().read(text) == text


@pytest.mark.parametrize("wrong", ["http://a:1", "a b", "a:1/x y", 5, "/meta"])
def test_what_is_no_ensemble_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="127\\.0\\.0\\.1:2181/meta"):
        ZooKeeperAddress().read(wrong)
