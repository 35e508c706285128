"""Transactions of a producer: gather, prepare, commit, roll back, check back."""
