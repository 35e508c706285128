"""Buckets: files of delayed messages, each for one range of due times."""
