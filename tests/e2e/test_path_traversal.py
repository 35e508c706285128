"""Names that try to leave the data folder, in every field of every command: no path is ever made of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.wire import Wire, running
from tfmq.protocol import commands, frames
from tfmq.protocol.commands import COMMANDS, Block, GroupOffset

CANARY = b"canary that nobody may read"
ATTEMPTS = (
    "../outside",
    "..",
    ".",
    "/etc/passwd",
    "a/../../outside",
    "orders/../../outside",
    "..\\outside",
    "%2e%2e%2foutside",
    "orders\0/../../outside",
    "../outside-0",
    "meta/../../outside",
    "~root",
    "\u2025/outside",
    "x" * 5_000,
)

FREE_TEXT = (commands.Hello, commands.ForgetTransaction, commands.DescribeTransaction)
"""Their text may be anything: an xid names no file, and one that is unknown is an answer."""
INSIDE = commands.TransactionOffsets("orders", "orders", 1, [GroupOffset("orders", 1, 0, 0, 0, 0)])

# One request of every command, with text wherever text may stand; "orders" becomes the attempt.
SAMPLES: tuple[Any, ...] = (
    commands.Hello("TFMQ", 1, 1, "orders", {"orders": "orders", "process": 1}),
    commands.Ping(),
    commands.PromoteReplica(),
    commands.Status(),
    commands.Cancel(1),
    commands.Metadata(["orders"], True),
    commands.CreateTopic("orders", 1, {}),
    commands.CreateTopic("fine", 1, {"orders": "orders"}),
    commands.CreateTopic("fine", 1, {"retention.action": "orders"}),
    commands.CreateTopic("fine", 1, {"log.segment_bytes": "orders", "server.data": "orders"}),
    commands.GrowTopic("orders", 3),
    commands.DeleteTopic("orders", 0),
    commands.DescribeTopic("orders"),
    commands.ResumePartition("orders", 0),
    commands.Truncate("orders", 1, 0, 0),
    commands.SetTopic("orders", 0, {"retention.action": "orders"}, ["orders"]),
    commands.LeaseProducerIds(1),
    commands.Produce("orders", 1, 0, 1, 0, 1, 2, [Block(24, 1, 0)]),
    commands.Produce("orders", 1, 0, 1, 0, 1, 2, [Block(24, 1, 0)], bytes(8)),
    commands.SucceedProducer("orders", 1, 0, 1),
    commands.Fetch("orders", 1, 0, 0),
    commands.Locate("orders", 1, 0, 0, 0),
    commands.JoinGroup("orders", "", ["fine"], 10_000),
    commands.Authenticate("orders", b"orders"),
    commands.JoinGroup("group", "orders", ["fine"], 10_000),
    commands.JoinGroup("group", "", ["orders"], 10_000),
    commands.Heartbeat("orders", "orders", 1, []),
    commands.LeaveGroup("orders", "orders", 1),
    commands.CommitOffsets("orders", "orders", 1, [GroupOffset("orders", 1, 0, 0, 0, 0)]),
    commands.ReadOffsets("orders", [commands.PartitionName("orders", 0)]),
    commands.ReadOffsets("orders", None),
    commands.ListGroups(),
    commands.DescribeGroup("orders"),
    commands.ResetGroup("orders", [GroupOffset("orders", 1, 0, 0, 0, 0)]),
    commands.DeleteGroup("orders"),
    commands.BeginTransaction(1, 1, "orders", 1_000, "orders", commands.CommitMember("orders", 1, "orders")),
    commands.PrepareTransaction("orders", 1, None, [INSIDE]),
    commands.CommitTransaction("orders", 1, True, False, [INSIDE]),
    commands.RollbackTransaction("orders", 1, False),
    commands.ForgetTransaction("orders", 1),
    commands.ListTransactions(["orders"], 0, 10, "orders"),
    commands.DescribeTransaction("orders", 0),
    commands.Transact(1, 1, [commands.TransactionBatch("orders", 1, 0, 0, 1, 24, [Block(24, 1, 0)])], [INSIDE]),
    commands.AwaitChecks("orders", 0),
    commands.CancelDelayed("orders"),
    commands.RescheduleDelayed("orders", 0),
    commands.ListDelayed("orders", 0, b"orders", 0, 1 << 62, "orders"),
    commands.DescribeDelayed("orders"),
    commands.DelayedHistogram("orders", [0, 1]),
    commands.AddSchedule("orders", "orders", "orders", "orders", 0, "orders", b"orders"),
    commands.AddSchedule("a", "0 9 * * *", "orders", "b"),
    commands.ListSchedules("orders", "orders", 10),
    commands.PauseSchedule("orders"),
    commands.ResumeSchedule("orders"),
    commands.RemoveSchedule("orders", 1),
    commands.CommitGroup("orders", 1, "orders", [commands.TransactionName("orders", 1)], 1, False),
    commands.AbortCommitGroup("orders", 1, "orders"),
    commands.ListCommitGroups("orders", 10),
    commands.ForgetCommitGroup("orders"),
)


def replaced(value: Any, attempt: str) -> Any:
    if value == "orders":
        return attempt
    if isinstance(value, dict):
        return {replaced(key, attempt): replaced(each, attempt) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(each, attempt) for each in value]
    return value


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data folder in it and a canary beside."""
    folder = tmp_path_factory.mktemp("traversal")
    for name in ("outside", "outside-0"):
        (folder / name).mkdir()
        (folder / name / ("0" * 32 + ".zxQueue")).write_bytes(CANARY)
    return folder


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[tuple[str, int]]:
    with running(place / "data") as (process, address):
        yield address
        code, _, log = process.stop()
        assert (code, "Traceback" in log) == (0, False)


def test_every_command_has_a_sample() -> None:
    assert {type(sample) for sample in SAMPLES} == {command.request.shape for command in COMMANDS}


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=range(len(ATTEMPTS)))
def test_no_name_from_the_wire_leaves_the_data_folder(place: Path, address: tuple[str, int], attempt: str) -> None:
    before = tree(place)
    for sample in SAMPLES:
        wire = Wire(address, hello=not isinstance(sample, commands.Hello))
        header = [commands.BY_REQUEST[type(sample)].code, 77, *replaced(sample, attempt)]
        wire.socket.sendall(b"".join(frames.encode(header, bytes(24) if type(sample) is commands.Produce else b"")))
        try:
            frame = wire.receive()
        except ConnectionError:
            frame = None  # a hello of nonsense ends the connection
        wire.close()
        if frame is None:
            continue
        text = repr(frame.header) + repr(bytes(frame.body))
        assert CANARY.decode() not in text, sample
        if "orders" in repr(sample) and type(sample) not in FREE_TEXT:
            assert frame.header[0] < 0, (sample, frame.header)
    watcher = Wire(address)
    assert watcher.ask(commands.Ping())[0] > 0
    assert watcher.ask(commands.Metadata(None, False))[0] == []
    assert watcher.ask(commands.ListGroups())[0] == []
    watcher.close()
    assert {name for name in tree(place) - before if not name.startswith("data/meta/")} == set()
    for name in ("outside", "outside-0"):
        (file,) = (place / name).iterdir()
        assert file.read_bytes() == CANARY
