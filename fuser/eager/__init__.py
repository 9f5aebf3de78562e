"""An eager-torch version of every functor, made from its text alone."""
