"""The consumer without I/O: assignment, fetch, positions, offset commit."""
