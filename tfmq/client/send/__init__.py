"""The send path of a producer: batches, encoding, partitioning, partition senders."""
