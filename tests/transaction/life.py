"""Transactions of many users at one coordinator, while everything fails, and the state that these users expect."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from itertools import pairwise

from journal.record.format import split_id
from tests.transaction.rig import BILLS, ORDERS, Answer, Rig
from tests.transaction.targets import Row
from tfmq.transaction.requests import CommitGroupMember

KEYS = (ORDERS, ORDERS + 1, BILLS)
ABSENT, PREPARED, COMMITTED = "absent", "prepared", "committed"
OPEN_MAX = 12
"""Transactions that are open at the same time."""
ROUNDS_MIN, ROUNDS_MAX = 6, 200
"""Of work and forces until everything is applied."""

EXPECTED = {
    "ok", "waiting", "storage_stopped", "disk_full", "busy", "unknown_topic", "unknown_transaction",
    "transaction_rolled_back", "transaction_committed", "transaction_exists", "transaction_state", "stale_epoch",
    "group_stale", "group_fenced", "group_incomplete", "heuristic_outcome", "fenced",
}  # fmt: skip


class Known:
    """A transaction as its user knows it."""

    def __init__(self, name: str, began: Answer | None, member: CommitGroupMember | None = None) -> None:
        self.name, self.began, self.member = name, began, member
        self.messages: dict[int, list[bytes]] = {}
        self.fates = {ABSENT}
        self.waiting: list[tuple[str, Answer]] = []
        self.sent: list[tuple[int, list[bytes], Answer]] = []
        self.over = False

    def note(self) -> None:
        """Takes in what was answered since."""
        for key, payloads, answer in [each for each in self.sent if each[2].calls]:
            if answer.code == "ok":
                self.messages.setdefault(key, []).extend(payloads)
        self.sent = [each for each in self.sent if not each[2].calls]
        for step, answer in [each for each in self.waiting if each[1].calls]:
            assert answer.code in EXPECTED, (step, answer.failure)
            self._answered(step, answer)
        self.waiting = [each for each in self.waiting if not each[1].calls]

    def _answered(self, step: str, answer: Answer) -> None:
        if answer.failure is None:
            state = str(answer.result.state)
            if state in ("committed", "applying"):
                self.fates = {COMMITTED}
            elif state == "prepared" and not self.over:
                ending = any(each == "rollback" for each, _ in self.waiting)
                self.fates = self.fates - (set() if ending else {ABSENT}) | {PREPARED}
            elif state in ("rolled_back", "heuristic_rolled_back", "read_only"):
                self.fates = {ABSENT}
        elif answer.code == "transaction_rolled_back":
            self.fates = {ABSENT}
        elif answer.code == "transaction_committed":
            self.fates = {COMMITTED}

    def asks(self, step: str, answer: Answer) -> None:
        """`step` was asked for, and may take place from now on."""
        may = {"prepare": {PREPARED}, "commit": {COMMITTED}, "rollback": {ABSENT}}[step]
        self.fates |= may
        self.waiting.append((step, answer))


class Life:
    """A rig, its users and their world. Every method is one event; `check_all` verifies the end."""

    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)
        self.rig = Rig(queued=True, settings={"journal_file_bytes": 1 << 16})
        self.rig.targets.automatic, self.rig.targets.limit = False, 70_000
        self.known: list[Known] = []
        self.count = 0
        self.sequence = 0
        self.decided_gone: set[int] = set()
        self.groups: list[tuple[list[Known], Answer]] = []

    # Users

    def _payloads(self, name: str) -> list[bytes]:
        size = self.generator.choice((1, 1, 30_000))
        count = self.generator.choice((1, 2, 3, 12))
        self.count += count
        return [b"%s/%06d/" % (name.encode(), self.count + number) + b"x" * size for number in range(count)]

    def _key(self) -> int:
        return self.generator.choice(KEYS)

    def live(self) -> list[Known]:
        return [each for each in self.known if not each.over and each.began is not None]

    def _pick(self) -> Known | None:
        found = self.live()
        return self.generator.choice(found) if found else None

    def begin(self, local: bool, turn: bool) -> None:
        self.count += 1
        began = self.rig.begin("" if local else f"x{self.count}", turn=turn)
        if began.code == "ok":
            self.known.append(Known(began.xid, began))

    def begin_member(self, ahead: int, run: str) -> None:
        self.count += 1
        member = CommitGroupMember("g", self.sequence + ahead, run)
        began = self.rig.begin(f"m{self.count}", member=member)
        if began.code == "ok" and began.state == "open":
            self.known.append(Known(began.xid, began, member))

    def send(self, turn: bool) -> None:
        known = self._pick()
        if known is not None and known.began is not None:
            key, payloads = self._key(), self._payloads(known.name)
            known.sent.append((key, payloads, self.rig.send(known.began, payloads, key, turn=turn)))

    def prepare(self, turn: bool) -> None:
        known = self._pick()
        if known is not None and known.began is not None:
            known.note()
            if not known.sent:
                known.asks("prepare", self.rig.prepare(known.began, turn=turn))

    def commit(self, turn: bool, one_phase: bool, by_hand: bool) -> None:
        known = self._pick()
        if known is not None and known.began is not None and known.member is None:
            known.note()
            if not known.sent:
                answer = self.rig.commit(known.began, one_phase=one_phase, by_hand=by_hand, turn=turn)
                known.asks("commit", answer)

    def rollback(self, turn: bool, by_hand: bool) -> None:
        known = self._pick()
        if known is not None and known.began is not None:
            known.asks("rollback", self.rig.rollback(known.began, by_hand=by_hand, turn=turn))

    def transact(self, turn: bool, offsets: bool) -> None:
        self.count += 1
        known = Known(f"t{self.count}", None)
        batches = [(self._key(), self._payloads(known.name)) for _ in range(self.generator.randint(1, 3))]
        for key, payloads in batches:
            known.messages.setdefault(key, []).extend(payloads)
        rows = [Row("offsets", 1, self.count)] if offsets else []
        known.asks("commit", self.rig.transact(batches, offsets=rows, turn=turn))
        self.known.append(known)

    def commit_group(self, turn: bool) -> None:
        for known in self.known:
            known.note()
        members = [
            each
            for each in self.live()
            if each.member is not None and each.member.sequence == self.sequence and each.fates == {PREPARED}
        ]
        answer = self.rig.commit_group("g", self.sequence, [each.began for each in members if each.began], turn=turn)
        for known in self.live():
            if known.member is not None and known.member.sequence <= self.sequence:
                known.fates |= {ABSENT}
        for known in members:
            known.fates |= {COMMITTED}
        self.groups.append((members, answer))

    def abort_group(self, run: str) -> None:
        self.rig.ask("abort_group", "g", self.sequence, run)
        for known in self.live():
            if known.member is not None and known.member.run == run:
                known.fates |= {ABSENT}

    def lose_session(self) -> None:
        self.rig.handler.session_closed(self.rig.session)
        self.rig.turn()

    # The world

    def work(self, index: int) -> None:
        if self.rig.jobs:
            self.rig.step(index % len(self.rig.jobs))

    def wait(self, seconds: float) -> None:
        self.rig.advance(seconds)

    def force(self, key: int) -> None:
        self.rig.targets.force(key)
        self.rig.turn()

    def trouble(self, key: int, full: bool) -> None:
        if full:
            self.rig.targets.target(key).full = True
        else:
            self.rig.targets.fail_force(key)
        self.rig.turn()

    def resume(self, key: int) -> None:
        """What was not forced may be gone, if it was a stop."""
        target = self.rig.targets.target(key)
        target.full = False
        if target.stopped is not None:
            self.rig.targets.resume(key, keep=self.generator.randint(target.forced, len(target.appends)))
        self.rig.handler.target_resumed(key)
        self.rig.turn()

    def delete_topic(self) -> None:
        self.rig.targets.delete(17)
        self.rig.handler.topic_deleted(17)
        self.rig.turn()

    def disk_trouble(self, kind: str, nth: int) -> None:
        error = errno.ENOSPC if kind == "write" else errno.EIO
        if kind == "write" or self.generator.random() < 0.2:
            self.rig.disk.faults.fail(kind, nth=nth, error=error)

    def crash(self, power: bool) -> None:
        """What was asked and not answered may have happened or not; what was not prepared is gone."""
        for known in self.known:
            known.note()
            known.fates = self._after_crash(known)
            known.waiting.clear()
            known.sent.clear()
        self.groups = [each for each in self.groups if each[1].calls]
        rig = self.rig.power_cut() if power else self.rig.kill()
        rig.queued, rig.targets.automatic = True, False
        self.rig = rig

    @staticmethod
    def _after_crash(known: Known) -> set[str]:
        if known.over:
            return known.fates
        return set(known.fates)

    # What must hold

    def answers_are_good(self) -> None:
        """What can be seen at any time is as it should be."""
        for known in self.known:
            known.note()
        for members, answer in self.groups:
            if answer.calls and answer.failure is None:
                for known in members:
                    known.fates = {COMMITTED}
        self.groups = [each for each in self.groups if not each[1].calls]
        assert self.rig.targets.violations == []
        self._in_order()

    def _in_order(self) -> None:
        """In every target each decision is in one piece, and any two that share targets are in one order."""
        orders = [self._names(key) for key in KEYS]
        for names in orders:
            assert len(names) == len(set(names)), f"a transaction is in pieces: {names}"
        ranks = [{name: rank for rank, name in enumerate(names)} for names in orders]
        for first, second in ((0, 1), (0, 2), (1, 2)):
            shared = [name for name in orders[first] if name in ranks[second]]
            for earlier, later in pairwise(shared):
                assert ranks[second][earlier] < ranks[second][later], "two targets disagree about the order"

    def _names(self, key: int) -> list[bytes]:
        """The transactions in a target, in their order; neighbours of the same one are one."""
        names: list[bytes] = []
        for payload in self.rig.targets.payloads(key):
            name = payload.split(b"/")[0]
            if not names or names[-1] != name:
                names.append(name)
        return names

    def _mend(self) -> None:
        """Everything works again, and everything is answered."""
        if self.rig.store.stopped is not None:
            self.crash(power=False)
        self.rig.disk.faults.clear()
        for key in KEYS:
            self.resume(key)
        # A target takes a limited number of bytes before it is forced, so what many large transactions wrote needs many
        # rounds. Without the bound, a transaction that is never applied would be a test without end.
        for number in range(ROUNDS_MAX):
            self.rig.work()
            self.rig.targets.force()
            self.rig.advance(31)
            self.rig.work()
            if number >= ROUNDS_MIN and not self.rig.handler.status()["applying"]:
                break
        for known in self.known:
            known.note()
            assert not known.waiting, f"{known.name} has no answer"
        self.answers_are_good()

    def _check(self) -> None:
        for known in self.known:
            self._check_one(known)
        live = [each for each in self.known if not each.over]
        assert self.rig.handler.status()["applying"] == 0
        if not live:
            assert self.rig.targets.reserved == 0
            assert self.rig.targets.locks == {}

    def _check_one(self, known: Known) -> None:
        gone = self.rig.targets.gone
        wanted = {key: value for key, value in known.messages.items() if split_id(key)[0] not in gone}
        found = {key: self._of(known, key) for key in wanted}
        if all(not value for value in wanted.values()):
            self._note_over(known)
            return
        if found == wanted:
            assert COMMITTED in known.fates, f"{known.name} is visible, and may be {known.fates}"
            known.fates = {COMMITTED}
        else:
            assert all(not value for value in found.values()), f"{known.name} is torn: {found} of {wanted}"
            assert known.fates != {COMMITTED}, f"{known.name} was committed and is lost"
            known.fates -= {COMMITTED}
        self._note_over(known)

    def _note_over(self, known: Known) -> None:
        state = self.rig.state(known.began) if known.began is not None else None
        if known.fates == {PREPARED}:
            assert state == "prepared" or known.member is not None, f"{known.name} was prepared and is {state}"
        known.over = state not in ("open", "prepared")

    def _of(self, known: Known, key: int) -> Sequence[bytes]:
        name = known.name.encode() + b"/"
        return [payload for payload in self.rig.targets.payloads(key) if payload.startswith(name)]

    def check_all(self) -> None:
        """Everything is mended and answered, and then as the users know it."""
        self._mend()
        self._check()
