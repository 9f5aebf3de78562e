"""The CUDA room: dialect text, NVRTC, and launches on torch's current stream."""
