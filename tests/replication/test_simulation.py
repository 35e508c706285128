"""Servers that share a store, with faults at random: nothing acknowledged is lost, doubled or out of order."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest

import tfmq.replication.primary as primary_module
import tfmq.replication.replica as replica_module
from tests.replication.cluster import (
    FOLDER,
    LOG,
    Client,
    InlineExecutor,
    Server,
    World,
    cause_faults,
    content_of,
    end_faults,
)
from tests.scale import scaled
from tfmq.errors import NotAllowed
from tfmq.replication.entries import (
    Begin,
    EntryKind,
    Fence,
    HandOver,
    Position,
    Term,
    encode_entry,
    entry_key,
    handover_key,
    parse_position,
    term_key,
)
from tfmq.replication.errors import ReplicationError, SnapshotTooSlow, StoreUnavailable
from tfmq.replication.follower import Follower
from tfmq.replication.local_state import LocalStateFile
from tfmq.replication.materialize import MARKER_PATH
from tfmq.replication.operations import OperationApplier
from tfmq.replication.replica import Replica
from tfmq.replication.snapshot import Snapshotter
from tfmq.replication.verify import verify


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
    begun = standby.status("sync")
    standby.request_hand_over(lambda error: None)
    for _ in range(1_000):
        world.run(0.005)
        status = standby.status("sync")
        # `tfmq replica promote` would take the primary before for another one that was faster.
        assert status["term"] == begun["term"] or status["primary"] in ("", standby._address), status
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


def test_failovers_one_after_another_do_not_leave_more_and_more_entries_to_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each term is too short for a snapshot of its own, and a server that begins anew reads what no snapshot has."""
    monkeypatch.setattr(primary_module, "SNAPSHOT_ENTRIES", 400)
    monkeypatch.setattr(primary_module, "SWEEP_SECONDS", 3.0)  # a sweep does not put a snapshot off
    world, servers, _ = make(9, count=2)
    world.run(60)
    assert sum(key.startswith("manifests/") for key in world.objects) > 1, "the first is that of the first start"
    counts = []
    for _ in range(12):
        world.run(10)
        first = primary_of(servers)
        first.kill()
        world.run(12)
        first.lose_folder()
        first.start()
        world.run(3)
        (standby,) = [each.replica for each in servers if each is first]
        assert standby is not None
        counts.append(standby._materialized_count)
    assert max(counts) < 2 * 400


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
    world, servers, _ = make(3, count=2)
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
    assert replica.status("sync")["behind_seconds"] < 1 and replica.status("sync")["trouble"] == ""
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


def test_an_old_copy_of_the_primary_s_folder_takes_nothing_back(caplog: pytest.LogCaptureFixture) -> None:
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
    assert "it is made from the store again" in caplog.text


def fail_once(monkeypatch: pytest.MonkeyPatch, method: str, error: ReplicationError) -> list[int]:
    """Let the next call of a method of `Snapshotter` do its work, and fail. The list is empty after it."""
    original, left = getattr(Snapshotter, method), [1]

    def failing(*arguments: Any) -> Any:
        result = original(*arguments)
        if left:
            left.pop()
            raise error
        return result

    monkeypatch.setattr(Snapshotter, method, failing)
    return left


@pytest.mark.parametrize("method", ["upload", "store_manifest"])
def test_what_was_recorded_before_a_base_is_not_stored_after_it(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(primary_module, "BACKLOG_BYTES_MAX", 1_000)
    world, servers, client = make(7, is_sync=False)
    world.run(10)
    primary = primary_of(servers)
    left = fail_once(monkeypatch, method, StoreUnavailable("once"))
    world.is_down = True
    world.run(30)
    world.is_down = False
    while left:
        world.run(0.01)
    assert primary.primary is not None
    primary.primary.disk.create(f"{FOLDER}/new").close()  # it would be created twice
    world.run(5)
    client.pause = 1e9
    world.run(5)
    assert [each.replica.trouble for each in servers if each.replica is not None] == ["", "", ""]
    assert {content_of(each) == content_of(primary) for each in servers} == {True}


def test_a_base_is_not_waited_for_in_unbounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primary_module, "BACKLOG_BYTES_MAX", 1_000)
    world, servers, client = make(7, is_sync=False)
    world.run(10)
    primary = primary_of(servers).primary
    assert primary is not None
    file = primary.disk.create(f"{FOLDER}/changed")
    upload, left = Snapshotter.upload, [3]

    def upload_slowly(*arguments: Any) -> Any:
        content = upload(*arguments)
        if left[0]:
            left[0] -= 1
            file.pwritev([bytes([left[0]]) * 3_000], 0)  # meanwhile
            primary.disk.cut()
        return content

    monkeypatch.setattr(Snapshotter, "upload", upload_slowly)
    world.is_down = True
    world.run(30)
    world.is_down = False
    while not primary.may_end_cleanly:
        world.run(0.01)
        assert primary.unstored_bytes < 2_000
    client.pause = 1e9
    world.run(5)
    assert left == [0] and {content_of(each) == content_of(primary_of(servers)) for each in servers} == {True}


