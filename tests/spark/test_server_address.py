"""One broker, and no list of them."""

import pytest

from tfmq.errors import BadRequest
from tfmq.spark.settings import require_one_broker


@pytest.mark.parametrize("servers", ["127.0.0.1:8367", "tfmq://broker", "localhost,"])
def test_one_address(servers: str) -> None:
    require_one_broker(servers)


def test_several_are_refused() -> None:
    with pytest.raises(BadRequest, match="servers must be one broker, HOST:PORT, not "):
        require_one_broker("127.0.0.1:1,127.0.0.1:2")


def test_what_is_no_address() -> None:
    with pytest.raises(BadRequest):
        require_one_broker("127.0.0.1:99999")
