"""What a producer sends: batches, encoding, partitioning, the accumulator and partition senders."""
