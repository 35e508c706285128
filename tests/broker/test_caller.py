"""What the broker asks of its callers is what the server and the tests offer."""

import inspect

from tests.broker import helpers
from tfmq.broker.reply import Reply, Session
from tfmq.server import session as server


def methods(shape: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(shape) if not name.startswith("_")}


def test_both_implement_replies_and_sessions() -> None:
    assert methods(Reply) <= methods(helpers.Answer) | {"correlation"}
    assert methods(Session) <= methods(helpers.Session) | {"identity", "number", "operator"}
    assert methods(Reply) <= methods(server.Reply)
    assert methods(Session) <= methods(server.Session) | {"number", "operator"}
