"""Files of Python below a folder, and whether one of them changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

SUFFIX: Final = ".py"
FILES_MAX: Final = 10_000
"""More are somebody's whole disk: looking at them all would be the work of the process."""


class Sources:
    """Looks at times of change; folders that begin with a dot, and virtual environments, are left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether a file came, went or changed since the last look."""
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for folder, folders, names in os.walk(self._folder):
            folders[:] = [
                name
                for name in folders
                if not name.startswith((".", "__pycache__"))
                and not (Path(folder) / name / "pyvenv.cfg").exists()
            ]
            for name in names:
                if name.endswith(SUFFIX) and len(found) < FILES_MAX:
                    path = os.path.join(folder, name)
                    try:
                        found[path] = os.stat(path).st_mtime_ns
                    except FileNotFoundError:  # an editor that writes a new file and renames it
                        continue
        return found
