"""Conversion between messages and Arrow columns, for Spark and other columnar readers.

    SCHEMA     the columns of a topic                      docs/arrow.md
    project    a schema of some of these columns
    Decoder    from blocks to a record batch
    encode     from a record batch to the body of PRODUCE

Needs pyarrow and numpy: pip install pyarrow numpy.
"""

from __future__ import annotations

try:
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401
except ImportError as error:
    raise ImportError(f"tfmq.arrow needs {error.name}: pip install pyarrow numpy", name=error.name) from error

from tfmq.arrow.decoder import Decoder
from tfmq.arrow.encoder import Encoded, encode
from tfmq.arrow.partitioner import partition_of
from tfmq.arrow.schema import SCHEMA, project

__all__ = ["SCHEMA", "Decoder", "Encoded", "encode", "partition_of", "project"]
