"""The functions a functor may call, in eager torch."""
