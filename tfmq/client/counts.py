"""What a consumer says of itself in numbers: `stats()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmq.client.consuming import Consuming


def counts(core: Consuming) -> dict[str, Any]:
    """Counts since the start, and where each partition stands now."""
    positions, fetcher = core.positions, core.fetcher
    return {
        "messages": core.messages,
        "bytes": fetcher.bytes_read,
        "fetches": fetcher.fetches,
        "connections": core.link.connections,
        **_standing(core),
        "skipped": fetcher.skipped_count,
        "skipped_ranges": [tuple(each) for each in fetcher.skipped],
        "partitions": {
            str(name): {
                "offset": positions.handed_out(name).offset,
                "processed_offset": positions.processed(name).offset,
                "saved_offset": positions.saved(name),
                "waiting_bytes": feed.chunk_bytes,
                "paused": feed.paused,
                "stopped": None if feed.failure is None else str(feed.failure),
            }
            for name, feed in fetcher.feeds.items()
        },
    }


def _standing(core: Consuming) -> dict[str, Any]:
    """Where it stands in its group."""
    if core.membership is None:
        return {"commits": 0, "generation": 0}
    return {"commits": core.offsets.commits, **core.membership.stats()}
