"""Measured choices and the search for them."""
