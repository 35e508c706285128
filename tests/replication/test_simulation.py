"""Servers that share a store, with faults at random: nothing acknowledged is lost, doubled or out of order."""

from __future__ import annotations

import logging

import pytest

import tfmq.replication.primary as primary_module
from tests.replication.cluster import Client, Server, World
from tests.scale import scaled
from tfmq.replication.replica import Replica


def make(seed: int, count: int = 3, heartbeat: float = 1.0, **options: float) -> tuple[World, list[Server], Client]:
    world = World(seed, **options)  # type: ignore[arg-type]
    world.settings = world.settings._replace(heartbeat_seconds=heartbeat)
    servers = [Server(world, f"s{number}:8367") for number in range(count)]
    for server in servers:
        server.start()
        world.run(1.0)
    return world, servers, Client(world, servers)


def test_one_server_becomes_primary_and_the_others_follow() -> None:
    world, servers, client = make(1)
    world.run(20)
    assert [each.errors for each in servers] == [[], [], []]
    assert len(world.promotions) == 1 and client.number > 20


@pytest.mark.parametrize("seed", range(12))
def test_a_standby_takes_over_when_the_primary_is_gone_for_a_lease(seed: int) -> None:
    world, servers, client = make(seed, heartbeat=0.05)  # both standbys claim at about the same time
    world.run(10)
    before = client.number
    first = next(each for each in servers if each.primary is not None)
    first.kill()
    world.run(15)
    assert len(world.promotions) == 2 and client.number > before
    assert client.longest_gap < world.settings.lease_seconds + 3
    first.lose_folder()
    first.start()
    world.run(10)
    assert first.replica is not None and first.replica.role == "standby"


def primary_of(servers: list[Server]) -> Server:
    (found,) = [each for each in servers if each.broker is not None and each.is_running]
    return found


def standby_of(servers: list[Server]) -> Replica:
    return next(each.replica for each in servers if each.replica is not None and each.replica.role == "standby")


def test_a_standby_that_asks_for_it_becomes_primary_without_a_pause_to_speak_of() -> None:
    world, servers, client = make(3)
    world.run(10)
    client.longest_gap = 0.0
    standby = standby_of(servers)
    standby.request_hand_over(lambda error: None)
    world.run(10)
    assert primary_of(servers).replica is standby and client.longest_gap < 1.5
    assert len(world.promotions) == 2
    world.run(10)
    assert [each.errors for each in servers] == [[], [], []]


def test_a_primary_without_its_store_refuses_after_half_a_lease_and_serves_again() -> None:
    world, servers, client = make(4)
    world.run(10)
    primary, before = primary_of(servers), client.number
    world.is_down = True
    world.run(world.settings.lease_seconds)
    assert client.number <= before + 1 and "memory" in primary.stalled_reason
    world.is_down = False
    world.run(5)
    assert primary.stalled_reason == "" and client.number > before + 5 and len(world.promotions) == 1


def test_a_primary_that_restarts_goes_on_with_what_only_its_own_disk_has() -> None:
    world, servers, _ = make(5)
    world.run(10)
    primary = primary_of(servers)
    assert primary.broker is not None
    number = primary.broker.numbers[-1] + 1
    # Written, not fsynced, and not in the store yet.
    primary.broker.file.pwritev([b"%08d" % number], len(primary.broker.numbers) * 8)
    primary.kill("everything")
    primary.start()
    world.run(3)
    assert primary.broker is not None and number in primary.broker.numbers
    world.run(5)
    other = next(each for each in servers if each is not primary)
    primary.kill()
    primary.lose_folder()
    world.run(20)
    assert number in primary_of(servers).broker.numbers  # type: ignore[union-attr]
    assert other.errors == []


@pytest.mark.parametrize("is_sync", [True, False])
def test_a_new_server_begins_from_a_snapshot_and_what_it_replaces_is_swept(
    is_sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primary_module, "SNAPSHOT_BYTES", 2_000)
    monkeypatch.setattr(primary_module, "SWEEP_SECONDS", 10.0)
    world = World(6, is_sync=is_sync)
    world.settings = world.settings._replace(history_seconds=20.0)
    servers = [Server(world, f"s{number}") for number in range(2)]
    for server in servers:
        server.start()
        world.run(1)
    client = Client(world, servers)
    world.run(120)
    keys = sorted(world.objects)
    assert sum(key.startswith("manifests/") for key in keys) > 2
    assert "entries/0000000000000001/0000000000000001" not in keys, "the first entries were swept"
    new = Server(world, "s2")
    servers.append(new)
    new.start()
    world.run(5)
    for each in servers[:2]:
        each.kill()
        each.lose_folder()
    world.run(20)
    assert new.broker is not None and client.number > 100 and new.errors == []