def test_a_server_that_stops_before_its_base_is_stored_stores_it_at_its_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(primary_module, "BACKLOG_BYTES_MAX", 1_000)
    world, servers, client = make(7, is_sync=False)
    world.run(10)
    primary = primary_of(servers)
    world.is_down = True
    world.run(30)
    world.is_down = False
    world.run(0.2)
    assert primary.primary is not None and not primary.primary.may_end_cleanly
    written = content_of(primary)
    primary.stop()
    assert content_of(primary)[LOG].startswith(written[LOG])
    primary.start()
    world.run(5)
    client.pause = 1e9
    world.run(5)
    assert primary_of(servers) is primary
    assert {content_of(each) == content_of(primary) for each in servers} == {True}


def test_a_server_that_is_stopped_during_its_recovery_stores_what_that_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, servers, client = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    assert primary.primary is not None
    primary.primary.has_broker = False  # it recovers
    primary.stop(at_end=lambda: primary.disk.write_file(f"{FOLDER}/late", b"recovered"))
    primary.start()
    world.run(5)
    client.pause = 1e9
    world.run(5)
    assert primary_of(servers) is primary and content_of(standby) == content_of(primary)


@pytest.mark.parametrize("is_primary", [True, False])
def test_a_power_failure_after_a_stop_takes_nothing_back_that_the_other_server_has(is_primary: bool) -> None:
    world, servers, client = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    assert primary.primary is not None
    primary.primary.disk.create(f"{FOLDER}/new").close()  # its name is not fsynced
    world.run(3)
    (primary if is_primary else standby).stop(keep="nothing")
    (primary if is_primary else standby).start()
    world.run(10)
    client.pause = 1e9
    world.run(5)
    assert f"{FOLDER}/new" in content_of(primary) and content_of(standby) == content_of(primary)


def test_a_primary_whose_folder_was_repaired_goes_on_with_it() -> None:
    world, servers, client = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    primary.stop()
    LocalStateFile(primary.disk, FOLDER).note_change()
    primary.disk.write_file(f"{FOLDER}/repaired", b"by an operator")
    primary.start()
    world.run(5)
    client.pause = 1e9
    world.run(5)
    assert primary_of(servers) is primary and f"{FOLDER}/repaired" in content_of(primary)
    assert content_of(standby) == content_of(primary)


def test_a_primary_that_comes_back_to_an_earlier_store_stores_its_folder_again() -> None:
    world, servers, client = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    standby.stop()
    world.run(3)
    primary.stop()
    state = LocalStateFile(primary.disk, FOLDER).read(bytes)
    primary.disk.write_file(f"{FOLDER}/elsewhere", b"written while it used another store")
    LocalStateFile(primary.disk, FOLDER).write(state._replace(store="another"))
    primary.start()
    world.run(5)
    standby.start()
    world.run(5)
    client.pause = 1e9
    world.run(5)
    assert primary_of(servers) is primary and content_of(standby) == content_of(primary)
    assert f"{FOLDER}/elsewhere" in content_of(standby)


def test_what_a_standby_wrote_as_a_broker_without_replication_is_moved_aside() -> None:
    world, servers, client = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    standby.stop()
    LocalStateFile(standby.disk, FOLDER).note_broker()
    log = standby.disk.read_file(LOG)
    standby.disk.write_file(LOG, log + b"alone")
    standby.start()
    world.run(5)
    client.pause = 1e9
    world.run(5)
    assert primary_of(servers) is primary and content_of(standby) == content_of(primary)
    (aside,) = [name for name in standby.disk.list(f"{FOLDER}/replica") if name.startswith("deposed-")]
    assert standby.disk.read_file(f"{FOLDER}/replica/{aside}/log") == log + b"alone"


