"""The CUDA room: dialect text, NVRTC through cuda.core, and launches on torch's current stream."""
