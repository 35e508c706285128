"""Claim, seal and begin, step by step: tfmq.replication.terms. The model check has their interleavings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from tfmq.replication import terms
from tfmq.replication.entries import (
    NUMBER_MAX,
    Begin,
    EntryKind,
    Fence,
    Position,
    Term,
    decode_entry,
    encode_entry,
    entry_key,
    manifest_key,
    term_key,
)
from tfmq.replication.errors import Deposed, InvalidObject, NewerObject, StoreRefused, StoreUnavailable
from tfmq.replication.store import StoredObject
from tfmq.replication.terms import Begun, Sealed, Steps

T = TypeVar("T")
HAPPENED, DID_NOT_HAPPEN = "happened", "did not happen"


class ScriptedStore:
    """Objects in memory. `lost`: what becomes of the next puts, without answers. `on_put` is called before each put."""

    name = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lost: list[str] = []
        self.on_put: Callable[[str], None] = lambda key: None
        self.puts: list[str] = []

    def put_new(self, key: str, data: bytes) -> bool:
        self.on_put(key)
        self.puts.append(key)
        lost = self.lost.pop(0) if self.lost else ""
        is_new = key not in self.objects
        if lost != DID_NOT_HAPPEN:
            self.objects.setdefault(key, data)
        if lost:
            raise StoreUnavailable("no answer")
        return is_new

    def get(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        for key in sorted(self.objects):
            if key.startswith(prefix) and key > after:
                yield StoredObject(key, len(self.objects[key]), 0.0)

    def delete(self, *keys: str) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def close(self) -> None:
        pass

    # What the tests put there

    def add(self, kind: EntryKind, term: int, slot: int, body: bytes = b"", time_ms: int = 0) -> None:
        position = Position(term, slot)
        self.objects[entry_key(position)] = encode_entry(kind, position, time_ms, [body])

    def add_term(self, number: int, slots: int, parent: Position | None = None, member: str = "old") -> None:
        """A term that has begun, with `slots` entries after its BEGIN."""
        self.objects[term_key(number)] = Term(number, member, f"{member}:1", "n").encode()
        self.add(EntryKind.BEGIN, number, 0, Begin(parent, member, f"{member}:1").encode())
        for slot in range(1, slots + 1):
            self.add(EntryKind.OPERATIONS, number, slot, time_ms=1000 * slot)

    def add_claim(self, number: int) -> None:
        self.objects[term_key(number)] = Term(number, "other", "other:1", "o").encode()

    def add_fence(self, term: int, slot: int) -> None:
        self.add(EntryKind.FENCE, term, slot, Fence("other").encode())

    def add_manifest(self, term: int, slot: int) -> None:
        self.objects[manifest_key(Position(term, slot))] = b"manifest"

    def sweep(self, term: int, slot: int) -> None:
        """What a sweeper leaves, much later, after a snapshot at this position."""
        self.add_manifest(term, slot)
        for each in range(slot):
            self.delete(entry_key(Position(term, each)))

    def kind(self, term: int, slot: int) -> EntryKind | None:
        data = self.objects.get(entry_key(Position(term, slot)))
        return None if data is None else decode_entry(data, Position(term, slot)).kind


def run(steps: Steps[T], store: ScriptedStore) -> T:
    return terms.run_steps(steps, store, lambda: None)


def claimed(store: ScriptedStore, number: int) -> Term:
    term = run(terms.claim("me", "me:1", "nonce"), store)
    assert term == Term(number, "me", "me:1", "nonce")
    return term


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


# Claim


def test_terms_are_claimed_one_after_the_other(store: ScriptedStore) -> None:
    assert run(terms.newest_term(), store) is None
    assert claimed(store, 1) == run(terms.newest_term(), store)
    assert claimed(store, 2) == run(terms.newest_term(), store)


def test_who_claims_at_the_same_time_gets_nothing(store: ScriptedStore) -> None:
    store.on_put = lambda key: store.add_claim(1)
    assert run(terms.claim("me", "me:1", "nonce"), store) is None


def test_another_server_with_a_copy_of_the_folder_is_another_claimant(store: ScriptedStore) -> None:
    """It has the same member and address; its nonce is its own."""
    store.on_put = lambda key: store.objects.update({term_key(1): Term(1, "me", "me:1", "other").encode()})
    assert run(terms.claim("me", "me:1", "nonce"), store) is None


@pytest.mark.parametrize("lost", [[HAPPENED], [DID_NOT_HAPPEN], [DID_NOT_HAPPEN, HAPPENED]])
def test_a_put_whose_answer_is_lost_is_known_by_what_is_there(store: ScriptedStore, lost: list[str]) -> None:
    """The same for the term, the fences and the BEGIN."""
    store.add_term(1, slots=2)
    store.lost = list(lost)
    term = claimed(store, 2)
    store.lost = list(lost)
    sealed = run(terms.seal(term, 0), store)
    assert sealed.parent == (1, 2) and store.kind(1, 3) == EntryKind.FENCE and store.kind(1, 4) is None
    store.lost = list(lost)
    run(terms.begin(term, sealed, 0), store)
    assert store.kind(2, 0) == EntryKind.BEGIN and not store.lost


@pytest.mark.parametrize(
    ("data", "error", "sentence"),
    [
        (b"\x00", InvalidObject, "does not have the fields"),
        (Term(4, "m", "", "n").encode(), InvalidObject, "is the term 4"),
        (Term(5, "m", "", "n").encode().replace(b"format\x01", b"format\x02"), NewerObject, "has format 2"),
    ],
)
def test_who_cannot_read_the_newest_term_claims_none(
    store: ScriptedStore, data: bytes, error: type[Exception], sentence: str
) -> None:
    store.objects[term_key(5)] = data
    with pytest.raises(error, match=f"{term_key(5)} {sentence}"):
        run(terms.claim("me", "me:1", "nonce"), store)
    assert list(store.objects) == [term_key(5)]


def test_a_forged_term_of_the_highest_number_is_refused(store: ScriptedStore) -> None:
    store.add_claim(NUMBER_MAX)
    with pytest.raises(InvalidObject, match="no term can follow"):
        run(terms.claim("me", "me:1", "nonce"), store)


def test_the_number_of_a_term_that_was_swept_is_not_claimed_again(store: ScriptedStore) -> None:
    """By a claimant that has slept between the list of the terms and its put."""
    store.on_put = lambda key: store.add_claim(5)
    assert run(terms.claim("me", "me:1", "nonce"), store) is None


# Seal


def test_an_empty_store_has_no_parent(store: ScriptedStore) -> None:
    term = claimed(store, 1)
    assert run(terms.seal(term, 0), store) == Sealed(None, 0)
    assert run(terms.begin(term, Sealed(None, 0), 5), store) == Begin(None, "me", "me:1")


def test_the_fence_is_put_into_the_first_free_slot(store: ScriptedStore) -> None:
    store.add_term(1, slots=3)
    store.objects[entry_key(Position(1, 5))] = store.objects[entry_key(Position(1, 3))]  # above a hole: not even read
    sealed = run(terms.seal(claimed(store, 2), 0), store)
    assert sealed == Sealed(Position(1, 3), 3000)
    assert store.kind(1, 4) == EntryKind.FENCE


def test_the_time_of_fence_and_begin_is_never_before_that_of_the_parent(store: ScriptedStore) -> None:
    """The clocks of two servers differ; the times in the log never go back."""
    store.add_term(1, slots=3)
    term = claimed(store, 2)
    sealed = run(terms.seal(term, 17), store)
    run(terms.begin(term, sealed, 17), store)
    for position in (Position(1, 4), Position(2, 0)):
        assert decode_entry(store.objects[entry_key(position)], position).time_ms == 3000


def test_entries_that_are_known_or_in_a_snapshot_are_not_read_again(store: ScriptedStore) -> None:
    store.add_term(1, slots=9)
    for slot in range(5):
        store.objects[entry_key(Position(1, slot))] = b"not read"
    assert run(terms.seal(claimed(store, 2), 0, Position(1, 5)), store).parent == (1, 9)
    store.add_manifest(1, 6)
    store.objects[entry_key(Position(1, 5))] = b"not read"
    store.delete(entry_key(Position(1, 10)))
    assert run(terms.seal(claimed(store, 3), 0, Position(1, 5)), store).parent == (1, 9)


def test_an_entry_that_is_stored_meanwhile_counts(store: ScriptedStore) -> None:
    store.add_term(1, slots=1)
    term = claimed(store, 2)
    store.on_put = lambda key: store.add_term(1, slots=2) if key == entry_key(Position(1, 2)) else None
    assert run(terms.seal(term, 0), store).parent == (1, 2)


def test_a_primary_that_is_always_faster_ends_at_a_fence_before_it(store: ScriptedStore) -> None:
    """Without one, a claimant would follow it for ever."""
    store.add_term(1, slots=1)
    term = claimed(store, 2)
    stored = itertools.count(2)

    def write(key: str) -> None:
        slot = next(stored)
        assert slot < 10 * terms.FENCE_AHEAD
        while (there := store.kind(1, slot)) not in (None, EntryKind.FENCE):
            slot = next(stored)
        if there is None:
            store.add(EntryKind.OPERATIONS, 1, slot)

    store.on_put = write
    sealed = run(terms.seal(term, 0), store)
    assert sealed.parent == (1, 1 + terms.FENCE_AHEAD)
    assert store.kind(1, 2 + terms.FENCE_AHEAD) == EntryKind.FENCE


def test_a_fence_of_another_claimant_ends_the_term(store: ScriptedStore) -> None:
    store.add_term(1, slots=2)
    store.add_fence(1, 3)
    store.add(EntryKind.OPERATIONS, 1, 4)
    term = claimed(store, 2)
    store.puts.clear()
    assert run(terms.seal(term, 0), store).parent == (1, 2)
    assert store.puts == []


def test_terms_that_have_not_begun_are_ended_in_slot_0(store: ScriptedStore) -> None:
    store.add_term(1, slots=2)
    store.add_claim(2)
    store.add_fence(2, 0)
    store.add_claim(3)
    assert run(terms.seal(claimed(store, 4), 0, Position(1, 1)), store).parent == (1, 2)
    assert [store.kind(3, 0), store.kind(2, 0), store.kind(1, 3)] == [EntryKind.FENCE] * 3


def test_a_term_that_has_only_begun_counts(store: ScriptedStore) -> None:
    store.add_term(1, slots=2)
    store.add_fence(1, 3)
    store.add_term(2, slots=0, parent=Position(1, 2))
    assert run(terms.seal(claimed(store, 3), 0), store).parent == (2, 0)
    assert store.kind(2, 1) == EntryKind.FENCE


def test_who_is_late_stops_before_old_terms(store: ScriptedStore) -> None:
    store.add_term(1, slots=2)
    store.add_claim(2)
    term = claimed(store, 3)
    store.add_claim(4)
    with pytest.raises(Deposed, match="term 4 was claimed before term 3 had begun"):
        run(terms.seal(term, 0), store)
    assert store.kind(1, 3) is None


@pytest.mark.parametrize("slot", [1, 3])
def test_what_cannot_be_read_is_not_passed_over(store: ScriptedStore, slot: int) -> None:
    """A fence before or after it could lose what was acknowledged."""
    store.add_term(1, slots=3)
    term = claimed(store, 2)
    key = entry_key(Position(1, slot))
    good = store.objects[key]
    before = dict(store.objects)
    for data, error, sentence in (
        (good[:-1] + bytes((good[-1] ^ 1,)), InvalidObject, "fails its checksum; to continue before it would lose"),
        (b"", InvalidObject, "is no entry; to continue"),
        (good[:4] + b"\x02" + good[5:], NewerObject, "has format 2, this version knows up to 1; to continue"),
        (encode_entry(EntryKind.BEGIN, Position(1, slot), 0, []), InvalidObject, "is the beginning of a term"),
    ):
        store.objects[key] = data
        with pytest.raises(error, match=f"{key} {sentence}"):
            run(terms.seal(term, 0), store)
        assert store.objects == {**before, key: data}


def test_a_term_that_begins_with_something_else_is_refused(store: ScriptedStore) -> None:
    store.add_term(1, slots=3)
    store.add(EntryKind.OPERATIONS, 1, 0)
    for steps in (terms.seal(claimed(store, 2), 0), terms.newest_begun(), terms.next_begun(0)):
        with pytest.raises(InvalidObject, match="is not the beginning of a term"):
            run(steps, store)


def test_a_store_that_has_lost_what_was_applied_is_not_sealed(store: ScriptedStore) -> None:
    store.add_term(1, slots=3)
    term = claimed(store, 2)
    sentence = "is not the entry that this server has applied: the store has lost objects"
    for slot in (4, 7):
        with pytest.raises(InvalidObject, match=f"{entry_key(Position(1, slot))} {sentence}"):
            run(terms.seal(term, 0, Position(1, slot)), store)
    store.add_fence(1, 4)
    with pytest.raises(InvalidObject, match=sentence):
        run(terms.seal(term, 0, Position(1, 4)), store)
    with pytest.raises(InvalidObject, match="no term after 1, this server has applied entries of term 2"):
        run(terms.seal(term, 0, Position(2, 0)), store)


def test_a_store_with_a_snapshot_and_no_entries_has_lost_objects(store: ScriptedStore) -> None:
    store.add_claim(1)
    store.add_claim(2)
    store.add_manifest(7, 3)
    for steps in (terms.seal(claimed(store, 3), 0), terms.newest_begun()):
        with pytest.raises(InvalidObject, match="no term has begun, and there is manifests/0000000000000007-0"):
            run(steps, store)


def test_a_snapshot_that_is_stored_before_its_base_is_no_entry(store: ScriptedStore) -> None:
    """The primary died between the two."""
    store.add_term(1, slots=3)
    store.add_manifest(1, 4)
    assert run(terms.seal(claimed(store, 2), 0), store).parent == (1, 3)
    assert run(terms.seal(claimed(store, 3), 0), store).parent == (1, 3)


# A sweeper


@pytest.mark.parametrize("is_own", [True, False])
def test_a_fence_in_a_slot_that_was_swept_ends_nothing(store: ScriptedStore, is_own: bool) -> None:
    """Between the list of the manifests and the fence, the claimant sleeps for longer than the history is kept."""
    store.add_term(1, slots=2)
    term = claimed(store, 2)

    def sleep(key: str) -> None:
        store.on_put = lambda key: None
        store.add_term(1, slots=9)
        store.sweep(1, 7)
        if not is_own:
            store.add_fence(1, 3)  # of another claimant that has slept as long

    store.on_put = sleep
    assert run(terms.seal(term, 0), store).parent == (1, 9)
    assert store.kind(1, 10) == EntryKind.FENCE


def test_what_was_applied_and_swept_since_is_no_loss(store: ScriptedStore) -> None:
    store.add_term(1, slots=9)
    term = claimed(store, 2)
    steps = terms.seal(term, 0, Position(1, 2))
    call = next(steps)
    assert call == terms.ListKeys("manifests/0000000000000001-")
    call = steps.send(call(store))
    store.sweep(1, 7)
    with pytest.raises(StopIteration) as end:
        while True:
            call = steps.send(call(store))
    assert end.value.value.parent == (1, 9)


def test_a_claimant_that_sleeps_until_all_it_knows_is_swept_was_deposed(store: ScriptedStore) -> None:
    """The store has lost nothing."""
    store.add_term(1, slots=2)
    term = claimed(store, 2)
    for slot in range(3):
        store.delete(entry_key(Position(1, slot)))
    store.add_term(3, slots=0, parent=Position(1, 2))
    with pytest.raises(Deposed, match="term 3 was claimed before term 2 had begun"):
        run(terms.seal(term, 0, Position(1, 2)), store)


def test_a_claimant_that_sleeps_until_its_own_term_is_swept_does_not_begin(store: ScriptedStore) -> None:
    store.add_term(1, slots=2)
    term = claimed(store, 2)
    sealed = run(terms.seal(term, 0), store)
    store.add_claim(3)  # which has fenced term 2, begun, and was followed by a sweep of all before it
    with pytest.raises(Deposed, match="term 3 was claimed before term 2 had begun"):
        run(terms.begin(term, sealed, 0), store)


# Begin


def test_who_was_fenced_does_not_begin(store: ScriptedStore) -> None:
    store.add_term(1, slots=2)
    term = claimed(store, 2)
    sealed = run(terms.seal(term, 0), store)
    store.add_fence(2, 0)
    with pytest.raises(Deposed, match="term 2 was ended by member other before it had begun"):
        run(terms.begin(term, sealed, 0), store)
    store.add_term(2, slots=0, parent=Position(1, 2))
    with pytest.raises(Deposed, match="term 2 was begun by another server"):
        run(terms.begin(term, sealed, 0), store)


# What has begun


def test_the_newest_term_that_has_begun_is_found_below_claims(store: ScriptedStore) -> None:
    assert run(terms.newest_begun(), store) is None
    store.add_claim(1)
    assert run(terms.newest_begun(), store) is None
    store.add_term(2, slots=1, parent=Position(1, 2), member="primary")
    store.add_claim(3)
    store.add_fence(3, 0)
    store.add_claim(4)
    begun = run(terms.newest_begun(), store)
    address = "primary:1"
    assert begun == Begun(Term(2, "primary", address, "n"), Begin(Position(1, 2), "primary", address))


def test_a_term_whose_beginning_was_swept_has_begun(store: ScriptedStore) -> None:
    store.add_term(1, slots=9)
    store.sweep(1, 4)
    begun = Begun(Term(1, "old", "old:1", "n"), None)
    assert run(terms.newest_begun(), store) == begun
    assert run(terms.next_begun(0), store) == begun
    store.add_fence(1, 0)  # by a claimant that has slept
    assert run(terms.newest_begun(), store) == begun


def test_a_follower_finds_the_term_that_continues_an_ended_one(store: ScriptedStore) -> None:
    store.add_term(1, slots=2)
    assert run(terms.next_begun(1), store) is None
    store.add_claim(2)
    assert run(terms.next_begun(1), store) is None
    store.add_fence(2, 0)
    store.add_term(3, slots=0, parent=Position(1, 2))
    store.add_term(4, slots=0, parent=Position(3, 0))
    for ended, expected in ((1, 3), (3, 4)):
        begun = run(terms.next_begun(ended), store)
        assert begun is not None and begun.term.number == expected
    assert run(terms.next_begun(4), store) is None


def test_a_follower_that_was_away_for_the_whole_history_learns_it(store: ScriptedStore) -> None:
    """Terms 2 and 3 were swept; the parent of what is found is not what the follower has applied."""
    store.add_term(4, slots=0, parent=Position(3, 8))
    begun = run(terms.next_begun(1), store)
    assert begun is not None and begun.begin is not None and begun.begin.parent == (3, 8)


# The driver


def test_the_driver_repeats_a_call_and_pauses_before(store: ScriptedStore) -> None:
    store.add_term(1, slots=0)
    pauses: list[int] = []
    store.lost = [DID_NOT_HAPPEN] * 3
    term = terms.run_steps(terms.claim("me", "me:1", "nonce"), store, lambda: pauses.append(1))
    assert term is not None and len(pauses) == 3


def test_the_driver_gives_up_after_so_many_repeats_of_one_call(store: ScriptedStore) -> None:
    pauses: list[int] = []

    def refuse(prefix: str, after: str = "") -> Iterator[StoredObject]:
        raise StoreUnavailable("no answer")

    store.list = refuse  # type: ignore[method-assign]
    steps = terms.newest_term()
    with pytest.raises(StoreUnavailable):
        terms.run_steps(steps, store, lambda: pauses.append(1), repeats_max=2)
    assert len(pauses) == 2


def test_the_driver_passes_other_errors_on(store: ScriptedStore) -> None:
    def refuse(key: str) -> None:
        raise StoreRefused("no rights")

    store.on_put = refuse
    with pytest.raises(StoreRefused):
        run(terms.claim("me", "me:1", "nonce"), store)
