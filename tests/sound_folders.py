"""What `tfmq log verify --records` would say of the data folders that tests leave on simulated disks.

A test on whose disk no byte was changed, and no call failed, left a sound folder, whatever its broker did and however
it ended. `watched` is around every test (tests/conftest.py); what it finds fails the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final
from weakref import WeakSet

import pytest

from journal import filenames
from journal.fsck.findings import DAMAGE, Finding
from journal.fsck.log_verify import verify
from journal.fsck.wal_verify import is_journal, verify_journal
from journal.testing import SimulatedDisk, SimulatedFile
from journal.testing.faults import Faults
from tfmq.broker.request_handler import RequestHandler
from tfmq.delay.arrivals.log import ARRIVALS_SUFFIX as ARRIVALS_SUFFIX
from tfmq.delay.buckets.fsck import ARRIVALS_NAME, is_bucket_folder, verify_buckets
from tfmq.delay.buckets.fsck import FOLDER_NAME as DELAY_FOLDER

HONEST_FORCE: Final = SimulatedFile.force
CATALOG_FOLDER, CATALOG_SUFFIX = "meta", ".catalog"
DISKS_MAX: Final = 4
"""Of one test the last so many are looked at."""
BYTES_MAX: Final = 4 << 20
"""Larger folders take too long."""


def damage_in(disk: SimulatedDisk, data: str) -> list[Finding]:
    """What a verification of all records of the data folder names as damage."""
    found: list[Finding] = []
    for folder, suffix in partition_folders(disk, data):
        found += verify(disk, folder, records=True, suffix=suffix).findings
    journal, delay = filenames.join(data, filenames.TRANSACTIONS_FOLDER), filenames.join(data, DELAY_FOLDER)
    if is_journal(disk, journal):
        found += verify_journal(disk, journal, records=True).findings
    if is_bucket_folder(disk, delay):
        found += verify_buckets(disk, delay, records=True).findings
    return [each for each in found if each.weight == DAMAGE]


def partition_folders(disk: SimulatedDisk, data: str) -> Iterator[tuple[str, str]]:
    for folder in [data, filenames.join(data, DELAY_FOLDER)]:
        for name in disk.list(folder) if disk.is_folder(folder) else []:
            path = filenames.join(folder, name)
            suffix = {CATALOG_FOLDER: CATALOG_SUFFIX, ARRIVALS_NAME: ARRIVALS_SUFFIX}.get(
                name, filenames.SEGMENT_SUFFIX
            )
            if disk.is_folder(path) and any(each.endswith(suffix) for each in disk.list(path)):
                yield path, suffix


@contextmanager
def watched() -> Iterator[None]:
    """Around one test: fails it where a folder that must be sound is reported as damaged."""
    used: dict[SimulatedDisk, str] = {}
    changed: WeakSet[SimulatedDisk | Faults] = WeakSet()
    patch = pytest.MonkeyPatch()

    def after_all(owner: type, name: str, then: Any) -> None:
        call = getattr(owner, name)

        @wraps(call)
        def both(self: Any, *arguments: Any, **options: Any) -> Any:
            result = call(self, *arguments, **options)
            then(self, result, *arguments)
            return result

        patch.setattr(owner, name, both)

    def opened(engine: RequestHandler, _: object, config: Any, disk: Any, *__: object) -> None:
        # A test that replaces the fsync shows that lost bytes are noticed: its folders are not sound.
        if isinstance(disk, SimulatedDisk) and SimulatedFile.force is HONEST_FORCE:
            used[disk] = str(config.server.data)
            if len(used) > DISKS_MAX:
                del used[next(iter(used))]

    def tampered(disk: SimulatedDisk, *_: object) -> None:
        changed.add(disk)

    def failing(faults: Faults, *_: object) -> None:
        changed.add(faults)

    def crashed(disk: SimulatedDisk, left: SimulatedDisk, *_: object) -> None:
        if disk in changed or disk.faults in changed:
            changed.add(left)

    after_all(RequestHandler, "__init__", opened)
    after_all(SimulatedDisk, "damage", tampered)
    after_all(SimulatedDisk, "write_file", tampered)
    after_all(SimulatedDisk, "crash", crashed)
    after_all(Faults, "fail", failing)
    try:
        yield
    finally:
        patch.undo()
    for disk, data in used.items():
        if disk not in changed and disk.faults not in changed and disk.used_bytes() <= BYTES_MAX:
            disk.faults.before = disk.after = None
            assert damage_in(disk, data) == [], "`tfmq log verify --records` reports damage in a sound folder"
