"""What somebody who uses transactions knows of them, and what must therefore be found: the rigs' model.

A transaction has a *fate*: absent (nothing of it can be seen), prepared (in doubt, nothing of it can be seen),
committed (all of it can be seen). The user knows a set of fates that are possible: a step that was sent adds
one, its answer leaves one. `Model.check` compares what a broker shows with all of that:

 1. no transaction is torn: of each partition it wrote to, all of its messages are there, once and in their
    order, or none; in all partitions the same; and with them, or not, the offsets inside it;
 2. the fate is one of those that are possible: no commit that was answered is lost, nothing that was rolled
    back can be seen, no prepared one is forgotten or decided by itself;
 3. members of a commit group are all committed or none, and what a commit drops is dropped with it;
 4. transactions come into every partition in one order, which is the order of their answers;
 5. the messages of one lie side by side, unless it is too large for that;
 6. what an operator decided stays told; no epoch is given twice;
 7. what was seen stays, at its place; plain messages are there once, in order, and no acknowledged one is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

Key = Hashable
"""A partition of one life of a topic."""


class Fate(Enum):
    """What may have become of a transaction."""

    ABSENT = "absent"
    PREPARED = "prepared"
    COMMITTED = "committed"


ABSENT, PREPARED, COMMITTED = Fate.ABSENT, Fate.PREPARED, Fate.COMMITTED
NEVER = 1 << 62
"""The tick of an answer that has not come."""


class Broken(AssertionError):
    """An invariant does not hold; the sentence says which, and of what."""


@dataclass(eq=False)
class Transaction:
    """`messages` by partition in the order sent; `offsets` by group; `asked` and `answered` are the ticks of
    its commit.
    """

    label: str
    xid: str = ""
    epoch: int = 0
    messages: dict[Key, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    offsets: dict[str, int] = field(default_factory=dict)
    fates: frozenset[Fate] = frozenset({ABSENT})
    asked: int = NEVER
    answered: int = NEVER
    contiguous: bool = True
    heuristic: bool = False
    is_member: bool = False
    """Of a commit group, which alone commits it."""

    def __repr__(self) -> str:
        known = "/".join(sorted(fate.value for fate in self.fates))
        return f"<{self.label} xid={self.xid!r} epoch={self.epoch} {known}>"

    def may_be(self, *fates: Fate) -> None:
        """These are possible from now on, too."""
        self.fates |= frozenset(fates)

    def is_now(self, *fates: Fate) -> None:
        """Only these are possible."""
        self.fates = frozenset(fates)


@dataclass(eq=False)
class Together:
    """A commit group's request: `members` are committed and `dropped` absent, or nothing happened."""

    label: str
    members: tuple[Transaction, ...]
    dropped: tuple[Transaction, ...]


@dataclass(eq=False)
class Stream:
    """Plain messages of one producer to one partition; those before `safe` were acknowledged as synced."""

    key: Key
    sent: list[bytes] = field(default_factory=list)
    safe: int = 0


@dataclass
class View:
    """What a broker shows: payloads by partition and how many of them a reader gets by default (None: all),
    epochs that are prepared and those that are applied at the moment, offsets of groups, groups whose offsets
    are locked, partitions that are gone for ever, those that take no writes now (of what was decided they may
    still lack the end), epochs of which the broker says that a step is under way, and groups whose offsets nobody
    is told now.
    """

    messages: Mapping[Key, Sequence[bytes]]
    forced: Mapping[Key, int] | None = None
    prepared: frozenset[int] = frozenset()
    applying: frozenset[int] = frozenset()
    saved: Mapping[str, int] = field(default_factory=dict)
    locked: frozenset[str] = frozenset()
    gone: frozenset[Key] = frozenset()
    stuck: frozenset[Key] = frozenset()
    unsure: frozenset[int] = frozenset()
    silent: frozenset[str] = frozenset()
    by_hand: frozenset[int] | None = None
    """Epochs that an operator ended and nobody has forgotten; None: nobody looked."""


def label_of(payload: bytes) -> str:
    """Every payload begins with the label of what it belongs to, and a colon."""
    return bytes(payload[: payload.index(b":")]).decode()


@dataclass(frozen=True)
class Knowledge:
    """What a model knew at one moment."""

    transactions: Mapping[str, tuple[frozenset[Fate], int, int, int, str, bool]]
    safe: Mapping[str, int]
    together: tuple[Together, ...]
    seen: Mapping[Key, list[bytes]]


