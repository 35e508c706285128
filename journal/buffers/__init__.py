"""Pooled, reference-counted memory buffers: arenas, chunks of pages, slabs, thread caches."""

from journal.buffers.pool import Buffer, Leak, Pool, PoolStats, Released

__all__ = ["Buffer", "Leak", "Pool", "PoolStats", "Released"]
