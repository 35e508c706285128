"""Planted bugs: each breaks one promise on purpose, and a test has to see it."""
