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

    def __init__(self, values: Sequence[int], names: dict[str, str] | None = None) -> None:
        """Begin one.

        Args:
            values: the sizes.
            names: of what is computed, by text: tapes whose programs become one share it.
        """
        # Each step as its text, and the name of the size that it makes; None for a condition.
        self._steps: list[tuple[str, str | None]] = []
        self._known: dict[str, Size | None] = {}
        self._names = {} if names is None else names
        self.sizes = tuple(Size(self, f"s{slot}", value) for slot, value in enumerate(values))

    def make(self, text: str, value: int) -> Size:
        """Write down a step that makes a size."""
        found = self._known.get(text)
        if found is None:
            name = self._names.setdefault(text, f"v{len(self._names)}")
            found = self._known[text] = Size(self, name, value)
            self._steps.append((text, name))
        return found

    def ask(self, text: str, *, is_so: bool) -> bool:
        """Write down a condition: that a question has this answer."""
        text = text if is_so else f"not {text}"
        if text not in self._known:
            self._known[text] = None
            self._steps.append((text, None))
        return is_so

    def find_alike(self, points: torch.Tensor) -> torch.Tensor:
        """Return for which of many sizes (a row for each) all that was asked has the same answers: a mask."""
        chosen = torch.arange(len(points))
        names: dict[str, Any] = {"bit_length": lambda x: torch.frexp(x.double()).exponent.long()}
        names |= {item.name: points[:, slot] for slot, item in enumerate(self.sizes)}
        steps = self.find_steps(set())
        last = {word: number for number, (text, _) in enumerate(steps) for word in _words(text)}
        for number, (text, name) in enumerate(steps):
            # They are this file's, of names and operators.
            found = eval(text.removeprefix("not "), names)
            if name is not None:
                names[name] = found
                continue
            kept = ~found if text.startswith("not ") else found
            if not kept.all():
                # What is asked later makes sense for these alone.
                left = kept.nonzero()[:, 0]
                chosen = chosen[left]
                alive = [
                    word
                    for word, item in names.items()
                    if last.get(word, 0) > number and isinstance(item, torch.Tensor)
                ]
                names |= {word: names[word][left] for word in alive}
        return torch.zeros(len(points), dtype=torch.bool).index_fill(0, chosen, value=True)

    def find_steps(self, needed: Collection[str]) -> list[tuple[str, str | None]]:
        """Return the conditions, and what they and ``needed`` are made of."""
        needed, found = {*needed}, []
        for text, name in reversed(self._steps):
            if name is None or name in needed:
                needed.update(_words(text))
                found.append((text, name))
        return found[::-1]


def _words(text: str) -> list[str]:
    return text.replace("(", " ").replace(")", " ").split()


def write_program(finished: Sequence[tuple[Tape, Any]]) -> Callable[[Sequence[int]], Any] | None:
    """Return the program of some tapes: a function of sizes, which gives None where conditions of all fail.

    What asks the same until it is answered differently is one path up to there. None: for some sizes, more than one of
    the tapes might hold.

    Args:
        finished: tapes that share their names, and what each gives: tuples of sizes, calls, and anything else, which
            stands for itself.
    """
    names: dict[str, Any] = {"__name__": __name__, "bit_length": int.bit_length}
    paths = []
    for tape, result in finished:
        needed: set[str] = set()
        last = f"return {_show(result, names, needed)}"
        paths.append([*tape.find_steps(needed), (last, "")])
    lines = _join(paths, "    ")
    if lines is None:
        return None
    first = f"    {''.join(f'{item.name}, ' for item in finished[0][0].sizes)}= sizes"
    exec(compile("\n".join(["def program(sizes):", first, *lines]), "<fuser sizes>", "exec"), names)
    program: Callable[[Sequence[int]], Any] = names["program"]
    return program


def _join(paths: Sequence[Sequence[tuple[str, str | None]]], indent: str) -> list[str] | None:
    lines, left = list[str](), [list(reversed(path)) for path in paths]
    while True:
        heads = list(dict.fromkeys(path[-1] for path in left))
        made = next((head for head in heads if head[1]), None)
        if made is not None:
            lines.append(f"{indent}{made[1]} = {made[0]}")
            for path in left:
                path.pop() if path[-1] == made else None
            continue
        if len(heads) > 1:
            if not all(_exclude(one[0], other[0]) for slot, one in enumerate(heads) for other in heads[:slot]):
                return None
            # The most go on at this level.
            groups = sorted(([path for path in left if path[-1] == head] for head in heads), key=len)
            for group in groups[:-1]:
                inner = _join([path[-2::-1] for path in group], f"{indent} ")
                if inner is None:
                    return None
                lines += [f"{indent}if {group[0][-1][0]}:", *inner]
            left = groups[-1]
        text, is_last = left[0][-1][0], left[0][-1][1] == ""
        if is_last:
            return [*lines, f"{indent}{text}"]
        lines.append(f"{indent}if not ({text}): return None")
        for path in left:
            path.pop()


def _exclude(one: str, other: str) -> bool:
    # Whether two conditions never hold together.
    first, second = (text.removesuffix(" )").rpartition(" == ") for text in (one, other))
    are_values = (
        first[0] == second[0] != "" and first[0].startswith("( ") and first[2].isdigit() and second[2].isdigit()
    )
    return one == f"not {other}" or other == f"not {one}" or are_values


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
