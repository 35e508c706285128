"""Dead letters: messages whose handling failed, kept where the consumer runs. docs/dead-letters.md is the page.

    store = open_dead_letters("/var/lib/billing/dead.db", group="billing", calls_max=6)

For a consumer this gives a `tfmq.client.dead_letters.DeadLetters`. What `tfmq dlq` does is in `desk`.
"""

from tfmq.dead_letters.address import default_path as default_path
from tfmq.dead_letters.opening import open_dead_letters as open_dead_letters
from tfmq.dead_letters.retrying import Retrying as Retrying

__all__ = ["Retrying", "default_path", "open_dead_letters"]
