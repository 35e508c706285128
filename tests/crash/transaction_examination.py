"""Opens a broker on what a crash left of a life with transactions, and holds it to what was known.

A state is recovered, looked at, asked again for everything that had no answer, its transactions in doubt are
ended, and new work is done. `repeated` recovers one state many times, and in its middle: the outcome is one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from journal.testing import Moment, SimulatedClock, SimulatedDisk, crash_states
from tests.broker.helpers import Broker
from tests.crash.transaction_client import TransactionClient
from tests.crash.transaction_life import Boundary, Life, Torn
from tfmq.protocol.commands import DescribeTransaction, ListCommitGroups, ResumePartition
from tools.rigs.transaction_model import COMMITTED, PREPARED, Broken, Knowledge, View, require

TORN_EVERY = 100
"""Bytes of a torn write that reached the disk: none, one, and so on in such steps, and all but one."""
RANDOM_BEHIND = 1_000_000
"""A broker's randomness begins at another place than that of the one before it."""
LASTS = ("age_seconds",)
"""What of a transaction's description is no state."""
ANSWERED_AGAIN = {"transact": COMMITTED, "commit": COMMITTED, "commit group": COMMITTED, "prepare": PREPARED}
"""Requests whose repetition is answered well once they were done."""


REFUSED_SAFELY = frozenset({"sequence_gap"})
"""What a repeated request may be answered where nothing of it was done, and its stream has forgotten more than that, or
less: a client sends it anew in another stream."""


def started(disk: SimulatedDisk, wall_ms: int, life: Life) -> Broker:
    """A broker of the life's configuration on another disk, at a time of its own."""
    values = life.broker.values
    broker = Broker(disk, SimulatedClock(wall_ms), start=False, **values)
    broker.random.count = RANDOM_BEHIND + disk.number
    broker.engine.start()
    return broker


def examine(life: Life, boundary: Boundary, disk: SimulatedDisk) -> TransactionClient:
    """Raises Broken, with the boundary's name, where the broker on `disk` is not what it must be."""
    try:
        return _examine(life, boundary, disk)
    except Broken:
        raise
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {error}") from error


def _examine(life: Life, boundary: Boundary, disk: SimulatedDisk) -> TransactionClient:
    client = life.client
    client.steps.clear()
    client.model.recall(boundary.known)
    groups = {name: joined for name, joined in client.groups.items() if name in boundary.groups}
    everything, client.groups = client.groups, groups
    transactions = dict(client.model.transactions)
    try:
        client.moved(started(disk, boundary.wall_ms, life))
        client.model.check(client.view())
        ask_again(client, boundary)
        client.model.check(client.view())
        finish(client)
        client.model.check(client.view())
        client.moved(started(client.broker.disk.crash(keep="nothing"), boundary.wall_ms, life))
        client.model.check(client.view())
    finally:
        client.groups = everything
        # Those of `finish` exist on this disk only; kept, each examination would take longer than the one before.
        client.model.transactions = transactions
    return client


def ask_again(client: TransactionClient, boundary: Boundary) -> None:
    """What was under way is asked once more: what had been done is answered so, and not done twice. A whole
    transaction in one request is done now, if it was not.
    """
    for step in boundary.lost:
        known = {transaction: transaction.fates for transaction in step.before}
        repeat = client.again(step)
        require(repeat.answer.done, f"{step.name}, repeated, has no answer")
        for fates in known.values():
            if step.name == "transact" or fates == {ANSWERED_AGAIN.get(step.name)}:
                safe = fates != {COMMITTED} and repeat.answer.code in REFUSED_SAFELY
                require(safe or repeat.answer.code == "ok", f"{step.name}, repeated: {repeat.answer.failure!r}")
                break


def finish(client: TransactionClient) -> None:
    """Every other one in doubt is committed, the others rolled back; and the broker takes new ones."""
    client.model.together.clear()  # whose members may now end one by one
    doubtful = [each for each in client.model.transactions.values() if each.fates == {PREPARED}]
    for number, transaction in enumerate(doubtful):
        commits = number % 2 == 0 and not transaction.is_member
        step = client.commit(transaction) if commits else client.rollback(transaction)
        require(step.answer.code == "ok", f"{transaction} cannot be ended: {step.answer.failure!r}")
    label = f"new-{len(client.model.transactions)}"
    step = client.transact(label, {("orders", 0): 1, ("orders", 1): 1, ("bills", 0): 1})
    require(step.answer.code == "ok", f"no new transactions: {step.answer.failure!r}")


def settled(life: Life, generator: random.Random) -> None:
    """A life in which the disk failed: an operator mends it, and everybody has an answer; then it is cut short
    after all, by a kill or a power cut, and mended again.
    """
    client = life.client
    life.disk.faults.clear()
    resumed(client)
    require(not client.steps, f"{[step.name for step in client.steps]} have no answer")
    view = client.view()
    client.model.check(view, final=False)
    status = life.broker.engine.broker.status()
    if status["transactions"]["journal"] == status["catalog"] == "open":
        require_applied(view)
    known = client.model.knowledge()
    wall_ms = life.clock.wall_ms()
    for keep in ("everything", "nothing", "some"):
        client.model.recall(known)
        client.moved(started(life.disk.crash(generator, keep=keep), wall_ms, life))
        resumed(client)
        view = client.view()
        require(not view.silent, f"the offsets of {view.silent} are not told after a restart")
        require_applied(view)
        client.model.check(view)
        finish(client)
        client.model.check(client.view())


