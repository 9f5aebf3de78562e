"""What ``python -m fuser`` does beside printing settings: one module for each command."""
