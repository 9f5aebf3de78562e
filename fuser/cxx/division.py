"""Integer division for processors that trap: x86 ends the process at a division by zero, and at its smallest by -1.

A kernel cannot know beforehand, and data must not end a process. So in a text for such a processor a third operand
stands between the two: ``a / b`` becomes ``a /fuser_divide/ b``, ``a %= b`` becomes ``a %=fuser_divide%= b``. Operators
of that type (the prelude has them) give every pair of integers a quotient, and leave other types to their operators.
Precedence, the types and the order of evaluation stay what they are.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from fuser.cxx.functor import Functor
from fuser.cxx.preprocess import tokenize

__all__ = ["GUARD", "guard_divisions"]

GUARD = "fuser_divide"
_DEFINE = re.compile(r"\s*(?:#|%:)\s*define\b")
_OPERATORS = frozenset({"/", "%", "/=", "%="})
# Floating point, or an integer that is not 0: 2, 0x1Fu, .5f, 1e3.
_SAFE_NUMBER = re.compile(r"(?!0[xX])[\d']*\.[\d'.]*.*|(?!0[xX])[\d']+[eEfF].*|0[xX].*[1-9a-fA-F.].*|[\d']*[1-9].*")


@lru_cache(maxsize=4096)
def guard_divisions(functor: Functor) -> Functor:
    """Return the functor with each division guarded whose divisor is not plainly a number that is safe.

    Left alone are texts with division operators of their own (``operator/``), and directives but ``#define``.
    """
    emitted = functor.emitted
    if "operator" in functor.words:
        return functor
    for slot, operator in reversed(list(_divisions(emitted.text))):
        emitted = emitted.replace(slot, slot, f"{GUARD}{operator}")
    if emitted is functor.emitted:
        return functor
    return replace(functor, emitted=emitted, words=functor.words | {GUARD})


def _divisions(text: str) -> list[tuple[int, str]]:
    # Where the guard goes, and the operator.
    found: list[tuple[int, str]] = []
    tokens = [token for token in tokenize(text) if token.kind not in {"space", "comment"}]
    for index, token in enumerate(tokens):
        if token.kind == "directive":
            if define := _DEFINE.match(token.text):
                start = token.origin + define.end()
                found += [(start + slot, operator) for slot, operator in _divisions(token.text[define.end() :])]
        elif token.text in _OPERATORS and token.kind == "other":
            after = tokens[index + 1] if index + 1 < len(tokens) else None
            if after is None or after.text == "\\" or (after.kind == "number" and _SAFE_NUMBER.fullmatch(after.text)):
                continue
            found.append((token.origin + len(token.text), token.text))
    return found
