"""The transaction journal: a write-ahead log of entries with checkpoints and snapshots."""