def test_a_standby_that_stops_at_a_base_makes_its_folder_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, servers, client = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    primary.kill("everything")
    primary.disk.write_file(f"{FOLDER}/written", b"not in the store")
    found: list[Position] = []
    monkeypatch.setattr(
        Follower, "_rebased", property(lambda self: found.append, lambda self, call: None), raising=False
    )
    primary.start()
    while not found:
        world.run(0.01)
    monkeypatch.undo()
    standby.stop()
    standby.start()
    world.run(5)
    client.pause = 1e9
    world.run(5)
    assert content_of(standby) == content_of(primary) and f"{FOLDER}/written" in content_of(standby)


def test_a_standby_that_stops_while_it_becomes_primary_does_not_call_its_folder_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, servers, _ = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    primary.kill()
    forced: list[bool] = []
    monkeypatch.setattr(OperationApplier, "force", lambda self: forced.append(True))
    while not forced:
        world.run(0.001)
    standby.stop()
    assert not LocalStateFile(standby.disk, FOLDER).read(world.generator.randbytes).is_clean


def test_a_standby_that_was_away_for_longer_than_the_history_ends_no_term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primary_module, "SNAPSHOT_BYTES", 2_000)
    monkeypatch.setattr(primary_module, "SWEEP_SECONDS", 10.0)
    world = World(6)
    world.settings = world.settings._replace(history_seconds=20.0)
    stopped, frozen, primary = servers = [Server(world, f"s{number}") for number in range(3)]
    for server in reversed(servers):
        server.start()
        world.run(1)
    client = Client(world, servers)
    world.run(10)
    stopped.stop()
    frozen.freeze()
    world.run(120)
    stopped.start()
    frozen.thaw()
    world.run(30)
    client.pause = 1e9
    world.run(5)
    assert len(world.promotions) == 1 and [each.errors for each in servers] == [[], [], []]
    assert {content_of(each) == content_of(primary) for each in servers} == {True}


def test_a_standby_that_gets_another_store_makes_its_folder_again() -> None:
    world, servers, client = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    standby.stop()
    primary.stop()
    world.objects.clear()
    world.store_name = "another"
    primary.start()
    world.run(60)  # it has stored other entries at the positions that the standby knows
    standby.start()
    world.run(5)
    client.pause = 1e9
    world.run(5)
    assert content_of(standby) == content_of(primary) and len(world.promotions) == 2


@pytest.mark.parametrize("was_broker", [False, True])
def test_a_standby_does_not_become_the_first_primary_of_an_empty_store(was_broker: bool) -> None:
    """`was_broker`: a broker without replication has run in its folder since."""
    world, servers, client = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    standby.stop()
    world.run(10)
    primary.stop()
    written = content_of(primary)[LOG]
    world.objects.clear()
    if was_broker:
        LocalStateFile(standby.disk, FOLDER).note_broker()
    else:
        world.store_name = "another"
    standby.start()
    world.run(20)
    assert standby.replica is not None and standby.broker is None
    assert "start the primary first" in standby.replica.status("sync")["trouble"] and not world.objects
    if was_broker:
        return  # the primary waits for this store, too
    primary.start()
    world.run(10)
    client.pause = 1e9
    world.run(5)
    assert primary_of(servers) is primary and content_of(primary)[LOG].startswith(written)
    assert content_of(standby) == content_of(primary) and standby.replica.status("sync")["trouble"] == ""


def test_a_primary_whose_store_is_empty_all_at_once_does_not_begin_anew_there() -> None:
    """The file system of the store may not be mounted, and another server be primary by now."""
    world, servers, _ = make(5, count=1)
    world.run(10)
    (primary,) = servers
    primary.kill()
    world.run(5)  # what was under way arrives
    stored = dict(world.objects)
    world.objects.clear()
    primary.start()
    world.run(20)
    assert primary.replica is not None and primary.broker is None and not world.objects
    assert "restore the store" in primary.replica.status("sync")["trouble"]
    primary.kill()
    world.objects.update(stored)
    primary.start()
    world.run(10)
    assert primary.broker is not None


