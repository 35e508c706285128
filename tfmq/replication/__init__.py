"""Replication of a data folder through an object store, an SQL database or a shared folder: docs/replication.md."""
