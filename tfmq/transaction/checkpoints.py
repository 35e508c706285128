"""When the journal's checkpoints begin, and how they end: a worker writes them while the owner goes on."""

import logging
from typing import Any

from journal.errors import JournalError
from journal.wal.store import JournalStore
from tfmq.transaction.queue import Run

logger = logging.getLogger("tfmq.transaction")


class Checkpoints:
    """One at a time. The owner's thread calls `tend` while no file is being begun."""

    def __init__(self, journal: JournalStore, run: Run) -> None:
        self._journal = journal
        self._run = run
        self.working = False

    def tend(self) -> None:
        """Begins a checkpoint if one is due."""
        if self.working or not self._journal.checkpoint_due:
            return
        work = self._journal.checkpoint()
        self.working = True
        self._run(work, self._done)

    def _done(self, _: Any, error: BaseException | None) -> None:
        self.working = False
        if error is None:
            self._journal.checkpointed(None)
        elif isinstance(error, JournalError | OSError):
            # The old checkpoints stand; the journal stays as long as it must, and the next try comes by itself.
            logger.error("a checkpoint of the transaction journal failed: %s", error)
            self._journal.checkpointed(error)
        else:
            raise error