def test_a_primary_whose_store_is_emptied_under_it_says_so_and_refuses() -> None:
    """It takes entries as before, of which no standby and no restore finds one."""
    world, servers, client = make(5, count=1)
    world.run(10)
    (primary,) = servers
    world.run(0.2)
    world.objects.clear()
    world.run(2 * world.settings.heartbeat_seconds)
    assert primary.replica is not None and "has lost terms/" in primary.replica.status("sync")["trouble"]
    assert "has lost terms/" in primary.stalled_reason
    number = client.number
    world.run(10)
    assert client.number == number


def test_a_standby_whose_state_was_removed_begins_in_an_empty_store() -> None:
    world, servers, client = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    client.pause = 1e9
    world.run(5)
    standby.stop()
    primary.kill()
    world.run(1)  # what was on its way arrives
    world.objects.clear()
    state = f"{FOLDER}/replica/state"
    standby.disk.unlink(state)
    standby.disk.create(f"{FOLDER}/{MARKER_PATH}").close()
    standby.start()
    world.run(10)
    assert standby.replica is not None and "incomplete" in standby.replica.trouble and standby.broker is None
    standby.stop()
    standby.disk.unlink(f"{FOLDER}/{MARKER_PATH}")
    standby.start()
    world.run(10)
    assert standby.broker is not None and len(standby.broker.numbers) > 20 and standby.errors == []


