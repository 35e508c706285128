"""`tfmq tx` with a real server: what an operator sees and decides, also when the server is killed in between."""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfmq as client
from tests.e2e.commands import PATIENCE_SECONDS, TFMQ, Ended, command, environment
from tests.e2e.reading import payloads
from tests.scale import scaled
from tests.server.owner import Owner
from tests.server.wire import batch
from tfmq.cli import main
from tfmq.protocol import commands
from tools.rigs.live_server import LiveServer

ALARM_SECONDS = 0.3


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LiveServer]:
    server = LiveServer(tmp_path / "data", f"transaction.alarm_seconds={ALARM_SECONDS}")
    server.start()
    yield server
    if server in LiveServer.alive:
        server.stop()
    assert "Traceback" not in server.log.read_text()


class Rig:
    """The command line in this process, connected to that broker."""

    def __init__(self, broker: LiveServer, capture: pytest.CaptureFixture[bytes]) -> None:
        self._broker, self._capture = broker, capture

    def __call__(self, *arguments: str) -> Ended:
        """`tfmq ARGUMENTS`."""
        self._capture.readouterr()
        code = main.run([*arguments, "--servers", self._broker.address])
        out, err = self._capture.readouterr()
        return Ended(code, out, err.decode())

    def tx(self, *arguments: str) -> Ended:
        return self("tx", *arguments)

    def rows(self, *arguments: str) -> list[dict[str, object]]:
        """What `tfmq tx list --json` has."""
        ran = self.tx("list", "--json", *arguments)
        assert ran.code == 0, ran
        found: list[dict[str, object]] = json.loads(ran.out)
        return found


@pytest.fixture
def rig(broker: LiveServer, capsysbinary: pytest.CaptureFixture[bytes]) -> Rig:
    return Rig(broker, capsysbinary)


def test_a_transaction_is_found_shown_committed_and_forgotten(broker: LiveServer, rig: Rig) -> None:
    owner = Owner(broker.address, "orders")
    epoch = owner.prepare("order 42", b"one", b"two", group="shop")
    owner.begin("still at work", b"x")
    (row,) = rig.rows()
    assert (row["xid"], row["epoch"], row["state"], row["group"]) == ("order 42", epoch, "prepared", "shop")
    assert (row["messages"], row["topics"]) == (2, ["orders"])
    assert int(str(row["size_bytes"])) > 6 and "127.0.0.1" in str(row["owner"])
    assert [each["xid"] for each in rig.rows("--state", "open")] == ["still at work"]
    assert rig.rows("--group", "another") == []
    table = rig.tx("list").out.decode()
    assert "order 42" in table and "shop" in table and "still at work" not in table
    shown = rig.tx("show", "order 42")
    assert shown.code == 0 and "prepared" in shown.out.decode() and "orders" in shown.out.decode()
    assert payloads(broker.address, "orders") == []

    assert rig.tx("commit", "order 42").code == 2, "a script says --yes"
    ended = rig.tx("commit", "order 42", "--yes", "--json")
    assert ended.code == 0
    assert json.loads(ended.out) == [
        {"xid": "order 42", "epoch": epoch, "state": "committed", "dropped": 0, "lost": 0, "by_hand": True}
    ]
    assert payloads(broker.address, "orders") == [b"one", b"two"]
    code, outcome, details = owner.refusal(commands.RollbackTransaction("order 42", epoch))
    assert (code, outcome) == ("heuristic_outcome", "unknown")  # it happened, by another hand
    assert details["state"] == "heuristic_committed"
    assert [each["state"] for each in rig.rows()] == ["heuristic_committed"]
    assert rig.tx("forget", "order 42").code == 0
    assert rig.rows() == []
    again = rig.tx("forget", "order 42")
    assert again.code == 1 and "was not ended by hand" in again.err


