"""Derivatives of functors, as functors: from the text of one to the text of the other."""

from fuser.autodiff.derivative.functors import Derived, forward_functor, reverse_functor

__all__ = ["Derived", "forward_functor", "reverse_functor"]
