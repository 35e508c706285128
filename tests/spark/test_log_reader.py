"""Addresses of logs, and what is opened there."""

import pickle

import pytest

from tfmq.errors import BadRequest
from tfmq.spark.log_reader import SourceAddress, open_log_reader
from tfmq.spark.wire_reader import BrokerLogReader


def test_an_address_travels_to_other_processes() -> None:
    address = SourceAddress(servers="10.0.0.1:8367", timeout=7.0)
    assert pickle.loads(pickle.dumps(address)) == address


@pytest.mark.parametrize("address", [SourceAddress(), SourceAddress(servers="x:1", path="/data")])
def test_exactly_one_place_is_named(address: SourceAddress) -> None:
    with pytest.raises(BadRequest, match="either servers or path"):
        open_log_reader(address)


def test_servers_are_read_over_the_wire() -> None:
    with open_log_reader(SourceAddress(servers="127.0.0.1:1")) as logs:
        assert isinstance(logs, BrokerLogReader)
