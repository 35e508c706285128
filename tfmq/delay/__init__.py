"""Delayed delivery: stores messages until they are due, then appends them to partitions."""