def require_applied(view: View) -> None:
    """What was decided reaches its partitions once they take it."""
    require(not view.applying, f"{view.applying} are still not applied, and nothing is in their way")


def resumed(client: TransactionClient) -> None:
    """What has stopped is resumed, and some time goes by."""
    for name, count in (("orders", 2), ("bills", 1)):
        for partition in range(count):
            client.ask(ResumePartition(name, partition))
    client.broker.work()
    client.broker.advance(60)
    client.look()


# What is left


def power_cuts(boundary: Boundary, limit: int, generator: random.Random) -> Iterator[SimulatedDisk]:
    """Some of the states that a power cut leaves; always the one in which nothing unforced survived."""
    yield boundary.moment.crash(keep="nothing")
    yield from crash_states(boundary.moment, limit - 1, generator)


def torn_states(boundary: Boundary, limit: int, generator: random.Random) -> Iterator[SimulatedDisk]:
    """The process dies in the middle of the write before the boundary: a part of it is there, or zeros are."""
    torn = boundary.torn
    if torn is None:
        return
    sizes = sorted({0, 1, *range(TORN_EVERY, len(torn.data), TORN_EVERY), len(torn.data) - 1})
    for size in generator.sample(sizes, min(limit, len(sizes))):
        disk = boundary.moment.crash(keep="everything")
        disk.write_file(torn.path, cut(torn, size, zeros=generator.random() < 0.3))
        yield disk


def cut(torn: Torn, size: int, *, zeros: bool) -> bytes:
    """The file with `size` bytes of the write; after them what was there, or zeros where the file grew."""
    data = bytearray(torn.before)
    part = torn.data[:size]
    if zeros:
        part = part.ljust(len(torn.data), b"\0")
    data.extend(bytes(max(0, torn.position - len(data))))
    if zeros and torn.position < len(torn.before):
        part = torn.data[:size]
    data[torn.position : torn.position + len(part)] = part
    return bytes(data)


# Recovery again and again


def repeated(life: Life, boundary: Boundary, disk: SimulatedDisk, times: int) -> None:
    """Recovers so many times, killed each time: what is found stays as it was found first."""
    known = boundary.known
    first = outcome(life, boundary, known, disk)
    for turn in range(times):
        keep = "everything" if turn % 2 else "nothing"
        disk = life.client.broker.disk.crash(keep=keep)
        found = outcome(life, boundary, known, disk)
        require(found == first, f"recovery {turn + 2} differs: {difference(first, found)}")


def interrupted(life: Life, boundary: Boundary, disk: SimulatedDisk, limit: int, generator: random.Random) -> int:
    """The power goes at some boundaries of the recovery: the next one finds the same. Answers how many."""
    moments: list[Moment] = []
    copy = disk.crash(keep="everything")
    first = outcome(life, boundary, boundary.known, disk)
    copy.after = lambda kind, path: moments.append(Moment(copy))
    started(copy, boundary.wall_ms, life)
    copy.after = None
    count = 0
    for moment in generator.sample(moments, min(limit, len(moments))):
        for state in (moment.crash(keep="everything"), moment.crash(generator)):
            found = outcome(life, boundary, boundary.known, state)
            require(found == first, f"recovery that was killed differs: {difference(first, found)}")
            count += 1
    return count


def outcome(life: Life, boundary: Boundary, known: Knowledge, disk: SimulatedDisk) -> dict[str, Any]:
    """Everything that a user can see of a broker on `disk`, after it was held to what is known."""
    client = life.client
    client.steps.clear()
    client.model.recall(known)
    everything = client.groups
    client.groups = {name: joined for name, joined in everything.items() if name in boundary.groups}
    try:
        client.moved(started(disk, boundary.wall_ms, life))
        view = client.view()
        client.model.check(view)
    finally:
        client.groups = everything
    return {
        "messages": view.messages,
        "saved": view.saved,
        "locked": view.locked,
        "transactions": [lasting(row) for row in client.rows()],
        "outcomes": outcomes(client),
        "groups": list(client.ask(ListCommitGroups()).groups),
    }


def outcomes(client: TransactionClient) -> dict[str, dict[str, Any]]:
    """What the broker says of each named transaction that ever was."""
    found = {}
    for transaction in client.model.transactions.values():
        if transaction.xid and transaction.epoch:
            request = DescribeTransaction(transaction.xid, transaction.epoch)
            found[transaction.label] = lasting(client.ask(request).description)
    return found


def lasting(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in LASTS}


def difference(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Where two outcomes differ, in short."""
    return "; ".join(
        f"{name}: {str(first[name])[:300]} / {str(second[name])[:300]}" for name in first if first[name] != second[name]
    )
