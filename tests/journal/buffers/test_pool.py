"""The pool against a brute-force allocator (a dict of bytes).

Invariants: a buffer keeps what was written into it until its last release (so no two overlap); what is out is
counted exactly; what is taken is below twice what was asked for, and of 16 bytes at least; when everything is
released and the pool trimmed, nothing is left.
"""

from __future__ import annotations

import logging
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from journal.buffers import Buffer, Pool, Released
from journal.buffers.arena import PAGE_BYTES, Arena
from journal.buffers.pool import CACHE_BYTES_MAX, RUN_BYTES_MAX, RUN_COUNT_MAX, TRIM_INTERVAL, ThreadCache
from tests.scale import SEED, scaled, seeded

SIZES = st.one_of(st.integers(0, 600), st.integers(0, 70_000), st.sampled_from([8192, 1 << 20, (16 << 20) + 1]))


class Model:
    """Each live buffer with what must be in it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.live: list[tuple[Buffer, bytes]] = []
        self.mark = 0

    def allocate(self, size: int) -> None:
        buffer = self.pool.allocate(size)
        self.mark += 1
        pattern = self.mark.to_bytes(4, "big")
        content = (pattern * (min(size, 4096) // 4 + 1))[: min(size, 4096)]
        buffer.view[: len(content)] = content
        if size > 4100:
            buffer.view[-4:] = pattern
        self.live.append((buffer, content))

    def release(self, index: int) -> None:
        buffer, content = self.live.pop(index % len(self.live))
        assert buffer.view[: len(content)] == content
        if buffer.size > 4100:
            assert buffer.view[-4:] == content[:4]
        buffer.release()

    def check(self) -> None:
        stats = self.pool.stats()
        assert stats.live_count == len(self.live)
        assert stats.live_bytes == sum(buffer.capacity for buffer, _ in self.live)
        asked = sum(max(buffer.size, 1) for buffer, _ in self.live)
        assert asked <= stats.live_bytes <= 2 * asked + 16 * len(self.live)

    def finish(self) -> None:
        while self.live:
            self.release(-1)
        self.pool.trim()
        stats = self.pool.stats()
        assert (stats.live_count, stats.live_bytes, stats.cached_bytes, stats.slab_count) == (0, 0, 0, 0)
        assert sum(stats.chunk_counts) == stats.huge_bytes == 0


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model(Pool(arena_count=1))

    @rule(size=SIZES)
    def allocate(self, size: int) -> None:
        self.model.allocate(size)

    @rule(index=st.integers(0, 1 << 20))
    def release(self, index: int) -> None:
        if self.model.live:
            self.model.release(index)

    @rule()
    def trim(self) -> None:
        self.model.pool.trim()

    @invariant()
    def counts_agree(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        self.model.finish()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=max(20, scaled(500)), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("run", range(3))
def test_long_random_sequences_keep_every_byte(run: int) -> None:
    print("seed", SEED, "run", run)
    random = seeded("pool", run)
    model = Model(Pool())
    for step in range(scaled(100_000)):
        share = 0.55 if (step // 500) % 2 == 0 else 0.45
        if random.random() < share or not model.live:
            model.allocate(random.choice((random.randint(0, 600), random.randint(0, 9000), 1 << random.randint(9, 20))))
        else:
            model.release(random.randrange(len(model.live)))
        if step % 1000 == 0:
            model.pool.trim()
            model.check()
    model.finish()


def test_threads_pass_buffers_to_each_other_and_all_come_back() -> None:
    pool = Pool()
    passed: list[Buffer] = []
    errors: list[BaseException] = []

    def work(number: int) -> None:
        random = seeded("threads", number)
        try:
            for _ in range(scaled(30_000)):
                buffer = pool.allocate(random.randint(4, 20_000)).retain()
                buffer.view[:4] = number.to_bytes(4, "big")
                assert bytes(buffer.view[:4]) == number.to_bytes(4, "big")
                buffer.release()
                passed.append(buffer)
                if random.random() < 0.9:
                    passed.pop().release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    for buffer in passed:
        buffer.release()
    pool.trim()
    assert pool.stats()[:4] == (0, 0, 0, 0)
    assert sum(pool.stats().chunk_counts) == 0


def test_a_repeated_request_is_served_by_the_cache() -> None:
    pool = Pool()
    for _ in range(100):
        pool.allocate(5000).release()
    assert pool.stats().cache_hit_count == 99


def test_a_forgotten_buffer_is_reported_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool(debug=True)
    kept = pool.allocate(50)
    with caplog.at_level(logging.WARNING, "journal.buffers"):
        pool.allocate(3000)
    (largest, smaller) = pool.leaks()
    assert (largest.size_bytes, smaller.size_bytes) == (3000, 50)
    assert __file__ in largest.place
    assert "dropped without a release" in caplog.text
    assert pool.stats().forgotten_count == 1
    kept.release()


def test_a_size_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Pool().allocate(-1)


def test_untouched_memory_costs_nothing() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as status:
            return int(status.read().split()[1]) * 4096

    pool = Pool()
    before = resident_bytes()
    buffers = [pool.allocate(8 << 20) for _ in range(20)]
    assert resident_bytes() - before < 16 << 20
    for buffer in buffers:
        buffer.release()


# Holds: the memory stays until the last one ends, and mistakes say so.


def test_a_buffer_has_exactly_the_bytes_that_were_asked_for() -> None:
    pool = Pool()
    buffer = pool.allocate(1000)
    buffer.view[:] = b"a" * 1000
    assert (len(buffer.view), buffer.size, pool.stats().live_bytes) == (1000, 1000, 1024)


def test_the_memory_stays_until_the_last_hold_ends() -> None:
    pool = Pool()
    buffer = pool.allocate(100).retain().retain()
    buffer.release()
    buffer.release()
    assert buffer.holds == 1
    assert pool.stats().live_count == 1
    buffer.release()
    assert pool.stats().live_count == 0


def test_use_after_the_last_release_says_so() -> None:
    buffer = Pool().allocate(100)
    view = buffer.view
    buffer.release()
    for mistake in (buffer.release, buffer.retain, lambda: buffer.view):
        with pytest.raises(Released, match="100 bytes"):
            mistake()
    with pytest.raises(ValueError, match="released memoryview"):
        view[0]


def test_an_array_over_the_view_does_not_keep_the_memory_back() -> None:
    pool = Pool()
    buffer = pool.allocate(64)
    over_it = bytearray().join([buffer.view]), memoryview(buffer.view)
    buffer.release()
    assert pool.stats().live_count == 0
    assert len(over_it) == 2


def test_a_traced_buffer_knows_who_asked_for_it() -> None:
    buffer = Pool(debug=True).allocate(10)
    assert buffer.allocated_at.startswith(__file__)
    buffer.release()


# What a thread keeps: bounded, of its own arena, and not longer than it is needed.


def test_a_kept_place_is_given_again_and_only_for_its_size() -> None:
    arena = Arena()
    cache = ThreadCache(arena)
    place = arena.allocate(1024)
    assert cache.try_cache(place)
    assert cache.allocate(2048) is None
    assert cache.allocate(1024) is place
    assert cache.allocate(1024) is None
    assert (cache.counts.allocated, cache.counts.hits) == (3, 1)


def test_the_count_of_one_size_and_the_bytes_of_all_are_bounded() -> None:
    arena = Arena()
    cache = ThreadCache(arena)
    assert sum(cache.try_cache(arena.allocate(PAGE_BYTES)) for _ in range(100)) == RUN_COUNT_MAX
    while cache.try_cache(arena.allocate(RUN_BYTES_MAX)):
        pass
    assert cache.cached_bytes <= CACHE_BYTES_MAX
    assert not ThreadCache(arena).try_cache(arena.allocate(2 * RUN_BYTES_MAX))


def test_another_arenas_place_is_not_kept() -> None:
    assert not ThreadCache(Arena()).try_cache(Arena().allocate(64))


def test_what_was_not_requested_is_given_back() -> None:
    arena = Arena()
    cache = ThreadCache(arena)
    for _ in range(10):
        cache.try_cache(arena.allocate(1024))
    for _ in range(2 * TRIM_INTERVAL):
        place = cache.allocate(1024)
        assert place is not None
        cache.try_cache(place)
    assert cache.cached_bytes == arena.used_bytes() == 1024, "one was in use at a time"


def test_draining_gives_everything_back() -> None:
    arena = Arena()
    cache = ThreadCache(arena)
    for size in (16, 1024, PAGE_BYTES):
        cache.try_cache(arena.allocate(size))
    cache.drain()
    assert cache.cached_bytes == arena.used_bytes() == 0
