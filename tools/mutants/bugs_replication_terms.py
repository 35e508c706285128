"""Planted bugs: terms of a replicated broker: who may claim, what ends a term, who may begin and serve."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

STEPS: Final = "tests/replication/test_terms.py"
MODEL: Final = "tests/replication/test_terms_model.py"
LIVENESS: Final = "tests/replication/test_liveness.py"
SWEEP: Final = "tests/replication/test_sweep.py"
TERMS: Final = "tfmq/replication/terms.py"
TIMES: Final = "tfmq/replication/liveness.py"

REPLICATION_TERMS: Final = (
    Mutant(
        "claiming-anothers-term",
        "a term belongs to the claimant whose object was stored first",
        TERMS,
        "    if (yield from _put(term_key(number), data)) != data:\n        return None\n",
        "    yield from _put(term_key(number), data)\n",
        [MODEL, STEPS],
    ),
    Mutant(
        "claimants-of-one-folder-are-one",
        "a server with a copy of a folder does not take the other's term for its own",
        TERMS,
        "    term = Term(number, member, address, nonce)\n",
        '    term = Term(number, member, address, "")\n',
        [STEPS],
    ),
    Mutant(
        "own-term-is-not-recognized",
        "a term whose put had no answer is known by its object",
        TERMS,
        "        there = yield from _get(key)\n        if there is not None:\n            return there\n",
        '        there = yield from _get(key)\n        if there is not None:\n            return b""\n',
        [STEPS],
    ),
    Mutant(
        "swept-number-is-claimed-again",
        "the number of a swept term has no second owner",
        TERMS,
        "    return term if not (yield from _highest_number(after=number)) else None\n",
        "    return term\n",
        [STEPS],
    ),
    Mutant(
        "fence-after-a-gap",
        "the fence is put into the first free slot",
        TERMS,
        "            fence = _encode_fence(position, max(now_ms, time_ms), term.member)\n"
        "            data = yield from _put(entry_key(position), fence)\n",
        "            position = Position(number, slot + 1)\n"
        "            fence = _encode_fence(position, max(now_ms, time_ms), term.member)\n"
        "            data = yield from _put(entry_key(position), fence)\n",
        [MODEL, STEPS],
    ),
    Mutant(
        "fence-is-thought-to-be-stored",
        "an entry that was faster than the fence counts",
        TERMS,
        "            data = yield from _put(entry_key(position), fence)\n",
        "            yield from _put(entry_key(position), fence)\n            data = fence\n",
        [MODEL, STEPS],
    ),
    Mutant(
        "nothing-is-fenced",
        "a term ends at a fence, not at a slot that is free for now",
        TERMS,
        "            data = yield from _put(entry_key(position), fence)\n",
        "            data = fence\n",
        [MODEL, STEPS],
    ),
    Mutant(
        "fences-of-others-count-as-entries",
        "a fence of any claimant ends the term",
        TERMS,
        "        if entry is not None and entry.kind != EntryKind.FENCE:\n            time_ms",
        "        if entry is not None and (entry.kind != EntryKind.FENCE or not raced):\n            time_ms",
        [MODEL, STEPS],
    ),
    Mutant(
        "slot-0-ends-nothing",
        "a fence in slot 0 says that the term never began",
        TERMS,
        "        if end:\n            return Sealed(Position(number, end - 1), time_ms)\n",
        "        return Sealed(Position(number, max(end - 1, 0)), time_ms)\n",
        [MODEL, STEPS],
    ),
    Mutant(
        "terms-between-are-passed-over",
        "each term between the parent's and the claimed one is ended",
        TERMS,
        "    for number in range(term.number - 1, 0, -1):\n        known_slot",
        "    for number in range(term.number - 1, 0, -1):\n"
        "        if (yield from _get(entry_key(Position(number, 0)))) is None:\n"
        "            continue\n"
        "        known_slot",
        [MODEL, STEPS],
    ),
    Mutant(
        "late-claimants-end-old-terms",
        "a claimant stops before an older term if a later one is claimed",
        TERMS,
        "        # The term has not begun and never will. Before this goes on to one that may be old, and swept:\n"
        "        yield from _check_newest(term)\n",
        "",
        [STEPS],
    ),
    Mutant(
        "fences-in-swept-slots-count",
        "a fence in a slot that was swept ends nothing",
        TERMS,
        "        if newest > slot:\n",
        "        if newest > slot and False:\n",
        [MODEL, STEPS],
    ),
    Mutant(
        "only-own-fences-are-compared-with-snapshots",
        "a fence of another claimant in a swept slot ends nothing either",
        TERMS,
        "        if newest > slot:\n",
        "        if newest > slot and raced:\n",
        [MODEL, STEPS],
    ),
    Mutant(
        "snapshot-before-its-base-counts",
        "a snapshot whose BASE was not stored is no entry",
        TERMS,
        "        if newest > slot:\n            slot, is_bounded = newest, False\n",
        "        if newest >= slot:\n            slot, is_bounded = newest + 1, False\n",
        [MODEL, STEPS],
    ),
    Mutant(
        "no-fence-ahead",
        "a claimant reaches the end of a term whose primary still writes",
        TERMS,
        "            if raced and not is_bounded:\n",
        "            if raced and not is_bounded and False:\n",
        [STEPS],
    ),
    Mutant(
        "lost-objects-are-sealed",
        "a claimant does not continue if the store lacks what it has applied",
        TERMS,
        "        raced = data is None and slot != known_slot\n",
        "        known_slot = -1\n        raced = data is None and slot != known_slot\n",
        [STEPS],
    ),
    Mutant(
        "swept-objects-are-called-lost",
        "a claimant that slept says that it was deposed, not that the store has lost objects",
        TERMS,
        "            yield from _check_newest(term)  # if there is a later one",
        "            pass  # if there is a later one",
        [STEPS],
    ),
    Mutant(
        "damaged-entries-end-a-term",
        "a claimant does not pass over what it cannot read",
        TERMS,
        '        raise type(error)(f"{error}; to continue before it would lose what follows") from None\n',
        '        return Entry(EntryKind.FENCE, position, 0, 0, memoryview(b""))\n',
        [STEPS],
    ),
    Mutant(
        "beginning-after-a-fence",
        "a claimant that was fenced in slot 0 does not begin",
        TERMS,
        "    if there != data:\n        raise Deposed(",
        "    if not there:\n        raise Deposed(",
        [MODEL, STEPS],
    ),
    Mutant(
        "beginning-in-a-swept-slot",
        "a claimant that slept until its slot 0 was swept does not begin",
        TERMS,
        "    yield from _check_newest(term)\n    return body\n",
        "    return body\n",
        [STEPS],
    ),
    Mutant(
        "time-goes-back",
        "the times of the entries never go back from one primary to the next",
        TERMS,
        "encode_entry(EntryKind.BEGIN, position, max(now_ms, sealed.time_ms), [body.encode()])",
        "encode_entry(EntryKind.BEGIN, position, now_ms, [body.encode()])",
        [STEPS],
    ),
    Mutant(
        "swept-beginning-means-none",
        "a term whose slot 0 was swept has begun",
        TERMS,
        "            if begin is not None or (yield from _newest_manifest(number)) >= 0:\n",
        "            if begin is not None:\n",
        [STEPS],
    ),
    Mutant(
        "repeats-without-end",
        "a store that cannot be reached is given up after some repeats",
        TERMS,
        "                failed += 1\n",
        "                failed = min(failed + 1, repeats_max - 1)\n",
        [STEPS],
    ),
    Mutant(
        "sweeper-deletes-fences",
        "the fence that ended a term is never swept",
        "tfmq/replication/sweep.py",
        "        if position is not None and position not in fences:\n",
        "        if position is not None:\n",
        [SWEEP],
    ),
    Mutant(
        "sweeper-deletes-the-entry-of-its-snapshot",
        "the entry of the oldest manifest is kept",
        "tfmq/replication/sweep.py",
        "        if position is not None and position >= oldest:\n",
        "        if position is not None and position > oldest:\n",
        [SWEEP],
    ),
    Mutant(
        "snapshots-count-before-their-bases",
        "the snapshot of a BASE does not count before the BASE",
        "tfmq/replication/chain.py",
        "        manifests.pop()\n",
        "        pass\n",
        ["tests/replication/test_materialize.py"],
    ),
    Mutant(
        "lease-goes-on-after-a-gap",
        "a standby that was frozen or without a store begins its lease again",
        TIMES,
        "        if now - self._heard > self.lease_seconds * GAP_SHARE:\n            self._silent_from = now\n",
        "",
        [LIVENESS],
    ),
    Mutant(
        "frozen-standby-claims",
        "a standby that was frozen after its last poll does not claim",
        TIMES,
        "now - self._heard <= self.lease_seconds * GAP_SHARE",
        "now >= self._heard",
        [LIVENESS],
    ),
    Mutant(
        "entry-does-not-renew-the-lease",
        "an entry begins the lease again",
        TIMES,
        "        self._heard = self._silent_from = self._silent_until = now\n\n    def nothing_found",
        "        self._heard = now\n\n    def nothing_found",
        [LIVENESS],
    ),
    Mutant(
        "answers-count-as-later-than-their-questions",
        "an answer says nothing of the time after its question",
        TIMES,
        "        self._silent_until = max(asked, self._silent_from)\n",
        "        self._silent_until = now\n",
        [LIVENESS],
    ),
    Mutant(
        "claiming-without-jitter",
        "two standbys do not claim at once",
        TIMES,
        "self.lease_seconds + self.jitter_seconds",
        "self.lease_seconds",
        [LIVENESS],
    ),
    Mutant(
        "primary-serves-for-the-whole-lease",
        "a primary refuses when it has stored nothing for half a lease",
        TIMES,
        "REFUSE_SHARE: Final = 0.5\n",
        "REFUSE_SHARE: Final = 1.0\n",
        [LIVENESS],
    ),
    Mutant(
        "older-put-shortens-the-lease",
        "an answer that is late takes nothing back",
        TIMES,
        "        self.began = max(self.began, put_began)\n",
        "        self.began = put_began\n",
        [LIVENESS],
    ),
)
