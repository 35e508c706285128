"""Offset storages outside the broker: the plug-in interface and the built-in storages."""
