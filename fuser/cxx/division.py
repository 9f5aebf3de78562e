"""Integer division for processors that trap: x86 ends the process at a division by zero, and at its smallest by -1.

A kernel cannot know beforehand, and data must not end a process. So in a text for such a processor a third operand
stands between the two: ``a / b`` becomes ``a /fuser_divide/ b``, ``a %= b`` becomes ``a %=fuser_divide%= b``. Operators
of that type (the prelude has them) give every pair of integers a quotient, and leave other types to their operators.
Precedence, the types and the order of evaluation stay what they are. No operator can assign to a bit-field: what may be
one is written twice, ``s.a = s.a /fuser_divide/= b``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from fuser.cxx.functor import Functor
from fuser.cxx.preprocess import Token, words_of

__all__ = ["GUARD", "guard_divisions"]

GUARD = "fuser_divide"
_CONDITION = re.compile(r"^\s*(?:#|%:)\s*(?:el)?if\b", re.MULTILINE)
_DEFINE = re.compile(r"\s*(?:#|%:)\s*define\b")
_OPERATORS = frozenset({"/", "%", "/=", "%="})
# What may be written twice, its words apart: a, s . a, p -> a, xs [ i - 1 ] . a; not * p, f ( ) . a.
_TWICE = re.compile(
    r"(?<![\w&*+-])(?<![.>&*+-] )(?<!:: )(?:\w+ (?:\[ (?:(?!\+\+|--)[\w .+*-])* \] )?(?:\.|->|::) )*\w+$"
)
# Floating point, or an integer that is not 0: 2, 0x1Fu, .5f, 1e3.
_SAFE_NUMBER = re.compile(r"(?!0[xX])[\d']*\.[\d'.]*.*|(?!0[xX])[\d']+[eEfF].*|0[xX].*[1-9a-fA-F.].*|[\d']*[1-9].*")


@lru_cache(maxsize=4096)
def guard_divisions(functor: Functor) -> Functor:
    """Return the functor with each division guarded whose divisor is not plainly a number that is safe.

    Left alone are texts with division operators of their own (``operator/``), directives but ``#define``, and those too
    where an ``#if`` may read them.
    """
    emitted = functor.emitted
    if "/" not in emitted.text and "%" not in emitted.text:
        return functor
    words = _words(emitted.text)
    if any(word.text == "operator" and after.text in _OPERATORS for word, after in pairwise(words)):
        return functor
    is_read_by_if = _CONDITION.search(emitted.text) is not None
    # As in ``int a : 3, b : 4``; what else is written so may be written twice, too.
    fields = {
        word.text
        for before, word, after in zip(words, words[1:], words[2:], strict=False)
        if word.kind == "name" and after.text == ":" and (before.kind == "name" or before.text == ",")
    }
    for slot, inserted in reversed(_divisions(words, fields, skips_macros=is_read_by_if)):
        emitted = emitted.replace(slot, slot, inserted)
    if emitted is functor.emitted:
        return functor
    return replace(functor, emitted=emitted, words=functor.words | {GUARD})


def _words(text: str) -> list[Token]:
    # A backslash there ends a line that goes on.
    return [token for token in words_of(text) if token.text != "\\"]


def _divisions(words: list[Token], fields: set[str], *, skips_macros: bool) -> list[tuple[int, str]]:
    # Where the guard goes, and its text.
    found: list[tuple[int, str]] = []
    for index, word in enumerate(words):
        if word.kind == "directive":
            define = None if skips_macros else _DEFINE.match(word.text)
            if define:
                start, body = word.origin + define.end(), _words(word.text[define.end() :])
                # Arguments of a macro may not be written twice.
                found += [(start + slot, guard) for slot, guard in _divisions(body, set(), skips_macros=True)]
        elif word.text in _OPERATORS and word.kind == "other":
            after, beyond = (*(item.text for item in words[index + 1 : index + 3]), "", "")[:2]
            # What is assigned goes on behind a number: x /= 3 - y. Beside a comma it is an argument of a macro.
            is_whole = len(word.text) == 1 or beyond in {";", ")", ",", ""}
            if after in {",", ")", "="} or (is_whole and _SAFE_NUMBER.fullmatch(after)):
                continue
            is_of_field = len(word.text) == 2 and words[index - 1].text in fields
            member = _TWICE.search(" ".join(item.text for item in words[:index])) if is_of_field else None
            if member:
                found.append((word.origin, f"= {member[0]} {word.text[0]}{GUARD}"))
            else:
                # Before the operator: compilers point at the second of the two, which is the user's own.
                found.append((word.origin, f"{word.text}{GUARD}"))
    return found