def test_what_is_rolled_back_by_hand_leaves_nothing(broker: LiveServer, rig: Rig) -> None:
    owner = Owner(broker.address, "orders")
    epochs = [owner.prepare(f"order-{number}", b"x") for number in range(3)]
    ended = rig.tx("rollback", "order-0", "order-1", "--yes")
    assert ended.code == 0 and "order-1: rolled back by hand" in ended.err
    code, _, details = owner.refusal(commands.CommitTransaction("order-0", epochs[0], False, False, []))
    assert code == "heuristic_outcome"
    assert details["state"] == "heuristic_rolled_back"
    assert rig.tx("commit", "order-1", "--yes").code == 1
    assert rig.tx("rollback", "order-1", "--yes").code == 0, "the same once more is no mistake"
    assert rig.tx("commit", "order-2", "--yes", "--as-owner").err == "order-2: committed\n"
    assert payloads(broker.address, "orders") == [b"x"]
    assert [each["xid"] for each in rig.rows()] == ["order-0", "order-1"]


def test_an_owner_that_comes_back_learns_what_an_operator_did(broker: LiveServer, rig: Rig) -> None:
    with client.Producer(broker.address) as producer:
        for xid in ("by hand", "in its name"):
            transaction = producer.begin(xid)
            transaction.send("orders", xid)
            transaction.prepare()
    assert rig.tx("commit", "by hand", "--yes").code == 0
    assert rig.tx("commit", "in its name", "--yes", "--as-owner").code == 0
    with client.Producer(broker.address) as producer:
        for step in ("commit", "rollback"):
            with pytest.raises(client.HeuristicOutcome) as reported:
                getattr(producer.resume("by hand"), step)()
            assert (reported.value.state, reported.value.outcome) == ("heuristic_committed", "unknown")
        back = producer.resume("in its name")
        back.commit()
        assert back.state == "committed"
        with pytest.raises(client.TransactionCommitted):
            producer.resume("in its name").rollback()
    assert payloads(broker.address, "orders") == [b"by hand", b"in its name"]


@pytest.mark.long
def test_item_27_a_decision_by_hand_persists_over_kill_9(broker: LiveServer, rig: Rig) -> None:
    owner = Owner(broker.address, "orders")
    for name in ("kept", "committed", "dropped"):
        owner.prepare(name, name.encode())
    before = {str(each["xid"]): each for each in rig.rows()}
    broker.kill()
    broker.start()
    after = {str(each["xid"]): each for each in rig.rows()}
    for name in before:
        for key in ("epoch", "state", "messages", "size_bytes", "topics", "began_ms", "prepared_ms", "owner"):
            assert after[name][key] == before[name][key], (name, key)
    assert rig.tx("commit", "committed", "--yes").code == 0
    assert rig.tx("rollback", "dropped", "--yes").code == 0
    for _ in range(2):
        broker.kill()
        broker.start()
        states = {each["xid"]: each["state"] for each in rig.rows()}
        assert states == {"kept": "prepared", "committed": "heuristic_committed", "dropped": "heuristic_rolled_back"}
        assert payloads(broker.address, "orders") == [b"committed"]
    assert rig.tx("forget", "committed", "dropped").code == 0
    broker.kill()
    broker.start()
    assert [each["xid"] for each in rig.rows()] == ["kept"]
    assert rig.tx("commit", "kept", "--yes").code == 0
    assert payloads(broker.address, "orders") == [b"committed", b"kept"]


def test_a_wrong_name_is_one_sentence_with_the_likely_one(broker: LiveServer, rig: Rig) -> None:
    for arguments in (["show", "order-24"], ["commit", "order-24", "--yes"], ["forget", "order-24"]):
        ended = rig.tx(*arguments)
        assert ended.code == 1 and "There are no unfinished ones" in ended.sentence
    Owner(broker.address, "orders").prepare("order-42", b"x")
    ended = rig.tx("rollback", "order-24", "--yes")
    assert ended.code == 1 and "Did you mean 'order-42'?" in ended.sentence
    assert [each["state"] for each in rig.rows()] == ["prepared"]
    assert rig.tx("show", "x" * 250).code == 2
    assert rig.tx("show", "order-42", "--epoch", "999999").code == 1


