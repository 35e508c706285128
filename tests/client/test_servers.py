"""Addresses as users write them."""

import pytest

from tfmq.client.connection.addresses import BrokerAddress, data_folder_of, parse_servers
from tfmq.errors import BadRequest, NotSupported


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("broker:9000", [("broker", 9000)]),
        ("broker", [("broker", 8367)]),
        (":9000", [("127.0.0.1", 9000)]),
        ("a:1, b:2,,a:1", [("a", 1), ("b", 2)]),
        ("tfmq://broker:1/", [("broker", 1)]),
        (["a:1", "b:2,c:3"], [("a", 1), ("b", 2), ("c", 3)]),
        ("[::1]:99", [("::1", 99)]),
        ("[::1]", [("::1", 8367)]),
    ],
)
def test_what_is_understood(written: str | list[str], meant: list[tuple[str, int]]) -> None:
    assert parse_servers(written) == tuple(BrokerAddress(*each) for each in meant)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("", "list of servers is empty"),
        ([], "list of servers is empty"),
        ("broker:http", "'http' in 'broker:http' is not a port"),
        ("broker:0", "1 to 65535"),
        ("broker:70000", "1 to 65535"),
        ("http://broker", "http:// is another protocol"),
        ("::1:99", "more than one colon"),
        ("[::1", "an IPv6 one"),
        ("broker/path", "without a path"),
    ],
)
def test_what_is_not(written: str | list[str], sentence: str) -> None:
    with pytest.raises(BadRequest, match=sentence.replace("[", r"\[")):
        parse_servers(written)


def test_what_a_later_release_has() -> None:
    with pytest.raises(NotSupported, match="TLS"):
        parse_servers("tfmqs://broker")
    for written in (
        "tfmq://me:secret@broker",
        "tfmqs://me:secret@broker",
        "kafka://me:secret@broker",
        "me:secret@:::",
    ):
        with pytest.raises(NotSupported, match="user and password") as caught:
            parse_servers(written)
        assert "secret" not in str(caught.value)


def test_none_means_the_environment_then_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFMQ_SERVERS", raising=False)
    assert parse_servers() == (BrokerAddress("127.0.0.1", 8367),)
    monkeypatch.setenv("TFMQ_SERVERS", "elsewhere:1")
    assert parse_servers() == (BrokerAddress("elsewhere", 1),)


def test_addresses_print_as_they_are_written() -> None:
    assert [str(each) for each in parse_servers("a:1,[::1]:2")] == ["a:1", "[::1]:2"]


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("file:./data", "./data"),
        ("file:/var/lib/a,b", "/var/lib/a,b"),
        ("file:///var/lib/tfmq", "/var/lib/tfmq"),
        ("file://localhost/data", "/data"),
        (["file:~/data"], "~/data"),
        ("host:1", None),
        (["file", "host:1"], None),
        (None, None),
    ],
)
def test_a_folder_is_an_address(
    monkeypatch: pytest.MonkeyPatch, written: str | list[str] | None, path: str | None
) -> None:
    monkeypatch.delenv("TFMQ_SERVERS", raising=False)
    assert data_folder_of(written) == path


def test_the_environment_may_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMQ_SERVERS", "file:data")
    assert data_folder_of(None) == "data"
    assert data_folder_of("host:1") is None


@pytest.mark.parametrize(
    "written", ["file:", "file://elsewhere/data", ["file:a", "host:1"], ["file:a", "file:b"]]
)
def test_a_folder_stands_alone_and_has_a_path(written: str | list[str]) -> None:
    with pytest.raises(BadRequest, match="the only address"):
        data_folder_of(written)
