"""The start of the buckets: the checkpoint is read and made sure of, then what does not count is cleared away.

Only sizes are looked at: a start costs the same however many messages wait.
"""

from collections.abc import Callable
from typing import Final

from journal import filenames
from journal.disk import Disk, require_files
from journal.errors import Corrupt
from tfmq.delay.bucket import Bucket
from tfmq.delay.bucket_file import HEAD_SIZE, Identity
from tfmq.delay.bucket_recovery import Decision, Found, decide, is_house_name
from tfmq.delay.checkpoint import Checkpoint, CheckpointFile

SALT_SIZE: Final = 8

WAY_ON: Final = "`tfmq log repair` says what is lost and makes the rest usable"


class BucketOpening:
    """One start in `folder`, which exists. `labels`: the rows of the table that were met."""

    def __init__(
        self, disk: Disk, folder: str, new_id: Callable[[], int], randomness: Callable[[int], bytes]
    ) -> None:
        self.disk = disk
        self.folder = folder
        self.file = CheckpointFile(disk, folder)
        self.checkpoint: Checkpoint
        self.buckets: list[Bucket] = []
        self.labels: set[str] = set()
        self._new_id = new_id
        self._randomness = randomness

    def run(self) -> None:
        """Raises as `Buckets.open`."""
        children = self.disk.list(self.folder)
        wanted = [name for name in children if is_house_name(name) and not filenames.is_aside(name)]
        require_files(self.disk, self.folder, wanted)
        checkpoint = self.file.read()
        if checkpoint is None:
            self._require_none()
            salt = int.from_bytes(self._randomness(SALT_SIZE), "big")
            checkpoint = Checkpoint(Identity(self._new_id(), salt), 0, 0, 0, ())
            self.file.write(checkpoint)
        found = decide(checkpoint.buckets, self._sizes())
        self.labels = {each.row.label for each in found}
        self._refuse(found)
        self.checkpoint = checkpoint
        # An earlier process may have written it without seeing it forced: nothing is removed on the word of a
        # checkpoint that a power cut could take back.
        self.file.settle()
        for each in found:
            self._act(each)
        self.buckets = [
            Bucket(self.folder, checkpoint.identity, each.span, slot, each.size, each.count, each.dead)
            for slot, each in enumerate(checkpoint.buckets, 1)
        ]

    def _sizes(self) -> dict[str, int]:
        paths = {name: filenames.join(self.folder, name) for name in self.disk.list(self.folder)}
        return {name: self.disk.size(path) for name, path in paths.items() if not self.disk.is_folder(path)}

    def _require_none(self) -> None:
        """Raises Corrupt if there are buckets: a new checkpoint would give them up."""
        found = [each.name for each in decide((), self._sizes()) if each.row.label == "unlisted"]
        if found:
            what = f"the checkpoint of {len(found)} buckets, such as {found[0]}, is missing: {WAY_ON}"
            raise Corrupt(self.file.path, 0, 0, what)

    def _refuse(self, found: list[Found]) -> None:
        missing = [each for each in found if each.row.decision is Decision.REFUSE]
        if missing:
            lost = sum(each.listed.count for each in missing if each.listed is not None)
            path = filenames.join(self.folder, missing[0].name)
            what = f"the file is missing ({len(missing)} such, with {lost} messages in all): {WAY_ON}"
            raise Corrupt(path, 0, HEAD_SIZE, what)

    def _act(self, found: Found) -> None:
        path = filenames.join(self.folder, found.name)
        if found.row.decision is Decision.REMOVE:
            self.disk.unlink(path)
        elif found.row.decision is Decision.CUT and found.listed is not None:
            file = self.disk.open_write(path)
            file.truncate(found.listed.size)
            file.force()
            file.close()
