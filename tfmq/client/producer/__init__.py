"""The producer without I/O: core, deliveries, the local outbox."""
