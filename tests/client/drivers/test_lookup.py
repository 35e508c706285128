"""From the address that a user wrote to the one that a socket takes."""

from pathlib import Path

from tfmq.client.connection.addresses import BrokerAddress, LocalBrokerAddress
from tfmq.client.drivers.socket import resolve_address
from tfmq.errors import ConnectionFailed


def test_an_address_of_numbers_is_what_it_is() -> None:
    found = resolve_address(BrokerAddress("127.0.0.1", 8367))
    assert isinstance(found, list)
    assert found[0][4] == ("127.0.0.1", 8367)


def test_a_name_that_is_none_is_told_and_not_raised() -> None:
    found = resolve_address(BrokerAddress("nowhere.invalid", 1))
    assert isinstance(found, OSError)
    assert "nowhere.invalid cannot be looked up" in str(found)


def test_a_folder_that_cannot_be_had_is_told_and_not_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = resolve_address(LocalBrokerAddress(str(tmp_path / "file")))
    assert isinstance(found, ConnectionFailed)


def test_a_broker_that_is_not_ready_is_told_and_not_raised(tmp_path: Path) -> None:
    found = resolve_address(LocalBrokerAddress(str(tmp_path), lambda path, descriptor: None))
    assert isinstance(found, ConnectionFailed)
    assert found.retriable
