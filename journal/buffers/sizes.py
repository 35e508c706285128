"""Sizes of the pooled allocator: one place that says how a request is rounded and what a chunk is cut into.

The measures are those of Netty 4's allocator: a chunk of 16 MiB holds 2,048 pages of 8 KiB. A request is
*tiny* (below 512 bytes, rounded up to a multiple of 16), *small* (a power of two below a page), a *run* (a
power of two of pages, up to a chunk) or *huge* (above a chunk: mapped alone, never pooled). So a rounded size
is below twice the request, except that no request costs less than 16 bytes.
"""

PAGE_BYTES = 8192
TREE_DEPTH = 11
"""Levels below the root of a chunk's tree: 2 ** 11 = 2,048 leaves, one a page."""
CHUNK_BYTES = PAGE_BYTES << TREE_DEPTH
TINY_STEP = 16
TINY_LIMIT = 512
"""From here on sub-page sizes double instead of growing by 16: waste stays below a half either way."""


def rounded(size: int) -> int:
    """Bytes that a request of `size` bytes (>= 0) really takes from a pool."""
    if size < TINY_LIMIT:
        return (size + TINY_STEP - 1) & -TINY_STEP or TINY_STEP
    if size > CHUNK_BYTES:
        return (size + PAGE_BYTES - 1) & -PAGE_BYTES
    return 1 << (size - 1).bit_length()


def run_depth(size: int) -> int:
    """The tree level whose nodes are runs of `size` bytes; `size` is rounded, a page at least, a chunk at
    most.
    """
    return TREE_DEPTH - (size // PAGE_BYTES).bit_length() + 1
