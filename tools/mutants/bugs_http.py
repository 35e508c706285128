"""Planted bugs: HTTP: health that is not true, requests of other sites, clients that hold a connection."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

TESTS: Final = ["tests/server/test_http.py"]
METRICS: Final = ["tests/server/test_metrics.py"]

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
        "            elif bound_http is None:\n",
        "            elif bound_http is not None:\n",
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
    Mutant(
        "sends-are-not-counted",
        "each batch is counted in the histogram of sends",
        "tfmq/broker/produce.py",
        "        self._writes.times.record(self._writes.monotonic() - self._started_at)\n",
        "",
        METRICS,
    ),
    Mutant(
        "waiting-counts-as-reading",
        "a fetch that waited for messages is in no histogram",
        "tfmq/broker/fetch.py",
        "        if poll.timer is None:\n            self.times.record(",
        "        if poll.started_at:\n            self.times.record(",
        METRICS,
    ),
    Mutant(
        "lag-of-one-partition",
        "the lag of a group is that of all its partitions",
        "tfmq/server/survey.py",
        "            figures.lags[group, topic] = figures.lags.get((group, topic), 0) + messages\n",
        "            figures.lags[group, topic] = messages\n",
        METRICS,
    ),
    Mutant(
        "dead-letters-are-counted-again",
        "a dead letter is counted once, however often its member reports it",
        "tfmq/broker/groups/coordinator.py",
        "            self.dead_letters[name] = self.dead_letters.get(name, 0) + reported - member.dead_letters\n",
        "            self.dead_letters[name] = self.dead_letters.get(name, 0) + reported\n",
        METRICS,
    ),
    Mutant(
        "the-last-dead-letters-are-not-reported",
        "a consumer that ends reports the dead letters since its last heartbeat",
        "tfmq/client/consumer/membership.py",
        "LeaveGroup(self.group, self.member_id, self.generation, dead_letters)",
        "LeaveGroup(self.group, self.member_id, self.generation)",
        METRICS,
    ),
    Mutant(
        "a-scrape-stops-the-broker",
        "a scrape of many partitions lets the broker do other work",
        "tfmq/server/survey.py",
        "                if self._now() > deadline:\n",
        "                if self._now() < 0:\n",
        METRICS,
    ),
)
