"""The arithmetic of ``#if``: whole numbers of 64 bits, signed or unsigned, as compilers have them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["evaluate"]


class _Number(NamedTuple):
    value: int
    is_unsigned: bool = False


# Binary operators, those that bind loosest first.
_LEVELS = tuple(
    frozenset(level.split()) for level in ("||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %")
)
_SPELLED = {
    "and": "&&", "or": "||", "not": "!", "compl": "~", "bitand": "&", "bitor": "|", "xor": "^", "not_eq": "!=",
}  # fmt: skip
_NUMBER = re.compile(r"(?i)(0x[0-9a-f]+|0b[01]+|0[0-7]*|[1-9]\d*)(u?l{0,2}|l{1,2}u)")
_RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
    "&&": lambda left, right: bool(left and right), "||": lambda left, right: bool(left or right),
}  # fmt: skip
_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "|": operator.or_, "^": operator.xor, "&": operator.and_, "+": operator.add, "-": operator.sub, "*": operator.mul,
}  # fmt: skip


def evaluate(words: Sequence[str]) -> int:
    """Return what an expression is worth, whose macros are expanded; names that are left are 0.

    Args:
        words: its tokens, without blanks and comments.

    Raises:
        ValueError: it is none, or no compiler need agree on it.
    """
    reading = _Reading(words)
    found = reading.read_conditional(is_needed=True)
    if reading.words:
        raise ValueError(f"{reading.words[-1]!r} ends no expression")
    return found.value


class _Reading:
    def __init__(self, words: Sequence[str]) -> None:
        # The next one last.
        self.words = [_SPELLED.get(word, word) for word in reversed(words)]

    def read_conditional(self, *, is_needed: bool) -> _Number:
        condition = self.read_binary(0, is_needed=is_needed)
        if not self.take("?"):
            return condition
        yes = self.read_conditional(is_needed=is_needed and condition.value != 0)
        self.expect(":")
        no = self.read_conditional(is_needed=is_needed and condition.value == 0)
        return _wrap((yes if condition.value else no).value, is_unsigned=yes.is_unsigned or no.is_unsigned)

    def read_binary(self, level: int, *, is_needed: bool) -> _Number:
        # What is not needed, as what stands behind ``0 &&``, may divide by zero.
        if level == len(_LEVELS):
            return self.read_unary(is_needed=is_needed)
        left = self.read_binary(level + 1, is_needed=is_needed)
        while self.words and self.words[-1] in _LEVELS[level]:
            word = self.words.pop()
            is_decided = word in {"&&", "||"} and bool(left.value) == (word == "||")
            right = self.read_binary(level + 1, is_needed=is_needed and not is_decided)
            known = _Number(int(word == "||"))
            left = known if is_decided or not is_needed else _apply(word, left, right)
        return left

    def read_unary(self, *, is_needed: bool) -> _Number:
        word = self.words.pop() if self.words else ""
        if word == "(":
            found = self.read_conditional(is_needed=is_needed)
            self.expect(")")
            return found
        if word in {"!", "~", "-", "+"}:
            value, is_unsigned = self.read_unary(is_needed=is_needed)
            made = {"~": ~value, "-": -value, "+": value}
            return _Number(int(not value)) if word == "!" else _wrap(made[word], is_unsigned=is_unsigned)
        if word.isidentifier():
            return _Number(int(word == "true"))
        number = _NUMBER.fullmatch(word.replace("'", ""))
        if number is None:
            raise ValueError(f"{word!r} is no number")
        digits = number[1]
        value = int(digits, 8 if digits.isdigit() and digits[0] == "0" else 0)
        return _wrap(value, is_unsigned="u" in number[2].lower() or value >= 1 << 63)

    def take(self, word: str) -> bool:
        found = self.words[-1:] == [word]
        if found:
            self.words.pop()
        return found

    def expect(self, word: str) -> None:
        if not self.take(word):
            raise ValueError(f"{word!r} is missing")


def _apply(word: str, left: _Number, right: _Number) -> _Number:
    if word in {"<<", ">>"}:
        if not 0 <= right.value < 64:
            raise ValueError("a number has 64 bits")
        shifted = left.value << right.value if word == "<<" else left.value >> right.value
        return _wrap(shifted, is_unsigned=left.is_unsigned)
    is_unsigned = left.is_unsigned or right.is_unsigned
    one, other = (_wrap(item.value, is_unsigned=is_unsigned).value for item in (left, right))
    if word in _RELATIONS:
        return _Number(int(_RELATIONS[word](one, other)))
    if word in _OPERATIONS:
        return _wrap(_OPERATIONS[word](one, other), is_unsigned=is_unsigned)
    if other == 0:
        raise ValueError("a division by zero")
    # Towards zero, unlike Python's.
    quotient = abs(one) // abs(other) * (-1 if (one < 0) != (other < 0) else 1)
    return _wrap(quotient if word == "/" else one - quotient * other, is_unsigned=is_unsigned)


def _wrap(value: int, *, is_unsigned: bool) -> _Number:
    value %= 1 << 64
    return _Number(value if is_unsigned or value < 1 << 63 else value - (1 << 64), is_unsigned)
