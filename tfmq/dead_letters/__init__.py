"""Dead letters: messages whose handling finally failed. docs/dead-letters.md is the manual.

A program can do what the command `tfmq dlq` does:

    from tfmq.dead_letters import Desk, Selection, Wish

    with Desk("/var/lib/billing/dead.db", servers) as desk:
        for letter in desk.letters(Selection(states=("dead",), error="Timeout"), whole=True):
            print(letter.id, letter.message().text, letter.failures[-1].traceback)
        desk.redrive(Wish(Selection(error="Timeout"), rate=50.0))

`open_dead_letters` returns the store of a consumer, a `tfmq.client.worker.dead_letter_store.DeadLetterStore`. Each name
is imported when it is first used, so importing this package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmq.dead_letters.admin import Desk as Desk
    from tfmq.dead_letters.model import Letter as Letter
    from tfmq.dead_letters.model import Selection as Selection
    from tfmq.dead_letters.open import open_dead_letters as open_dead_letters
    from tfmq.dead_letters.redrive import Report as Report
    from tfmq.dead_letters.redrive import Wish as Wish
    from tfmq.dead_letters.retry_loop import Retrying as Retrying
    from tfmq.dead_letters.store import default_path as default_path

_PLACES = {
    "Desk": "tfmq.dead_letters.admin",
    "Letter": "tfmq.dead_letters.model",
    "Report": "tfmq.dead_letters.redrive",
    "Retrying": "tfmq.dead_letters.retry_loop",
    "Selection": "tfmq.dead_letters.model",
    "Wish": "tfmq.dead_letters.redrive",
    "default_path": "tfmq.dead_letters.store",
    "open_dead_letters": "tfmq.dead_letters.open",
}
__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tfmq.dead_letters' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value