@pytest.mark.parametrize("pause", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("delay", [0.02, 0.1, 0.3])
def test_of_servers_that_are_started_together_one_becomes_primary_soon(delay: float, pause: float) -> None:
    """They claim at once, and end each other's terms, which begin and have nothing."""
    for seed in range(max(6, scaled(60))):
        world = World(seed, delay=delay)
        servers = [Server(world, f"s{number}:8367") for number in range(3)]
        for server in servers:
            server.start()
            world.run(pause)
        world.run(20)
        assert [each.errors for each in servers] == [[], [], []]
        assert len([each for each in servers if each.broker is not None and each.broker.is_serving]) == 1, seed


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_first_term_whose_claimant_died_before_it_served_is_taken_over(has_begun: bool) -> None:
    world = World(1)
    world.objects[term_key(1)] = Term(1, "dead", "dead:8367", "0" * 16).encode(), 0.0
    if has_begun:  # and its term was ended by another one, which died, too
        kinds = {EntryKind.BEGIN: Begin(None, "dead", "dead:8367").encode(), EntryKind.FENCE: Fence("other").encode()}
        for slot, (kind, body) in enumerate(kinds.items()):
            position = Position(1, slot)
            world.objects[entry_key(position)] = encode_entry(kind, position, 0, [body]), 0.0
        world.objects[term_key(2)] = Term(2, "other", "other:8367", "1" * 16).encode(), 0.0
    server = Server(world, "s0:8367")
    server.start()
    world.run(30)
    assert server.broker is not None and server.errors == [] and server.is_running
    standby = Server(world, "s1:8367")
    standby.start()
    world.run(10)
    assert content_of(standby) == content_of(server)
    assert not verify(server.link, InlineExecutor()).is_damaged


def test_each_standby_comes_to_the_end_of_a_term_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it read the FENCE again, it would compare its whole folder after the next term has begun."""
    came: list[tuple[str, Position]] = []
    pass_fence = Replica._pass_fence

    def pass_and_note(self: Replica, follower: Follower, position: Position, fence: Fence) -> Any:
        came.append((self._address, position))
        return pass_fence(self, follower, position, fence)

    monkeypatch.setattr(Replica, "_pass_fence", pass_and_note)
    for seed in range(max(4, scaled(40))):
        came.clear()
        world, servers, _ = make(seed, heartbeat=2.0, delay=0.1)
        world.run(20)
        primary_of(servers).stop()
        world.run(20)
        assert len(came) == len(set(came)) == 2 and [each.errors for each in servers] == [[], [], []]


@pytest.mark.parametrize("method", ["upload", "store_manifest"])
def test_a_first_snapshot_that_takes_too_long_is_begun_again(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    left = fail_once(monkeypatch, method, SnapshotTooSlow("the snapshot took more than 1 s"))
    world, servers, client = make(5, count=1)
    server = servers[0]
    while left:
        world.run(0.01)
    world.run(0.1)
    assert server.replica is not None and "took more than" in server.replica.status("sync")["trouble"]
    world.run(15)
    assert server.broker is not None and server.errors == [] and client.number > 20
    assert server.replica.status("sync")["trouble"] == "" and len(world.promotions) == 1


def test_a_note_of_the_position_does_not_replace_what_a_stop_writes() -> None:
    world, servers, _ = make(5, count=2)
    world.run(10)
    primary = primary_of(servers)
    assert primary.replica is not None
    run, left = primary.run_job, [1]

    def run_note_late(work: Any, done: Any) -> None:
        if left and getattr(getattr(work, "func", None), "__func__", None) is LocalStateFile.write:
            left.pop()
            primary.call_later(1.0, partial(run, work, done))
        else:
            run(work, done)

    primary.replica._run = run_note_late
    while left:
        world.run(0.01)
    primary.stop(at_end=lambda: world.run(2))
    assert LocalStateFile(primary.disk, FOLDER).read(world.generator.randbytes).is_clean


def test_who_becomes_primary_cannot_ask_itself_for_a_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would answer it, and no other server could ask in this term."""
    monkeypatch.setattr(Snapshotter, "upload", lambda self, view: raise_error(StoreUnavailable("it is slow")))
    world, (server,), _ = make(3, count=1)
    world.run(10)
    assert server.replica is not None and server.replica.primary is None
    answers: list[BaseException | None] = []
    server.replica.request_hand_over(answers.append)
    world.run(1)
    assert "needs no hand-over" in str(answers[0]) and isinstance(answers[0], NotAllowed)
    assert not [key for key in world.objects if key.startswith("handovers/")]


def raise_error(error: Exception) -> Any:
    raise error


def test_a_standby_whose_hand_over_another_has_asked_for_first_is_told_so() -> None:
    world, servers, _ = make(3)
    world.run(10)
    first, second = [each.replica for each in servers if each.replica is not None and each.broker is None]
    answers: list[BaseException | None] = []
    for each in (first, first, second):
        each.request_hand_over(answers.append)
        world.run(0.15)
    assert answers[:2] == [None, None] and first._state.member in str(answers[2])
    assert isinstance(answers[2], NotAllowed)
    world.run(10)
    assert primary_of(servers).replica is first


def test_a_request_for_a_hand_over_is_void_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that was under way while the store did not answer. After it, standbys may ask again."""
    world, servers, _ = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    replica = standby.replica
    assert replica is not None
    late = HandOver(replica._state.member, world.clock.wall_ms() - 1)
    world.objects[handover_key(1)] = late.encode(), world.clock.time()
    world.run(5)
    assert primary_of(servers) is primary and handover_key(1) not in world.objects
    answers: list[Any] = []
    put = replica._store.put_new

    def slow(key: str, data: bytes) -> bool:
        stored = put(key, data)
        monkeypatch.setattr(replica_module, "HAND_OVER_SECONDS", -1.0)
        return stored

    with monkeypatch.context() as patch:
        patch.setattr(replica._store, "put_new", slow)
        replica.request_hand_over(answers.append)
        world.run(5)
    assert "the request is void" in str(answers[0]) and handover_key(1) not in world.objects
    # One of another standby is left alone, whatever became of this one's.
    other = HandOver("other", world.clock.wall_ms() + 60_000).encode()

    def replaced(key: str, data: bytes) -> bool:
        put(key, data)
        world.objects[key] = other, world.clock.time()
        monkeypatch.setattr(replica_module, "HAND_OVER_SECONDS", -1.0)
        return True

    monkeypatch.setattr(replica_module, "HAND_OVER_SECONDS", 60.0)
    with monkeypatch.context() as patch:
        patch.setattr(replica._store, "put_new", replaced)
        patch.setattr(primary.primary, "_handed_over", lambda member: None)
        replica.request_hand_over(answers.append)
        world.run(0.2)
        assert world.objects.pop(handover_key(1))[0] == other
        world.run(1)
    assert primary.primary is not None
    primary.primary._is_handed_over = False  # to "other", which does not exist
    del answers[1:]
    assert primary_of(servers) is primary
    monkeypatch.setattr(replica_module, "HAND_OVER_SECONDS", 60.0)
    for _ in range(2):
        replica.request_hand_over(answers.append)
    world.run(15)
    assert answers[1:] == [None, None] and primary_of(servers) is standby


@pytest.mark.parametrize("body", [b"", b"\xff 1", b"a" * 65 + b" 1", b"a", b"a 1000000000000000"])
def test_a_damaged_request_for_a_hand_over_is_in_the_status(body: bytes) -> None:
    world, servers, client = make(3)
    world.run(10)
    replica = primary_of(servers).replica
    world.objects[handover_key(1)] = body, world.clock.time()
    before = client.number
    world.run(10)
    assert replica is not None and handover_key(1) in replica.status("sync")["trouble"]
    assert len(world.promotions) == 1 and client.number > before + 20


def test_a_damaged_end_of_a_term_is_in_the_status_of_the_standby() -> None:
    world, servers, _ = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    standby.is_cut_off = True
    primary.stop()
    key = max(key for key in world.objects if key.startswith("entries/"))
    position = parse_position(key)
    assert position is not None
    world.objects[key] = encode_entry(EntryKind.FENCE, position, 0, [b"?"]), world.clock.time()
    standby.is_cut_off = False
    world.run(5)
    assert standby.replica is not None and key in standby.replica.status("sync")["trouble"]


def test_a_standby_compares_its_folder_less_and_less_often_while_an_entry_is_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, servers, client = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    times: list[float] = []
    original = replica_module.materialize

    def counted(*arguments: Any, **options: Any) -> Any:
        times.append(world.clock.monotonic())
        return original(*arguments, **options)

    monkeypatch.setattr(replica_module, "materialize", counted)
    client.pause = 1e9
    world.settings = world.settings._replace(lease_seconds=60.0)
    standby.is_cut_off = True
    world.run(3)
    key = max(key for key in world.objects if key.startswith("entries/"))
    whole, modified = world.objects[key]
    for _ in range(2):
        world.objects[key] = whole[:-1] + b"?", modified
        standby.is_cut_off = False
        world.run(900)
        assert standby.replica is not None and key in standby.replica.trouble
        assert times[1] - times[0] < 12 and len(times) < 10
        world.objects[key] = whole, modified
        world.run(302)
        assert standby.replica.trouble == "" and content_of(standby) == content_of(primary)
        # The next damage is looked at again soon.
        standby.is_cut_off = True
        world.run(3)
        key = max(key for key in world.objects if key.startswith("entries/"))
        whole, modified = world.objects[key]
        times.clear()


def test_the_status_of_all_servers_says_that_the_store_cannot_be_reached() -> None:
    world, servers, _ = make(4)
    world.run(10)
    world.is_down = True
    world.run(20)
    statuses = [each.replica.status("sync") for each in servers if each.replica is not None]
    assert [each["trouble"] for each in statuses] == ["the store cannot be reached"] * 3
    assert min(each["behind_seconds"] for each in statuses if each["role"] == "standby") > 15
    world.is_down = False
    world.run(5)
    assert {each.replica.status("sync")["trouble"] for each in servers if each.replica is not None} == {""}


def test_a_standby_makes_its_folder_again_if_an_entry_does_not_fit_it() -> None:
    world, servers, client = make(5, count=2)
    world.run(10)
    primary, standby = primary_of(servers), next(each for each in servers if each.broker is None)
    assert primary.primary is not None
    standby.disk.write_file(f"{FOLDER}/new", b"of another program")
    primary.primary.disk.create(f"{FOLDER}/new").close()
    world.run(10)
    client.pause = 1e9
    world.run(5)
    assert standby.errors == [] and content_of(standby) == content_of(primary)


COURSES = [(seed, is_sync) for is_sync in (True, False) for seed in range(scaled(500, 5))]


@pytest.mark.parametrize(("seed", "is_sync"), COURSES)
def test_random_courses_lose_and_double_nothing(seed: int, is_sync: bool) -> None:
    world, servers, client = make(seed, is_sync=is_sync)
    cause_faults(world, servers, world.generator.randint(5, 30))
    end_faults(world, servers)
    before = client.number
    world.run(40)
    assert [each.errors for each in servers] == [[], [], []]
    assert client.number > before, "the servers do not serve after all faults have ended"
    for each in servers:
        if each.broker is not None and each.broker.is_serving:
            each.broker.check()
