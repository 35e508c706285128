"""Planted bugs: what `tfmq trace` and `Admin.trace` say of a message."""

from __future__ import annotations

from typing import Final

from tools.mutants.mutant import Mutant

ADMIN: Final = "tests/client/admin/test_trace.py"
PRODUCT: Final = "tfmq/client/admin/trace.py"

TRACE: Final = (
    Mutant(
        "a-trace-makes-a-message-durable",
        "a trace changes nothing",
        PRODUCT,
        "max_bytes=max_bytes, read=commands.READ_WRITTEN",
        "max_bytes=max_bytes, wait_ms=100, read=commands.READ_FORCED",
        [ADMIN],
    ),
    Mutant(
        "a-written-message-is-called-synced",
        "a trace says whether a power failure may lose the message",
        PRODUCT,
        "durable=found.forced_offset >= trailer.next",
        "durable=found.end_offset >= trailer.next",
        [ADMIN],
    ),
    Mutant(
        "the-next-message-of-a-group-counts-as-passed",
        "a group has passed a message if its offset is after it",
        PRODUCT,
        "        if committed > offset:",
        "        if committed >= offset:",
        [ADMIN],
    ),
    Mutant(
        "any-group-is-listed",
        "groups that do not read the topic are not listed",
        PRODUCT,
        'if any(topic.name in each.get("topics", ()) for each in description.get("members", ())):',
        'if description.get("members"):',
        [ADMIN],
    ),
    Mutant(
        "the-last-transaction-of-an-append-is-that-of-all",
        "a transaction is named only where it is certain",
        PRODUCT,
        "in_it = is_last or",
        "in_it = True or",
        [ADMIN],
    ),
    Mutant(
        "a-two-phase-commit-without-its-name",
        "the commit record of a two-phase transaction has its xid",
        "tfmq/transaction/store.py",
        "self._decision_time(), transaction.xid)",
        "self._decision_time())",
        [ADMIN],
    ),
    Mutant(
        "another-delivered-message-is-taken-for-it",
        "a trace of a handle takes no other message for the delivered one",
        PRODUCT,
        "first, count, position == turn)",
        "first, count, True)",
        [ADMIN],
    ),
    Mutant(
        "the-oldest-message-with-a-key",
        "a search by key finds the newest message",
        PRODUCT,
        "found.origin.append_ms > newest.origin.append_ms",
        "found.origin.append_ms < newest.origin.append_ms",
        [ADMIN],
    ),
    Mutant(
        "a-message-of-the-file-controls-the-terminal",
        "texts of messages and errors are escaped in a timeline",
        "tfmq/cli/trace.py",
        "event, escape_unprintable(text))",
        "event, text)",
        ["tests/cli/test_trace.py"],
    ),
)
