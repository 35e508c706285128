"""Buckets: files of delayed messages that are due in one range of time."""
