"""Which partition each row of a batch goes to, as `KeyHash` chooses it for messages."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tfmq.arrow.checksums import checksums
from tfmq.arrow.fields import Array
from tfmq.errors import BadRequest


def partition_of(batch: pa.RecordBatch, partitions: int, first: int = 0) -> pa.Array:
    """The partition, an int32, of each row: the CRC-32 of its `key` modulo `partitions`; rows without a key go to one
    partition after the other, from `first` on. Raises `BadRequest` for a key that is not binary or string."""
    count = len(batch)
    if "key" not in batch.schema.names:
        return pa.array(np.arange(first, first + count, dtype=np.int64) % partitions, pa.int32())
    keys = batch.column("key")
    if not (pa.types.is_null(keys.type) or pa.types.is_binary(keys.type) or pa.types.is_string(keys.type)):
        raise BadRequest(f"The column key must be binary or string, not {keys.type}.")
    found = np.empty(count, dtype=np.int32)
    null: Array = keys.is_null().to_numpy(zero_copy_only=False)
    found[null] = (first + np.arange(int(null.sum()))) % partitions
    found[~null] = checksums(keys.cast(pa.binary()).drop_null()) % np.uint32(partitions)
    return pa.array(found)
