"""Symbols: what a function that is traced computes with in place of tensors and numbers."""

from __future__ import annotations

import copy
import dis
import operator
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fuser.errors import TracingError
from fuser.fx.examples import is_kind_question, is_none
from fuser.ops import IS_NUMBER

__all__ = ["IN_PLACE", "SequenceSymbol", "Symbol", "is_symbol", "is_tensor"]


class Symbol(fx.Proxy):
    """A symbol that Python may ask for its value where control flow needs one.

    Its ``a += b`` writes to ``a``, as a tensor's does; fx would make it ``a = a + b``.
    """

    # What the classes of parameters and buffers look at in isinstance().
    _is_param = _is_buffer = False
    # As torch.Tensor's: ``np.float32(2) * x`` is left to the tensor.
    __array_priority__ = 1000
    tracer: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if not hasattr(torch.Tensor, name) or self.node.meta.get(IS_NUMBER):
            self.tracer.check_attribute(self, name)
        found = _ShapeAttribute(self, name) if name == "shape" else _SymbolAttribute(self, name)
        if name in _MAY_BE_NONE and self.tracer.examples is not None:
            # A symbol cannot be asked whether it ``is`` None.
            asked = self.tracer.create_proxy("call_function", is_none, (self, name), {})
            return None if self.tracer.settle_if_known(asked) is True else found
        return self.tracer.settle_if_known(found) if is_kind_question(name) and _is_property(name) else found

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What ``case int():`` and ``x.__class__``, as of singledispatch, look at. For torch's code a symbol is one."""
        frame = sys._getframe(1)
        return self.tracer.find_class(self) if _is_class_asked(frame) else type(self)

    def __bool__(self) -> bool:
        return bool(self.tracer.settle(self, "bool() of a tensor", "torch.where"))

    def __int__(self) -> int:
        return int(self.tracer.settle(self, "int() of a tensor", "the tensor itself"))

    def __float__(self) -> float:
        return float(self.tracer.settle(self, "float() of a tensor", "the tensor itself"))

    def __complex__(self) -> complex:
        return complex(self.tracer.settle(self, "complex() of a tensor", "the tensor itself"))

    def __index__(self) -> int:
        return operator.index(self.tracer.settle(self, "a tensor as an index or a count", "a number or its shape"))

    def __hash__(self) -> int:
        value = self.tracer.find(self)
        return (
            id(self.node) if self.tracer.has_elements(value) else hash(self.tracer.settle(self, "hash()", "a number"))
        )

    def __round__(self, *digits: Any) -> Any:
        return self.tracer.create_proxy("call_function", round, (self, *digits), {})

    def __divmod__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", divmod, (self, other), {})

    def __rdivmod__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", divmod, (other, self), {})

    def __copy__(self) -> Any:
        return self.tracer.create_proxy("call_function", copy.copy, (self,), {})

    def __deepcopy__(self, _: Any) -> Any:
        return self.tracer.create_proxy("call_function", copy.deepcopy, (self,), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TracingError(
            "pickle wants the elements of a tensor, which a trace has not: leave this part out of the fused function"
        )

    def __format__(self, spec: str) -> str:
        if isinstance(self.tracer.find(self), int | float | complex | str | torch.Size):
            return format(self.tracer.settle(self, "the text of a tensor", "its shape"), spec)
        return repr(self)

    def __str__(self) -> str:
        return format(self, "")

    def __len__(self) -> int:
        found = self.tracer.find(self)
        if self.tracer.has_elements(found):
            return operator.index(self.shape[0])
        return len(self.tracer.settle_parts(self))

    def __iter__(self) -> Iterator[Any]:
        count = _find_unpacked(sys._getframe(1))
        if count is None:
            found = self.tracer.find(self)
            if found is None or self.tracer.has_elements(found):
                self.tracer.iter(self)
            count = len(self.tracer.settle_parts(self))
        symbol: Any = self
        return (symbol[slot] for slot in range(count))

    def __contains__(self, item: Any) -> bool:
        return any(bool(part == item) for part in self)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TracingError(
            "NumPy wants the elements of a tensor, which a trace has not: use torch's function, or leave this part out "
            "of the fused function"
        )

    def __setitem__(self, slot: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, slot, value), {})


# Attributes that most tensors have not, as None says.
_MAY_BE_NONE = frozenset(("grad", "grad_fn", "_base"))


class _SymbolAttribute(Symbol, fx.proxy.Attribute):
    """An attribute of a symbol, or a method about to be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made: Any = fx.proxy.Attribute.__call__(self, *args, **kwargs)
        return self.tracer.settle_if_known(made) if is_kind_question(self.attr) else made


class SequenceSymbol(Symbol):
    """A symbol of several values. ``case (a, b):`` looks at nothing of a value but whether its class says so."""


class _ShapeAttribute(_SymbolAttribute, SequenceSymbol):
    pass


Sequence.register(SequenceSymbol)


def _is_class_asked(frame: types.FrameType) -> bool:
    # C code, as that of isinstance, asks for it too, from within the calls of the frame.
    opcode = frame.f_code.co_code[frame.f_lasti]
    if opcode == dis.opmap["LOAD_ATTR"] and "__class__" in frame.f_code.co_names:
        is_torchs = str(frame.f_globals.get("__name__")).startswith(("torch.", "fuser."))
        asked = _find_instruction(frame)
        return not is_torchs and asked is not None and asked.argval == "__class__"
    return opcode == dis.opmap["MATCH_CLASS"]


def _find_unpacked(frame: types.FrameType) -> int | None:
    # How many values ``a, b = x`` takes, if that is what the frame is about to do.
    instruction = _find_instruction(frame)
    return instruction.arg if instruction is not None and instruction.opname == "UNPACK_SEQUENCE" else None


def _find_instruction(frame: types.FrameType) -> dis.Instruction | None:
    return next((item for item in dis.get_instructions(frame.f_code) if item.offset == frame.f_lasti), None)


def is_symbol(value: Any) -> bool:
    """Whether a value is a symbol; isinstance would ask it what it stands for."""
    return issubclass(type(value), fx.Proxy)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor and no symbol of one."""
    return not is_symbol(value) and isinstance(value, torch.Tensor)


def _is_property(name: str) -> bool:
    return not callable(getattr(torch.Tensor, name, None))


def _in_place(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


# What Python calls for ``a += b``, with what that is for numbers.
IN_PLACE = {
    getattr(operator, f"__i{name}__"): getattr(operator, f"__{name}__")
    for name in "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split()
}
for _function in IN_PLACE:
    setattr(Symbol, f"__{_function.__name__}__", _in_place(_function))
