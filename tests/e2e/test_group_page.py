"""docs/protocol.md is enough to write a member of a group from: this one knows its section on groups, and no client."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.test_protocol_page import PageClient
from tests.e2e.test_protocol_page import port as port

METADATA, CREATE_TOPIC, JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, COMMIT_OFFSETS = 10, 11, 40, 41, 42, 43

TOPIC, GROUP = "page-groups", "page-members"


class PageMember:
    """What it holds, by the rules of the page."""

    def __init__(self, client: PageClient, name: str) -> None:
        self.client, self.name = client, name
        reply, _ = client.call(JOIN_GROUP, GROUP, name, [TOPIC], 20_000)
        member, self.generation, granted, self.note = reply
        assert member == name
        self.held = {tuple(row[:3]): row[3] for row in granted}
        self.leaving: set[Any] = set()

    def beat(self, wait_ms: int = 0) -> None:
        held = [[*key, key in self.leaving] for key in self.held]
        reply, _ = self.client.call(HEARTBEAT, GROUP, self.name, self.generation, held, wait_ms)
        self.generation, assigned, self.note, forgotten = reply
        assert forgotten is False
        if assigned is not None:
            share = {tuple(row[:3]): row[3] for row in assigned}
            self.leaving = self.held.keys() - share.keys()
            self.held = {**self.held, **share}

    def finish(self) -> None:
        self.held = {key: grant for key, grant in self.held.items() if key not in self.leaving}
        self.leaving = set()
        self.beat()

    def commit(self, *partitions: int) -> list[Any]:
        incarnation = next(iter(self.held))[1]
        rows = [[TOPIC, incarnation, each, 0] for each in partitions]
        return self.client.call(COMMIT_OFFSETS, GROUP, self.name, self.generation, rows)[0]

    @property
    def numbers(self) -> list[int]:
        return sorted(key[2] for key in self.held.keys() - self.leaving)


@pytest.fixture
def clients(port: int) -> Iterator[list[PageClient]]:
    made = [PageClient(port) for _ in range(2)]
    yield made
    for each in made:
        each.socket.close()


def test_a_partition_is_handed_over_as_the_page_says(clients: list[PageClient]) -> None:
    clients[0].call(CREATE_TOPIC, TOPIC, 2, {})
    ada = PageMember(clients[0], "ada")
    bob = PageMember(clients[1], "bob")
    assert (ada.numbers, ada.note, bob.numbers) == ([0, 1], "", [])
    assert "ada" in bob.note
    ada.beat(5000)
    assert (ada.numbers, len(ada.held)) == ([0], 2)
    bob.beat()
    assert bob.numbers == [] and ada.commit(0, 1) == [2, []]
    ada.finish()
    bob.beat(5000)
    assert bob.numbers == [1]
    assert bob.commit(0, 1) == [1, [[TOPIC, 0]]]
    assert clients[0].refused(COMMIT_OFFSETS, GROUP, "ada", ada.generation, [[*next(iter(bob.held)), 0]]) == "fenced"
    assert clients[0].call(LEAVE_GROUP, GROUP, "ada", ada.generation)[0] == [True]
    bob.beat(5000)
    assert bob.numbers == [0, 1]


def test_a_heartbeat_that_waits_is_ended_by_a_newer_one(clients: list[PageClient]) -> None:
    clients[0].call(CREATE_TOPIC, "page-waits", 1, {})
    (name, generation, granted, _), _ = clients[0].call(JOIN_GROUP, "page-waiting", "", ["page-waits"])
    held = [[*row[:3], False] for row in granted]
    older = clients[0].send(HEARTBEAT, "page-waiting", name, generation, held, 9000)
    newer = clients[0].send(HEARTBEAT, "page-waiting", name, generation, held, 0)
    replies = {correlation: fields for correlation, fields, _ in (clients[0].receive(), clients[0].receive())}
    assert replies == {each: [generation, None, "", False] for each in (older, newer)}
    stranger = [["page-waiting", "nobody", 1, [], 0]]
    assert [clients[1].refused(HEARTBEAT, *each) for each in stranger] == ["fenced"]
