"""Divisions that a kernel tries without a branch: those of a whole vector together, and again where one was not exact.

A division of floats that rounds as it has to asks each time whether its operands are ordinary numbers, and between such
branches a compiler orders nothing. So a third operand stands between the two, ``a /fuser_by(fuser_how)/ b``, with which
the prelude has operators for floats; ``fuser_how`` is a parameter of the entry that says how, and hears whether it was.

Of numbers of elements it is known beforehand that all are ordinary: ``n /fuser_of/ c``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from fuser.cxx.functor import Functor
from fuser.cxx.preprocess import words_of

__all__ = ["OF_COUNTS", "QUICK", "quicken_counts", "quicken_divisions"]

# Of the prelude.
QUICK, OF_COUNTS = "fuser_by", "fuser_of"
# A division by a number is a product.
_NUMBER = re.compile(r"(?:\w+ \( )?[\d.]")
# What is worked out where there is no parameter yet, or looks like another function.
_OTHERS = frozenset(
    "[ case constexpr decltype enum noexcept operator requires sizeof static static_assert struct".split()
)
# All that is divided: not 2 / 1 / x, nor -1 / x.
_ENDS_IN_ONE = re.compile(r"(?:[({=,?:]|\breturn) (?:T \( 1(?:\.0)? \)|1(?:\.0?f?)?)$")


# What stands before all that is divided, and behind all that divides.
_BEGINS, _ENDS = frozenset("= ( , ? : + - return".split()), frozenset("; ) , : ? * + -".split())


@lru_cache(maxsize=4096)
def quicken_counts(functor: Functor, counts: frozenset[str]) -> Functor:
    """Return a combine functor that divides numbers of elements by each other without a branch.

    Args:
        functor: one plain function.
        counts: the names of such numbers, which are assigned once or never.
    """
    words = words_of(functor.text)
    texts = [word.text for word in words]
    # All others are 0 if the number of both is.
    totals = counts & {item.name for item in functor.outputs}
    divided = [
        words[at].origin + 1
        for at in range(2, len(texts) - 2)
        if texts[at] == "/" and texts[at - 1] in counts and texts[at + 1] in totals
        # An output has no value before its assignment.
        and not any(" ".join(texts[other : other + 2]) == f"{texts[at + 1]} =" for other in range(at + 1, len(texts)))
        and texts[at - 2] in _BEGINS and texts[at + 2] in _ENDS
    ]  # fmt: skip
    emitted = functor.emitted
    for slot in reversed(divided):
        emitted = emitted.replace(slot, slot, f"{OF_COUNTS}/")
    return replace(functor, emitted=emitted, words=functor.words | {OF_COUNTS}) if divided else functor


@lru_cache(maxsize=4096)
def quicken_divisions(functor: Functor) -> Functor:
    """Return the functor with a parameter ``fuser_how``, the first one, that says how it divides.

    Its type is the first template parameter, ``fuser_D``. The functor itself if nothing in it divides, or it is not one
    plain function.
    """
    if "/" not in functor.text:
        return functor
    words = words_of(functor.text)
    texts = [word.text for word in words]
    body = texts.index("{") if "{" in texts else 0
    # Where, and whether 1 is divided. A parameter's default value names no other parameter.
    divided = [
        (words[at].origin + 1, "true" if _ENDS_IN_ONE.search(" ".join(texts[:at])) else "false")
        for at, text in enumerate(texts[:-1])
        if at > body and text == "/" and not _NUMBER.match(" ".join(texts[at + 1 : at + 4]))
    ]
    depths = [texts[: at + 1].count("{") - texts[: at + 1].count("}") for at, text in enumerate(texts) if text == "}"]
    # One function, that does not call itself.
    is_plain = depths.count(0) == 1 and texts[:2] == ["template", "<"] and texts[body - 1] == ")"
    is_plain = is_plain and texts.count(functor.entry) == texts.count("template") == 1 and _OTHERS.isdisjoint(texts)
    if not divided or not is_plain or functor.macros:
        return functor
    emitted = functor.emitted
    # Those behind may have default values.
    before = words[texts.index(functor.entry) + 1].origin + 1
    inserted = [(words[1].origin + 1, "typename fuser_D, "), (before, "fuser_D& fuser_how, ")]
    for slot, text in reversed([*inserted, *((slot, f"{QUICK}<{is_one}>(fuser_how)/") for slot, is_one in divided)]):
        emitted = emitted.replace(slot, slot, text)
    return replace(functor, emitted=emitted, words=functor.words | {QUICK})
