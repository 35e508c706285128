"""Pooled memory: arenas, chunks of pages, slabs, a cache for each thread, buffers held by reference count."""

from journal.buffers.pool import Buffer, Leak, Pool, PoolStats, Released

__all__ = ["Buffer", "Leak", "Pool", "PoolStats", "Released"]