def test_old_ones_are_reported_in_the_log_and_in_the_status(broker: LiveServer, rig: Rig) -> None:
    epoch = Owner(broker.address, "orders").prepare("order-42", b"x")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "transaction.alarm_seconds" not in broker.log.read_text():
        assert time.monotonic() < deadline, "the log tells nothing"
        time.sleep(0.02)
    assert "prepared transactions that wait for their owners: 1, the oldest" in broker.log.read_text()
    status = rig("status")
    assert "1 prepared (the oldest for" in re.sub(r"\s+", " ", status.out.decode())
    assert "prepared for longer than 0.3 s" in status.err
    found = json.loads(rig("status", "--json").out)["transactions"]
    assert (found["prepared"], found["alarm"], found["journal"]) == (1, True, "open")
    assert found["oldest_prepared_seconds"] > ALARM_SECONDS and found["journal_bytes"] > 0
    assert "1 of these is prepared for longer than 0.3 s" in rig.tx("list").err
    assert rig.tx("rollback", "order-42", "--epoch", str(epoch), "--yes", "--as-owner").code == 0
    while "any more" not in broker.log.read_text():
        assert time.monotonic() < deadline, "the log does not tell that it is over"
        time.sleep(0.02)
    found = json.loads(rig("status", "--json").out)["transactions"]
    assert (found["prepared"], found["alarm"]) == (0, False)


def test_many_are_listed_page_by_page(broker: LiveServer, rig: Rig) -> None:
    owner = Owner(broker.address, "orders")
    count = max(1_050, scaled(10_000))
    epochs = []
    for start in range(0, count, 200):
        sent = []
        for number in range(start, min(start + 200, count)):
            owner.number += 1
            begin = commands.BeginTransaction(owner.producer_id, owner.number, f"order-{number}", None, "")
            sent.append(owner.wire.send(begin))
        found = [owner.wire.receive().header for _ in sent]
        epochs += sorted(header[2] for header in found)
        for header in found:
            request, body = batch("orders", owner.incarnation, owner.producer_id, owner.sequence, [b"x"])
            owner.sequence += 1
            owner.wire.send(request._replace(transaction=header[2]), body)
            owner.wire.send(commands.PrepareTransaction(header[3], header[2], None, []))
        answers = [owner.wire.receive().header for _ in range(2 * len(found))]
        assert [header for header in answers if header[0] != 0] == []
    every = rig.rows()
    assert [each["epoch"] for each in every] == epochs
    assert {each["state"] for each in every} == {"prepared"}
    shown = rig.tx("list")
    assert shown.code == 0 and f"there are more: tfmq tx list --after {epochs[99]}" in shown.err
    assert [each["epoch"] for each in rig.rows("--after", str(epochs[-3]))] == epochs[-2:]
    assert len(rig.rows("-n", "1001")) == 1001


def test_the_shell_completes_commands_and_xids(broker: LiveServer) -> None:
    owner = Owner(broker.address, "orders")
    owner.prepare("order-42", b"x")
    owner.prepare("order-43", b"x")

    def completed(*words: str) -> list[str]:
        asked = {"_TFMQ_COMPLETE": "bash_complete", "COMP_CWORD": str(len(words)), "PATH": os.environ["PATH"]}
        asked["COMP_WORDS"] = " ".join(("tfmq", *words))
        ran = subprocess.run(
            ["tfmq"],
            executable=str(Path(command(TFMQ, ())[0]).with_name("tfmq")),
            capture_output=True,
            timeout=PATIENCE_SECONDS,
            env={**environment(broker.address), **asked},
        )
        return [line.partition(",")[2] for line in ran.stdout.decode().splitlines() if line]

    verbs = {"list", "show", "commit", "rollback", "forget", "groups", "forget-group"}
    assert set(completed("tx", "")) == verbs
    assert completed("tx", "commit", "ord") == ["order-42", "order-43"]
    assert completed("tx", "show", "x") == []
