"""Members that take partitions from each other, save late, fail and try again, all at once, with an observer.

    Struggle(open_one, open_shaky, random, calls=50).run()

Each claims under numbers that only grow, goes on where the claim says, and saves what it reaches, also long after the
partition is another's: it does not look. `open_shaky` opens a storage whose calls fail at any step, done or not.
"""

import itertools
import threading
from collections.abc import Callable
from random import Random

from tfmq.errors import Fenced, TfmqError
from tfmq.offsets.storage import ClaimingStorage, PartitionName, StoredOffset

Open = Callable[[], ClaimingStorage]
OpenShaky = Callable[[Random], ClaimingStorage]
MEMBERS = 3
NAMES = [PartitionName("orders", number) for number in range(3)]


class Struggle:
    """One group. What must hold is asserted in `run`."""

    def __init__(
        self, open_one: Open, open_shaky: OpenShaky, random: Random, calls: int, group: str = "struggle"
    ) -> None:
        self.group, self.calls = group, calls
        self.saved = dict.fromkeys(NAMES, 0)
        """The highest offset of which a save has returned."""
        self.claimed = dict.fromkeys(NAMES, 0)
        """The highest generation of which a claim has returned."""
        self.fenced = self.failed = self.looks = 0
        self._open_one, self._open_shaky, self._random = open_one, open_shaky, random
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._wrong: list[BaseException] = []
        self._done = threading.Event()

    def run(self) -> None:
        seeds = [self._random.random() for _ in range(MEMBERS)]
        members = [threading.Thread(target=self._guarded, args=(self._live, seed)) for seed in seeds]
        observer = threading.Thread(target=self._guarded, args=(self._look_on,))
        for each in (observer, *members):
            each.start()
        for each in members:
            each.join(300)
        self._done.set()
        observer.join(60)
        assert not self._wrong, self._wrong
        kept = self._open_one().read(self.group, NAMES)
        for name in NAMES:
            row = kept.get(name, StoredOffset(0))
            assert row.offset >= self.saved[name], f"{name}: {row} is behind what was saved, {self.saved[name]}"
            assert row.generation >= self.claimed[name] or name not in kept

    def _guarded(self, what: Callable[..., None], *arguments: float) -> None:
        try:
            what(*arguments)
        except BaseException as error:
            self._wrong.append(error)

    # A member

    def _live(self, seed: float) -> None:
        random = Random(seed)
        storage = self._open_shaky(random)
        places: dict[PartitionName, tuple[int, int]] = {}
        for _ in range(self.calls):
            if not places or random.random() < 0.3:
                self._claim(storage, random.sample(NAMES, random.randint(1, len(NAMES))), places)
            else:
                some = random.sample(sorted(places), random.randint(1, len(places)))
                for name in some:
                    generation, offset = places[name]
                    places[name] = (generation, offset + random.randint(0, 5))
                self._save(storage, some, places)
        storage.close()

    def _claim(
        self, storage: ClaimingStorage, names: list[PartitionName], places: dict[PartitionName, tuple[int, int]]
    ) -> None:
        with self._lock:
            generation = next(self._numbers)
        refused: set[PartitionName] = set()
        kept: dict[PartitionName, StoredOffset] = {}
        for name in names:  # one by one, so that a refusal of one says nothing of the others
            try:
                kept |= storage.claim(self.group, generation, [name])
            except Fenced:
                refused.add(name)
            except (TfmqError, OSError):
                self.failed += 1
                return
        with self._lock:
            for name in set(names) - refused:
                places[name] = (generation, kept[name].offset if name in kept else 0)
                self.claimed[name] = max(self.claimed[name], generation)

    def _save(
        self, storage: ClaimingStorage, names: list[PartitionName], places: dict[PartitionName, tuple[int, int]]
    ) -> None:
        with self._lock:
            lost = {name for name in names if places[name][0] < self.claimed[name]}
        rows = {name: StoredOffset(places[name][1], generation=places[name][0]) for name in names}
        late: set[PartitionName] = set()
        try:
            storage.save(self.group, max(row.generation for row in rows.values()), rows)
        except Fenced as error:
            late = {PartitionName(*each) for each in error.details["partitions"]}
            self.fenced += 1
        except (TfmqError, OSError):
            self.failed += 1
            return
        assert lost <= late, f"saved {rows} although {lost} had been claimed by others"
        with self._lock:
            for name in set(names) - late:
                self.saved[name] = max(self.saved[name], rows[name].offset)
        for name in late:
            del places[name]

    # Who looks on

    def _look_on(self) -> None:
        storage = self._open_one()
        before: dict[PartitionName, StoredOffset] = {}
        while not self._done.is_set():
            try:
                kept = storage.read(self.group, NAMES)
            except TfmqError:
                continue
            self.looks += 1
            for name, row in before.items():
                assert name in kept and kept[name].offset >= row.offset, f"{name}: {row} became {kept.get(name)}"
                assert kept[name].generation >= row.generation
            before = dict(kept)
