"""Pooled memory: arenas, chunks of pages, slabs, a cache for each thread, buffers held by reference count."""

from journal.buffers.buffer import Buffer, Released
from journal.buffers.pool import Leak, Pool, PoolStats

__all__ = ["Buffer", "Leak", "Pool", "PoolStats", "Released"]
