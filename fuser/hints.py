"""What the author of a text that does not compile may have meant: what is written like that elsewhere."""

import re

__all__ = ["find_hint"]

_LIBRARY = "a functor calls C++'s functions: exp(x), pow(x, y)"
_WITHIN = "a functor sees one element; jit_fn(..., index=) names a parameter that gets its number"
_NARROW = "T is float for half and bfloat16 tensors, and is rounded where it is stored"
_NAMES = {
    **dict.fromkeys(("at", "c10", "torch", "tl", "libdevice", "np", "cp", "math"), _LIBRARY),
    **dict.fromkeys(("threadIdx", "blockIdx", "blockDim", "gridDim"), _WITHIN),
    **dict.fromkeys(("half", "__half", "__nv_bfloat16", "bfloat16", "__half2float", "__float2half"), _NARROW),
    "sigmoid": "write 1 / (1 + exp(-x))",
    "relu": "write x > 0 ? x : T(0)",
    "silu": "write x / (1 + exp(-x))",
}
_ELEMENT = "a parameter is the value of one element, and has no others"
_OF_ONE_TYPE = {"max": "std::max(x, T(0))", "min": "std::min(x, T(0))", "clamp": "std::clamp(x, T(0), T(1))"}
_OPERATORS = {"%": "fmod(a, b) is the remainder of floats", "^": "pow(a, b) is the power"}


def find_hint(line: str, column: int, message: str) -> str:
    """Return "; " and what a message at a column of a line (from 1) should add; nothing if that is not known."""
    rest = line[column - 1 :]
    is_unknown = re.search("declared|undefined|no member|not a member|must be a class or namespace", message)
    name = re.match(r"\w+", rest) if is_unknown else None
    found = _NAMES.get(name[0]) if name is not None else None
    # Compilers point at the second operator, or at what follows it; at an operator, or at what stands before it.
    if re.search(r"\*\*\s*\w?$", line[:column]) and "*" in message:
        found = "pow(a, b) is the power"
    elif re.search("operator|integral", message) and (operator := re.match(r"(?:\w+\s*)?([%^])", rest)):
        found = _OPERATORS[operator[1]]
    elif called := re.search(r"no (?:matching|instance of) function.*\b(max|min|clamp)\b", message):
        found = f"it takes one type: {_OF_ONE_TYPE[called[1]]}"
    elif re.search("subscripted|pointer-to-object", message):
        found = _ELEMENT
    return f"; {found}" if found else ""
