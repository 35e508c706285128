"""The record format: headers and flags, batches, blocks and the trailers that close them.

All functions take bytes and return values, without side effects. docs/formats/record.md describes the format.
"""
