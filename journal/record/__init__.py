"""The record format: headers and flags, batches, blocks and the trailers that close them.

Everything is pure: bytes in, values out. Described in docs/formats/record.md.
"""
