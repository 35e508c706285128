"""Records as Arrow columns, and back: what Spark, and everything else that reads columns, builds on.

    SCHEMA     the columns of a topic                      docs/arrow.md
    project    some of them
    Decoder    control blocks to a record batch
    encode     a record batch to what PRODUCE takes

Needs pyarrow and numpy: pip install pyarrow numpy.
"""

from __future__ import annotations

try:
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401
except ImportError as error:
    raise ImportError(f"tfmq.arrow needs {error.name}: pip install pyarrow numpy", name=error.name) from error

from tfmq.arrow.checksums import partition_of
from tfmq.arrow.decoder import Decoder
from tfmq.arrow.encoder import Encoded, encode
from tfmq.arrow.schema import SCHEMA, project

__all__ = ["SCHEMA", "Decoder", "Encoded", "encode", "partition_of", "project"]
