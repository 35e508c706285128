"""Consumer groups in the broker: membership, assignment, committed offsets."""
