"""Warm-up: a call runs on fake tensors, whose sizes may be symbols, and what its groups would launch is compiled."""
