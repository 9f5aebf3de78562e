"""Benchmarks of fuser beside its peers: ``python -m benchmarks --help``."""
