"""The arrival log: where delayed messages are stored first."""
