"""Where groups keep their offsets outside the broker: the plug-in interface, and the storages that come with tfmq."""
