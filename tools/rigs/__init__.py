"""Rigs that break things for real: kill -9 of a live server, power cuts on an ext4 image."""
