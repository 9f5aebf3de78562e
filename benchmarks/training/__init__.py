"""Forward and backward passes of fuser beside its peers: ``python -m benchmarks.training --help``."""
