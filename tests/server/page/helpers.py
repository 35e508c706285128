"""The JSON API on a simulated broker: `ApiOnBroker.get` and `post` make one call each."""

from __future__ import annotations

import json
from typing import Any

from tfmq.server.local_connection import LocalSession
from tfmq.server.page.api import VIEWS, Api
from tfmq.server.page.arguments import to_json
from tfmq.server.page.call import Source
from tfmq.server.page.counters import Counters
from tfmq.testing.broker import SimulatedBroker

TURNS_MAX = 10_000


class ApiOnBroker:
    """The API of a broker in this process. A call returns what the browser gets, or raises the error."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self.broker = broker
        self.server = broker._server
        engine = self.server.engine
        assert engine is not None
        self.engine = engine
        self.bytes_counted = (0, 0)
        counters = Counters(
            lambda: (each.log for each in engine.broker.topics.partitions()),
            lambda: self.bytes_counted,
            broker.clock.monotonic,
        )
        source = Source(
            lambda: engine.broker.topics,
            lambda: engine.broker.catalog.state.groups,
            counters.read,
            lambda: engine.broker.group_coordinator.dead_letters,
        )
        self.api = Api(lambda: self.server._welcome(engine), source, broker.clock.monotonic, broker.clock.wall_ms)

    def get(self, path: str, **arguments: Any) -> Any:
        return self.call(path, "GET", arguments)

    def post(self, path: str, **arguments: Any) -> Any:
        return self.call(path, "POST", arguments)

    def call(self, path: str, method: str, arguments: dict[str, Any]) -> Any:
        view = next(each for each in VIEWS if (each.path, each.method) == (path, method))
        ended: list[tuple[Any, BaseException | None]] = []
        self.api.call(view, arguments, LocalSession("a test"), lambda *outcome: ended.append(outcome))
        for _ in range(TURNS_MAX):
            if ended:
                break
            self.broker.clock.advance(seconds=0.001)
        assert ended, "the call does not end"
        (result, error), *others = ended
        assert not others and not self.api.calls_in_progress
        if error is not None:
            raise error
        return json.loads(to_json(result))
