"""Sizes as symbols: what is computed of them is written down as a program, and what is asked of them as its conditions.

A planner that runs on these in place of integers gives its plan for one call, and with it the program of that plan: for
other sizes under which all that was asked has the same answers, the plan is the same, with the numbers that the program
computes. Nothing is asked without notice: a size is no ``int``, so that whoever needs one (``range``, ``struct``, a key
of a dict, a text) goes through a method here, which makes the value itself a condition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

__all__ = ["Deferred", "Size", "Tape"]


class Deferred:
    """What the program calls, with sizes, numbers and tuples of them."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments


class Tape:
    """Writes a program while the planner runs on its sizes."""

    def __init__(self, values: Sequence[int]) -> None:
        # Each step as its text, and the size that it makes; None for a condition.
        self._steps: list[tuple[str, Size | None]] = []
        self._known: dict[str, Size | None] = {}
        self.sizes = tuple(Size(self, f"s{slot}", value) for slot, value in enumerate(values))

    def make(self, text: str, value: int) -> Size:
        """Write down a step that makes a size."""
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = Size(self, f"v{len(self._steps)}", value)
            self._steps.append((text, found))
        return found

    def ask(self, text: str, *, is_so: bool) -> bool:
        """Write down a condition: that a question has this answer."""
        text = text if is_so else f"not {text}"
        if text not in self._known:
            self._known[text] = None
            self._steps.append((text, None))
        return is_so

    def finish(self, result: Any) -> Callable[[Sequence[int]], Any]:
        """Return the program: a function of sizes, which gives None where a condition does not hold.

        Args:
            result: what it gives else: tuples of sizes, calls, and anything else, which stands for itself.
        """
        names: dict[str, Any] = {"bit_length": int.bit_length}
        needed: set[str] = set()
        lines = [f"{''.join(f'{item.name}, ' for item in self.sizes)}= sizes"]
        last = f"return {_show(result, names, needed)}"
        for text, made in self._find_steps(needed):
            lines.append(f"if not ({text}): return None" if made is None else f"{made.name} = {text}")
        body = "".join(f"    {line}\n" for line in (*lines, last))
        exec(compile(f"def program(sizes):\n{body}", "<fuser sizes>", "exec"), names)
        program: Callable[[Sequence[int]], Any] = names["program"]
        return program

    def find_alike(self, points: torch.Tensor) -> torch.Tensor:
        """Return for which of many sizes (a row for each) all that was asked has the same answers: a mask."""
        chosen = torch.arange(len(points))
        names: dict[str, Any] = {"bit_length": lambda x: torch.frexp(x.double()).exponent.long()}
        names |= {item.name: points[:, slot] for slot, item in enumerate(self.sizes)}
        for text, made in self._find_steps(set()):
            # They are this file's, of names and operators.
            found = eval(text.removeprefix("not "), names)
            if made is not None:
                names[made.name] = found
                continue
            kept = ~found if text.startswith("not ") else found
            # What is asked later makes sense for these alone.
            chosen = chosen[kept]
            names |= {name: item[kept] for name, item in names.items() if isinstance(item, torch.Tensor)}
        return torch.zeros(len(points), dtype=torch.bool).index_fill(0, chosen, value=True)

    def _find_steps(self, needed: Collection[str]) -> list[tuple[str, Size | None]]:
        # The conditions, and what they and ``needed`` are made of.
        needed, found = {*needed}, []
        for text, made in reversed(self._steps):
            if made is None or made.name in needed:
                needed.update(text.replace("(", " ").replace(")", " ").split())
                found.append((text, made))
        return found[::-1]


class Size:
    """One integer of a program; it has the value that the call has for which the program is written."""

    __slots__ = ("_tape", "name", "value")

    def __init__(self, tape: Tape, name: str, value: int) -> None:
        self._tape = tape
        self.name = name
        self.value = value

    def bit_length(self) -> Size:
        """Return as many bits as ``int.bit_length``."""
        return self._tape.make(f"bit_length( {self.name} )", self.value.bit_length())

    def __neg__(self) -> Size:
        return self._tape.make(f"- {self.name}", -self.value)

    def __bool__(self) -> bool:
        return self._tape.ask(f"( {self.name} != 0 )", is_so=self.value != 0)

    def __index__(self) -> int:
        self._tape.ask(f"( {self.name} == {self.value} )", is_so=True)
        return self.value

    def __int__(self) -> int:
        return self.__index__()

    def __float__(self) -> float:
        return float(self.__index__())

    def __hash__(self) -> int:
        return hash(self.__index__())

    def __repr__(self) -> str:
        return repr(self.__index__())

    def __format__(self, spec: str) -> str:
        return format(self.__index__(), spec)


# Numbers that change nothing: before a size, and after it.
_NEUTRAL = {"+": 0, "*": 1, "x +": 0, "x -": 0, "x *": 1, "x //": 1, "x <<": 0, "x >>": 0}


def _operation(function: Callable[[int, int], int], sign: str, *, is_reflected: bool) -> Any:
    def operate(self: Size, other: Any) -> Any:
        if isinstance(other, int):
            other = int(other)
            # What changes nothing is no step.
            if other == _NEUTRAL.get(sign if is_reflected else f"x {sign}"):
                return self
            if sign == "*" and not other:
                return 0
        elif type(other) is not Size:
            return NotImplemented
        pair = (other, self) if is_reflected else (self, other)
        made = function(*(item if type(item) is int else item.value for item in pair))
        first, second = (item if type(item) is int else item.name for item in pair)
        return self._tape.make(f"{first} {sign} {second}", made)

    return operate


def _question(function: Callable[[int, int], bool], sign: str) -> Any:
    def ask(self: Size, other: Any) -> Any:
        if other is self:
            return function(0, 0)
        if type(other) is int:
            return self._tape.ask(f"( {self.name} {sign} {other} )", is_so=function(self.value, other))
        if type(other) is Size:
            return self._tape.ask(f"( {self.name} {sign} {other.name} )", is_so=function(self.value, other.value))
        return NotImplemented

    return ask


for _name, _sign in (
    ("add", "+"), ("sub", "-"), ("mul", "*"), ("floordiv", "//"), ("mod", "%"), ("lshift", "<<"), ("rshift", ">>"),
    ("and_", "&"), ("or_", "|"), ("xor", "^"),
):  # fmt: skip
    _function, _method = getattr(operator, _name), _name.rstrip("_")
    setattr(Size, f"__{_method}__", _operation(_function, _sign, is_reflected=False))
    setattr(Size, f"__r{_method}__", _operation(_function, _sign, is_reflected=True))
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
    setattr(Size, f"__{_name}__", _question(getattr(operator, _name), _sign))


def _show(result: Any, names: dict[str, Any], needed: set[str]) -> str:
    if type(result) is Size:
        needed.add(result.name)
        return result.name
    if type(result) is tuple:
        return f"({''.join(f'{_show(item, names, needed)}, ' for item in result)})"
    if type(result) is Deferred:
        arguments = ", ".join(_show(item, names, needed) for item in result.arguments)
        return f"{_show(result.function, names, needed)}({arguments})"
    if type(result) in (bool, int):
        return repr(result)
    name = f"g{len(names)}"
    names[name] = result
    return name
