"""A functor's exponential in fewer instructions, for kernels whose results hold few of its bits."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate

from fuser.cxx.functor import Functor

__all__ = ["BRIEF", "returns_exp", "shorten_exp"]

# Of the prelude.
BRIEF = "fuser_brief_exp"
_RETURNS_EXP = re.compile(r"\{\s*return\s+(exp)\s*(\(.*\))\s*;\s*\}\s*")
# A sigmoid, or something times that: what is lost of the exponential is no more of the quotient.
_DIVIDES_BY_EXP = re.compile(r"\{\s*return\s+[^;/]+/\s*\(T\(1\)\s*\+\s*(exp)\(-\w+\)\)\s*;\s*\}\s*")


def shorten_exp(functor: Functor) -> Functor:
    """Return the functor with another function for ``exp`` where all that it does is return that, or a sigmoid."""
    match = _find_exp(functor) or _DIVIDES_BY_EXP.fullmatch(functor.text, functor.text.find("{"))
    if match is None:
        return functor
    return replace(functor, emitted=functor.emitted.replace(*match.span(1), BRIEF), words=functor.words | {BRIEF})


def returns_exp(functor: Functor) -> bool:
    """Whether all that a functor does is return an exponential."""
    return _find_exp(functor) is not None


def _find_exp(functor: Functor) -> re.Match[str] | None:
    match = _RETURNS_EXP.fullmatch(functor.text, functor.text.find("{"))
    # Its parenthesis closes at the end.
    is_whole = match is not None and all(accumulate((char == "(") - (char == ")") for char in match[2][:-1]))
    return match if is_whole else None
