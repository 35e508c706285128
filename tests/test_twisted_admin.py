"""`tfmq.twisted.Admin`: what `tfmq.Admin` gives, in Deferreds. Names and docs are compared in test_faces."""

from typing import Any

import tfmq
from tests.client.fake_broker import listening
from tests.reactor import play
from tests.test_aio_admin import CALLS, broker
from tfmq import twisted


def test_each_method_asks_the_same_and_gives_the_same_as_the_blocking_one() -> None:
    one, other = broker(), broker()
    with listening(one) as servers, tfmq.Admin(servers) as admin:
        expected = [getattr(admin, name)(*given, **named) for name, given, named in CALLS]

    async def ask(reactor: Any) -> list[Any]:
        async with twisted.Admin(servers, reactor=reactor) as admin:
            return [await getattr(admin, name)(*given, **named) for name, given, named in CALLS]

    with listening(other) as servers:
        found = play(ask)
    assert found == expected
    assert other.requests[1:] == one.requests[1:], "behind hello"
