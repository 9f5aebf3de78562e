"""The CPU room: dialect text, the host's C++ compiler, and launches on torch's threads."""
