"""Benchmarks of docs/performance.md: programs, never timed tests. Run: python -m tools.bench --help"""
