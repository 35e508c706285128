"""Verify and repair the files of logs and of the transaction journal."""
