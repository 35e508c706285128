"""A partition log: segments, index, writer, reader, recovery, retention."""
