"""Who is reached under which address: the network's brokers, and those in this process."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import tfmq
from tfmq.client.connection.addresses import BrokerAddress
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.factory import ClientParts, in_process_brokers, make_client_parts
from tfmq.client.producer import interpreter_exit
from tfmq.errors import BadRequest

HERE = BrokerAddress("broker-in-a-test.invalid", 1)


class Driver:
    def __init__(self, link: ClientConnection) -> None:
        self.link = link


def test_a_client_has_the_name_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_client_parts("a:1", Driver).link.client == "tfmq-python"
    monkeypatch.setenv("TFMQ_CLIENT_ID", "web-1")
    assert make_client_parts("a:1", Driver).link.client == "web-1"
    assert make_client_parts("a:1", Driver, client_id="web-2").link.client == "web-2"
    for wrong in ("", "x" * 101, "a b", "a\nb", 7):
        with pytest.raises(BadRequest, match="1 to 100 letters"):
            make_client_parts("a:1", Driver, client_id=wrong)  # type: ignore[arg-type]


class House:
    """A broker in this process, whose clock stands at noon."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []

    def make_client_parts(
        self, servers: Sequence[BrokerAddress], driver_type: Callable[[ClientConnection], Any]
    ) -> ClientParts[Any]:
        self.asked.append((tuple(servers), driver_type))
        link = ClientConnection(servers, lambda: 12.0)
        return ClientParts(link, driver_type(link), lambda: 43_200.0)


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    in_process_brokers[HERE] = made
    yield made
    in_process_brokers.pop(HERE, None)


def test_an_unchanged_address_is_the_networks() -> None:
    link, driver, wall_clock = make_client_parts("127.0.0.1:1", Driver)
    assert link.servers == (BrokerAddress("127.0.0.1", 1),)
    assert driver.link is link
    assert wall_clock() > 1_700_000_000


def test_the_broker_that_moved_in_makes_link_driver_and_time(house: House) -> None:
    link, driver, wall_clock = make_client_parts(str(HERE), Driver)
    assert house.asked == [((HERE,), Driver)]
    assert (link.now(), driver.link, wall_clock()) == (12.0, link, 43_200.0)


def test_its_address_may_come_from_the_environment(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMQ_SERVERS", f"tfmq://{HERE}")
    assert make_client_parts(None, Driver).link.now() == 12.0


def test_who_moved_out_is_not_found_any_more(house: House) -> None:
    in_process_brokers.pop(HERE, None)
    in_process_brokers.pop(HERE, None)
    make_client_parts(str(HERE), Driver)
    assert house.asked == []


def test_an_address_that_makes_no_sense_is_refused_as_ever() -> None:
    with pytest.raises(BadRequest, match="not a broker's address"):
        make_client_parts("http://x", Driver)


def test_every_api_variant_comes_to_the_broker_in_the_process(house: House) -> None:
    faces: list[Any] = [tfmq.Producer, tfmq.Consumer, tfmq.Admin]
    faces += [tfmq.aio.Producer, tfmq.aio.Consumer, tfmq.aio.Admin]
    for face in faces:
        options = {"topics": "orders"} if face.__name__ == "Consumer" else {}
        before = len(house.asked)
        made = face(str(HERE), **options)
        assert len(house.asked) == before + 1
        if face.__name__ == "Producer":
            interpreter_exit.open_producers.discard(made._core.owner)
