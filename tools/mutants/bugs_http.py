"""Planted bugs: HTTP: health that is not true, requests of other sites, clients that hold a connection."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

TESTS: Final = ["tests/server/test_http.py"]

HTTP: Final = (
    Mutant(
        "ready-with-a-stopped-log",
        "/ready is 503 while a log is stopped",
        "tfmq/broker/broker.py",
        "            if isinstance(each, str) or each.log.stopped is not None\n",
        "            if isinstance(each, str)\n",
        TESTS,
    ),
    Mutant(
        "ready-while-stopping",
        "/ready is 503 while the broker stops",
        "tfmq/server/server.py",
        "        if not self._broker.is_open:\n            return [{",
        "        if self._listener is not None and not self._broker.is_open:\n            return [{",
        TESTS,
    ),
    Mutant(
        "silent-while-recovering",
        "health is answered while the broker recovers",
        "tfmq/server/server.py",
        "            if bound_http is None:\n",
        "            if bound_http is not None:\n",
        TESTS,
    ),
    Mutant(
        "any-host-is-this-server",
        "a request for another host is refused",
        "tfmq/server/http.py",
        "    if not host:\n        return False\n",
        "    return bool(host)\n",
        TESTS,
    ),
    Mutant(
        "two-hosts-are-one",
        "a request with two Host headers is refused",
        "tfmq/server/http.py",
        "if len(hosts) != 1 or not is_own_host",
        "if not hosts or not is_own_host",
        TESTS,
    ),
    Mutant(
        "slow-requests-stay",
        "a request must be complete in time",
        "tfmq/server/http.py",
        "callLater(int(limits.HTTP_REQUEST_SECONDS), self._expired)",
        "callLater(int(limits.HTTP_ANSWER_SECONDS), self._expired)",
        TESTS,
    ),
    Mutant(
        "chunks-without-end",
        "the body of a request is limited, also where its length is not announced",
        "tfmq/server/http.py",
        "        if self._size > limits.HTTP_BODY_BYTES:\n",
        "        if self._size < 0:\n",
        TESTS,
    ),
)
