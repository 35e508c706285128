"""Consumer groups on the broker: membership, assignment, committed offsets."""
