"""The name that HELLO, STATUS and a neighbour's question get."""

from tfmq.server.server import server_name


def test_the_server_says_its_name_and_version() -> None:
    name, version = server_name().split()
    assert name == "tfmq"
    assert version[0].isdigit()