class Model:
    """All transactions and plain streams of one life."""

    def __init__(self) -> None:
        self.transactions: dict[str, Transaction] = {}
        self.streams: dict[str, Stream] = {}
        self.together: list[Together] = []
        self.seen: dict[Key, list[bytes]] = {}
        self.ticks = 0

    def tick(self) -> int:
        """The next moment: of two steps the later one has the higher tick."""
        self.ticks += 1
        return self.ticks

    def begin(self, label: str, xid: str = "") -> Transaction:
        """A new transaction that nothing is known of yet."""
        transaction = self.transactions[label] = Transaction(label, xid)
        return transaction

    def stream(self, label: str, key: Key) -> Stream:
        """A new plain stream; its payloads begin with `label` and a colon."""
        stream = self.streams[label] = Stream(key)
        return stream

    def knowledge(self) -> Knowledge:
        """What is known now; `recall` brings it back."""
        return Knowledge(
            {
                label: (each.fates, each.asked, each.answered, each.epoch, each.xid, each.heuristic)
                for label, each in self.transactions.items()
            },
            {label: stream.safe for label, stream in self.streams.items()},
            tuple(self.together),
            {key: list(payloads) for key, payloads in self.seen.items()},
        )

    def recall(self, known: Knowledge) -> None:
        """Forgets what was learned since: the life goes on in another way. What was sent is kept."""
        for label, transaction in self.transactions.items():
            nothing = (frozenset({ABSENT}), NEVER, NEVER, 0, transaction.xid, False)
            fates, asked, answered, epoch, xid, heuristic = known.transactions.get(label, nothing)
            transaction.fates, transaction.asked, transaction.answered = fates, asked, answered
            transaction.epoch, transaction.xid, transaction.heuristic = epoch, xid, heuristic
        for label, stream in self.streams.items():
            stream.safe = known.safe.get(label, 0)
        self.together = list(known.together)
        self.seen = {key: list(payloads) for key, payloads in known.seen.items()}

    # What must hold

    def check(self, view: View, *, final: bool = True) -> None:
        """Raises Broken. `final`: no request is under way, so what is found is what became of it, and is known
        from now on.
        """
        sorted_out = self._sort(view)
        for transaction in self.transactions.values():
            found = self._found(transaction, sorted_out.get(transaction.label, {}), view)
            if found is None and final and transaction.epoch not in view.applying | view.unsure:
                # Where its messages went is gone; whether it is in doubt would be told all the same.
                require(transaction.fates != {PREPARED}, f"{transaction}: a prepared one is forgotten")
                transaction.fates -= {PREPARED}
            self._judge(transaction, found, final)
            self._check_by_hand(transaction, view)
        if final:
            self._check_together()
            self._check_offsets(view)
        self._check_plain(sorted_out, view)
        self._check_order(view)
        self._check_seen(view)

    def _sort(self, view: View) -> dict[str, dict[Key, list[tuple[int, bytes]]]]:
        """(place in the partition, payload) of everything found, by label and partition."""
        found: dict[str, dict[Key, list[tuple[int, bytes]]]] = defaultdict(lambda: defaultdict(list))
        for key, payloads in view.messages.items():
            for place, payload in enumerate(payloads):
                label = label_of(payload)
                require(label in self.transactions or label in self.streams, f"{payload[:40]!r} was never sent")
                found[label][key].append((place, payload))
        return found

    def _found(
        self, transaction: Transaction, places: Mapping[Key, list[tuple[int, bytes]]], view: View
    ) -> Fate | None:
        """The fate that is seen; None if that cannot be told, since all its partitions are gone."""
        applying = transaction.epoch in view.applying
        shown: dict[Key, bool] = {}
        late: set[Key] = set()
        seen = False
        for key, payloads in transaction.messages.items():
            if key in view.gone:
                continue
            there = [payload for _, payload in places.get(key, [])]
            if applying or (key in view.stuck and len(there) < len(payloads)):
                require(there == payloads[: len(there)], f"{transaction} is out of order in {key}")
                late.add(key)
                seen |= applying or bool(there)
                continue
            whole = there == payloads
            require(whole or not there, f"{transaction} is torn: {len(there)} of {len(payloads)} in {key}")
            shown[key] = whole
            if whole and transaction.contiguous:
                at = [place for place, _ in places[key]]
                require(at[-1] - at[0] == len(at) - 1, f"{transaction} does not lie side by side in {key}")
        reported = applying or not late or transaction.fates != {COMMITTED}
        require(reported, f"{transaction} lacks its end in {late}, and is not called applying")
        strays = places.keys() - transaction.messages.keys()
        require(not strays, f"{transaction} has messages in {strays}, where none were sent")
        require(len(set(shown.values())) < 2, f"{transaction} is torn: {shown}")
        seen |= any(shown.values())
        prepared = transaction.epoch in view.prepared and transaction.epoch > 0
        require(not (seen and prepared), f"{transaction} is prepared, and can be seen")
        if prepared:
            return PREPARED
        if seen:
            return COMMITTED
        if transaction.epoch in view.unsure:
            return None
        return ABSENT if (shown and not late) or not transaction.messages else None

    def _judge(self, transaction: Transaction, found: Fate | None, final: bool) -> None:
        if found is None:
            return
        if found is ABSENT and not transaction.messages:
            # Only offsets, or nothing: whether it was committed shows in those alone.
            require(transaction.fates != {PREPARED}, f"{transaction} is forgotten")
            return
        require(found in transaction.fates, f"{transaction} is found {found.value}: {_fault(transaction, found)}")
        if final or found is COMMITTED:
            transaction.is_now(found)
            if found is not COMMITTED:
                transaction.asked = NEVER

    def _check_by_hand(self, transaction: Transaction, view: View) -> None:
        """What an operator decided is told until somebody forgets it."""
        if transaction.heuristic and view.by_hand is not None:
            require(transaction.epoch in view.by_hand, f"{transaction} was ended by hand, and nobody knows")

    def _check_together(self) -> None:
        for each in self.together:
            done = {COMMITTED in member.fates for member in each.members}
            require(len(done) == 1, f"{each.label} is torn: {each.members}")
            if done == {True}:
                left = [t for t in each.dropped if t.fates != {ABSENT}]
                require(not left, f"{each.label} is committed, and {left} not dropped")

    def _check_offsets(self, view: View) -> None:
        """A group stands where the last committed transaction with offsets of it said."""
        by_group: dict[str, list[Transaction]] = defaultdict(list)
        for transaction in self.transactions.values():
            for group in transaction.offsets:
                by_group[group].append(transaction)
        for group, transactions in by_group.items():
            if group in view.silent or any(t.epoch in view.applying for t in transactions):
                continue
            held = [t for t in transactions if t.fates == {PREPARED}]
            require(bool(held) == (group in view.locked), f"{group} locked: {group in view.locked}, in {held}")
            if held:
                continue
            known = [t for t in transactions if len(t.fates) == 1 and t.messages]
            done = sorted((t for t in known if t.fates == {COMMITTED}), key=lambda t: t.asked)
            unsure = {t.offsets[group] for t in transactions if len(t.fates) > 1 or not t.messages}
            right = {done[-1].offsets[group]} if done else {None}
            saved = view.saved.get(group)
            require(saved in right | unsure, f"{group} stands at {saved}, not at {right}: {transactions}")

    def _check_plain(self, found: Mapping[str, Mapping[Key, list[tuple[int, bytes]]]], view: View) -> None:
        for label, stream in self.streams.items():
            if stream.key in view.gone:
                continue
            places = found.get(label, {}).get(stream.key, [])
            there = [payload for _, payload in places]
            require(there == stream.sent[: len(there)], f"stream {label} has a hole, a repeat or another order")
            require(len(there) >= stream.safe, f"stream {label}: {stream.safe} acknowledged, {len(there)} there")
            if view.forced is None or (there and places[-1][0] < view.forced[stream.key]):
                stream.safe = max(stream.safe, len(there))

    def _check_order(self, view: View) -> None:
        """One order for all partitions, and whoever was answered before another one was asked comes first."""
        graph: TopologicalSorter[str] = TopologicalSorter()
        for key, payloads in view.messages.items():
            row = [label for label in map(label_of, payloads) if label in self.transactions]
            order = list(dict.fromkeys(row))
            earliest = NEVER
            for label in reversed(order):
                transaction = self.transactions[label]
                if transaction.asked != NEVER:
                    require(
                        earliest > transaction.asked,
                        f"in {key} {transaction} stands before one that was answered earlier",
                    )
                earliest = min(earliest, transaction.answered)
            for before, after in pairwise(order):
                graph.add(after, before)
        try:
            graph.prepare()
        except CycleError as error:
            raise Broken(f"partitions have transactions in different orders: {error.args[1]}") from None

    def _check_seen(self, view: View) -> None:
        for key, payloads in view.messages.items():
            before = self.seen.get(key, [])
            require(list(payloads[: len(before)]) == before, f"what a reader saw in {key} is not there any more")
            count = len(payloads) if view.forced is None else view.forced[key]
            if count > len(before):
                self.seen[key] = list(payloads[:count])


def _fault(transaction: Transaction, found: Fate) -> str:
    if transaction.fates == {COMMITTED}:
        return "an answered commit is lost"
    if found is COMMITTED:
        return "decided by itself" if PREPARED in transaction.fates else "it was never committed"
    if PREPARED in transaction.fates:
        return "a prepared one is forgotten"
    return "it was not prepared"


def require(holds: bool, sentence: str) -> None:
    """Raises Broken with the sentence unless it holds."""
    if not holds:
        raise Broken(sentence)
