"""What functors of reductions plainly do, read from their texts; of what is not plain the answer is the careful one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf

from fuser.cxx.brief import BRIEF
from fuser.cxx.functor import MATH_FUNCTIONS, Functor, Role

__all__ = [
    "chooses",
    "count_names",
    "counts_elements",
    "find_quotient",
    "is_costly",
    "is_plainly",
    "is_sum",
    "may_end_in_product",
    "takes_decisions",
]


def is_costly(functor: Functor) -> bool:
    """Whether to keep a result takes less time than to compute it again."""
    return BRIEF not in functor.words and not functor.words.isdisjoint(MATH_FUNCTIONS | {"for", "while"})


def takes_decisions(functor: Functor) -> bool:
    """Whether what a functor does depends on several conditions."""
    return functor.source.count("?") > 1 or "||" in functor.source or "&&" in functor.source or "if" in functor.words


# A zero, however it is written, or a fused sum.
_ZERO_OR_FUSED = re.compile(r"(?<![\w.])\.?0|\bfalse\b|\w ?(?:\( ?\)|\{ ?\})|\bfma\b")
# What calls a function, and is no statement or conversion.
_CALL = re.compile(r"\b(?!(?:return|if|for|while|switch|T|bool|float|double|u?int\d*(?:_t)?)\b)\w+\s*\(")
# What may be a cast, of what has a sign.
_CAST = re.compile(r"\s*\(\s*[\w:]+\s*\)\s*[-+]")


def may_end_in_product(functor: Functor, slot: int = 0) -> bool:
    """Whether one of the results may be a product, or come from a function that ends in one."""
    body, outputs = functor.source.partition("{")[2], [item.name for item in functor.outputs]
    if "*" not in functor.source and not _CALL.search(body):
        return False
    whole = re.fullmatch(r"\s*return\b([^;]*);\s*}\s*", body)
    # Nothing remains of a sum with 0; a fused one may be with what is none.
    if whole and _ends_in_sum(whole[1]) and not re.search(_ZERO_OR_FUSED, body):
        return False
    # Not what is made once, is read at most after that, and is plainly a sum: one that begins with the accumulator.
    result = outputs[slot] if outputs else ""
    first = functor.tensors[slot].name if slot < len(functor.tensors) else ""
    begins = f" {result} = {first} + " if outputs else f" return {first} + "
    reads = len(re.findall(rf"(?<=[-+*/] ){result}(?=[),;]| [-+*/] )", body)) if outputs else 0
    is_only_read = not outputs or len(re.findall(rf"\b{result}\b", body)) == 1 + reads
    made = [value for name, _, value in (text.partition(" = ") for text in body.split(";")) if name.strip() == result]
    is_sum = ("?" not in body and begins in body) or any(map(_ends_in_sum, made))
    return not (is_only_read and is_sum)


def _ends_in_sum(text: str) -> bool:
    # Whether an expression is a sum, outside of all parentheses, or a call that rounds once; it may add products.
    outside, depth = "", 0
    for char in text:
        depth += (char == "(") - (char == ")")
        outside += char if depth == 0 else ""
    is_sum = re.search(r"[\w)] [-+] ", outside) is not None and not {*"?<>=&|^,"} & {*outside}
    is_sum = is_sum and not _CAST.match(text)
    return is_sum or outside.strip() in {"fma)", "__fadd_rn)"}


def is_plainly(functor: Functor, result: str) -> bool:
    """Whether a functor returns what is written so of its tensors, ``"fmax({0}, {1})"``, and does nothing else."""
    plain = f"return {result.format(*(item.name for item in functor.tensors))}; }}"
    return functor.source.partition("{")[2].split() == plain.split()


def is_sum(functor: Functor) -> bool:
    """Whether a functor plainly adds the accumulators of two parts."""
    names = [item.name for item in functor.tensors]
    half = len(names) // 2
    results = [f"{item.name} =" for item in functor.parameters if item.role is Role.OUTPUT] or ["return"]
    sums = [f"{to} {a} + {b};" for to, a, b in zip(results, names[:half], names[half:], strict=False)]
    return functor.source.partition("{")[2].split() == " ".join([*sums, "}"]).split()


def chooses(combine: Functor, identity: Sequence[object]) -> bool:
    """Whether a functor plainly takes the larger of two numbers, or the smaller, or the first that is none of them.

    Neighbours may then be combined in any pairs. ``identity`` has to be the one that such a functor has.
    """
    forms = {
        -inf: ("fmax({0}, {1})", "{0} != {0} || {0} > {1} ? {0} : {1}"),
        inf: ("fmin({0}, {1})", "{0} != {0} || {0} < {1} ? {0} : {1}"),
    }
    number = identity[0] if len(identity) == 1 and isinstance(identity[0], float) else 0.0
    return any(is_plainly(combine, form) for form in forms.get(number, ()))


def counts_elements(mapped: Functor, combine: Functor, slot: int) -> bool:
    """Whether an accumulator is plainly a count: the map makes it a number, and combining adds those of both parts."""
    return _counted(mapped, combine, slot) > 0


def count_names(mapped: Functor, combine: Functor) -> frozenset[str]:
    """Return what a combine functor calls the numbers of elements of two parts and of both, if it counts them."""
    half = len(combine.tensors) // 2
    found = [slot for slot in range(half) if _counted(mapped, combine, slot) == 1]
    places = (*combine.tensors[:half], *combine.tensors[half:], *combine.outputs)
    return frozenset(places[slot + start].name for slot in found for start in (0, half, 2 * half))


def _counted(mapped: Functor, combine: Functor, slot: int) -> float:
    # What an element counts for, or 0.
    half = len(combine.tensors) // 2
    if (
        len(mapped.outputs) != half
        or len(combine.outputs) != half
        or not (_is_straight(mapped) and _is_straight(combine))
    ):
        return 0
    one, result = mapped.outputs[slot].name, combine.outputs[slot].name
    left, right = combine.tensors[slot].name, combine.tensors[half + slot].name
    number = re.search(rf"[{{;]\s*{one} = (?:T\()?([0-9.]+)\)?;", mapped.source)
    is_sum = re.search(rf"[{{;]\s*{result} = {left} \+ {right};", combine.source) is not None
    written = [_assignments(mapped, one), *(_assignments(combine, name) for name in (result, left, right))]
    return float(number[1]) if number and is_sum and written == [1, 1, 0, 0] else 0


def _is_straight(functor: Functor) -> bool:
    # Whether it is one function without jumps, whose names only assignments of their own change.
    body = functor.source.partition("{")[2]
    calls = {*re.findall(r"\b(\w+)\s*\(", body)}
    is_plain = calls <= MATH_FUNCTIONS | {"T", "abs", "fma"} and re.search(r"[{&[]|\+\+|--", body) is None
    return is_plain and not functor.macros


def _assignments(functor: Functor, name: str) -> int:
    return len(re.findall(rf"\b{name}\b\s*(?:[-+*/%^|]|<<|>>)?=(?!=)", functor.source))


def find_quotient(functor: Functor) -> tuple[int, int] | None:
    """Return which of its tensors a functor plainly divides, and by which; None for any other functor."""
    compute = functor.template_parameters[:1]
    plain = {item.name: slot for slot, item in enumerate(functor.tensors) if item.type in compute}
    words = functor.source.partition("{")[2].replace(";", " ;").split()
    if len(words) != 6 or words[::2] != ["return", "/", ";"] or words[5] != "}" or not {words[1], words[3]} <= {*plain}:
        return None
    return None if functor.macros or functor.result not in compute else (plain[words[1]], plain[words[3]])