def test_an_async_primary_serves_without_its_store_and_stores_a_snapshot_of_what_did_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(primary_module, "BACKLOG_BYTES_MAX", 1_000)
    world, servers, client = make(7, is_sync=False)
    world.run(10)
    before = client.number
    world.is_down = True
    world.run(30)
    assert client.number > before + 100
    world.is_down = False
    world.run(10)
    primary = primary_of(servers)
    count = len(primary.broker.numbers)  # type: ignore[union-attr]
    primary.kill()
    world.run(15)
    assert len(primary_of(servers).broker.numbers) >= count - 40  # type: ignore[union-attr]
    assert [each.errors for each in servers] == [[], [], []]


def test_a_standby_that_falls_behind_says_so_in_its_status_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    world, servers, _ = make(9, count=2)
    world.settings = world.settings._replace(lease_seconds=600.0)
    world.run(10)
    server = next(each for each in servers if each.primary is None)
    replica = server.replica
    assert replica is not None and replica.status("sync")["behind_seconds"] < 1
    server.is_cut_off = True
    world.run(10)
    assert replica.status("sync")["behind_seconds"] > 8 and "cannot be reached" in replica.status("sync")["trouble"]
    assert "cannot be read, and is looked for again" in caplog.text
    server.is_cut_off = False
    world.run(60)
    assert (replica.status("sync")["behind_seconds"], replica.status("sync")["trouble"]) == (0.0, "")
    server.freeze()
    world.run(20)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        server.thaw()
        world.run(60)
    assert [text.partition(":")[0] for text in caplog.messages if "this standby" in text] == [
        "this standby is 20 s behind",
        "this standby has caught up with the primary",
    ]


def test_an_old_copy_of_the_primary_s_folder_takes_nothing_back() -> None:
    world, servers, client = make(8, count=1)
    world.run(10)
    (server,) = servers
    copy = server.disk.crash(keep="everything")
    world.run(60)
    acked = client.number
    server.kill()
    server.disk = copy
    server.start()
    world.run(120)  # it reads more than a thousand entries one after the other, and waits for a lease
    assert server.errors == [] and client.number > acked
    assert any("deposed" in name for name in server.disk.list("/srv/data/replica"))


COURSES = [(seed, True) for seed in range(scaled(2000, 20))] + [(seed, False) for seed in range(scaled(500, 5))]


@pytest.mark.parametrize(("seed", "is_sync"), COURSES)
def test_random_courses_lose_and_double_nothing(seed: int, is_sync: bool) -> None:
    world, servers, client = make(seed, is_sync=is_sync)
    generator = world.generator
    world.delay = generator.choice((0.005, 0.02, 0.1))
    for _ in range(generator.randint(5, 30)):
        world.failing = generator.choice((0.0, 0.0, 0.1, 0.3))
        world.is_down = generator.random() < 0.1
        server = generator.choice(servers)
        choice = generator.random()
        if choice < 0.3 and server.is_running:
            server.kill(generator.choice(("nothing", "some", "everything")))
        elif choice < 0.35 and not server.is_running and sum(each.is_running for each in servers) >= 1:
            server.lose_folder()
        elif choice < 0.5 and server.is_running:
            server.freeze()
        elif choice < 0.6:
            server.is_cut_off = not server.is_cut_off
        elif choice < 0.7 and server.replica is not None and server.replica.role == "standby" and not server.is_frozen:
            server.replica.request_hand_over(lambda error: None)
        for each in servers:
            if generator.random() < 0.4:
                if not each.is_running and not each.errors:
                    each.start()
                elif each.is_frozen:
                    each.thaw()
        world.run(generator.choice((0.5, 2.0, 8.0)))
    world.failing, world.is_down = 0.0, False
    for each in servers:
        each.is_cut_off = False
        if each.is_frozen:
            each.thaw()
        if not each.is_running and not each.errors:
            each.start()
    before = client.number
    world.run(40)
    assert [each.errors for each in servers] == [[], [], []]
    assert client.number > before, "the servers do not serve after all faults have ended"
    for each in servers:
        if each.broker is not None and each.broker.is_serving:
            each.broker.check()
