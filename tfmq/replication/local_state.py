"""DATA/replica: what a server knows of its own place among the replicas. It is not replicated."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from journal.disk import Disk, read_file, write_new_file
from journal.filenames import join
from tfmq.replication.entries import Position
from tfmq.replication.operations import LOCAL_FOLDER

DEPOSED: Final = "deposed-"
"""How the folders begin to which a deposed primary moves what only it has; the number of its term follows."""
STATE_NAME: Final = "state"
NEW_NAME: Final = "state.new"
FORMAT: Final = 1
MEMBER_BYTES: Final = 8

Role = Literal["", "primary", "standby"]


class LocalState(NamedTuple):
    """The content of DATA/replica/state.

    `member` identifies this folder among the replicas. `role` is what the server was when it wrote the file, "" before
    the first time. `position`: as a primary, an entry of its term that is stored with all before it; as a standby, one
    that was applied. `is_clean`: the folder is exactly what it was after `position`. `time_ms`: the time of
    the entry at `position`, 0 if it is not known. `store`: the name of the store that has it.
    """

    member: str
    role: Role = ""
    position: Position | None = None
    is_clean: bool = False
    time_ms: int = 0
    store: str = ""


class LocalStateFile:
    """Reads and replaces DATA/replica/state. Raises OSError and Full as the disk does."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._own = join(folder, LOCAL_FOLDER)

    def read(self, randomness: Callable[[int], bytes]) -> LocalState:
        """Return the state. A file that is missing or cannot be read counts as that of a new member."""
        try:
            fields = json.loads(read_file(self._disk, join(self._own, STATE_NAME)))
            term, slot = fields["position"] or (0, 0)
            position = Position(int(term), int(slot)) if fields["position"] else None
            role: Role = fields["role"] if fields["role"] in ("primary", "standby") else ""
            if fields["format"] == FORMAT:
                return LocalState(
                    str(fields["member"]),
                    role,
                    position,
                    fields["clean"] is True,
                    int(fields["time_ms"]),
                    str(fields.get("store", "")),
                )
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            pass
        return LocalState(randomness(MEMBER_BYTES).hex())

    def note_change(self) -> None:
        """Note that something else than the replication changes the folder, so that it is not taken for a clean one.

        A primary then stores the whole folder again, and a standby makes it from the store.
        """
        state = self.read(lambda size: b"")
        if state.is_clean:
            self.write(state._replace(is_clean=False))

    def note_broker(self) -> Role:
        """Note that a broker without replication is about to change the folder. Return the role that the server had.

        Where it was primary, it stores the whole folder again when it replicates again. Where it was a standby, the
        folder is from here on like one of a broker that was never replicated: what only this broker has written is
        moved aside, and not overwritten, when the server follows again.
        """
        state = self.read(lambda size: b"")
        if state.role == "standby":
            self.write(state._replace(role="", is_clean=False))
        else:
            self.note_change()
        return state.role

    def write(self, state: LocalState) -> None:
        """Replace the file durably."""
        if not self._disk.exists(self._own):
            self._disk.make_folder(self._own)
            self._disk.force_folder(self._folder)
        fields = {
            "format": FORMAT,
            "member": state.member,
            "role": state.role,
            "position": state.position,
            "clean": state.is_clean,
            "time_ms": state.time_ms,
            "store": state.store,
        }
        new = join(self._own, NEW_NAME)
        write_new_file(self._disk, new, [json.dumps(fields).encode() + b"\n"])
        self._disk.rename(new, join(self._own, STATE_NAME))
        self._disk.force_folder(self._own)
