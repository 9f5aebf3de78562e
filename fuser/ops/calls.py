"""What a program calls, once it is bound to the table: an op and its operands."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from fuser.config import config
from fuser.function import Function

__all__ = [
    "ASKING",
    "DEVICE_TYPE",
    "IS_IN_MEMORY",
    "IS_NUMBER",
    "KNOWN",
    "Binder",
    "Known",
    "OpCall",
    "answer",
    "are_ints",
    "asking",
    "asking_of_numbers",
    "bind_for",
    "device_type_of",
    "find_numerics",
    "is_constant",
    "is_number",
    "known_of",
    "note_answer",
    "question_of",
    "static_value",
    "tensor_first",
]

# Key in the ``meta`` of a stand-in that is a Python number.
IS_NUMBER = "fuser_is_number"
# Key there of what a step by itself makes, so that no group computes it.
IS_IN_MEMORY = "fuser_is_in_memory"
# Key there of the type of device that a stand-in without a known value is on, where that is known.
DEVICE_TYPE = "fuser_device_type"
# Key there of what a trace relies on of a tensor: see Known.
KNOWN = "fuser_known"
# Key there of what a trace relies on of a number: answers to questions, see asking_of_numbers.
_ANSWERS = "fuser_answers"
_NUMBER_TYPES = (bool, int, float, complex)


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op and what it is called with: tensors may be anything the caller passes on, also another OpCall."""

    function: Function
    tensors: tuple[Any, ...]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    # Of an op that returns a tuple: which output of the function each item is, -1 for None.
    items: tuple[int, ...] | None = None
    # What the items are called, where they have names.
    fields: tuple[str, ...] = ()

    def find_item(self, node: Any) -> int | None:
        """Return which item of the tuple an FX node takes, by number or by name; None for a node that takes none."""
        if node.target is operator.getitem and type(node.args[1]) is int:
            return int(node.args[1])
        if node.target is getattr and node.args[1] in self.fields:
            return self.fields.index(node.args[1])
        return None

    @property
    def is_view(self) -> bool:
        """Whether it is torch's view of its tensor."""
        source = self.tensors[0] if self.tensors else None
        is_of_made = isinstance(source, OpCall) and not source.is_view
        return (self.function.is_view or self.function.op == "view") and not is_of_made

    @property
    def arranges(self) -> bool:
        """Whether it is, or reads, what only says where elements lie."""
        return self.function.arranges or any(isinstance(item, OpCall) and item.arranges for item in self.tensors)

    @property
    def reduces(self) -> bool:
        """Whether it is, or reads, a reduction of torch's."""
        is_one = self.function.reduces and self.function.op is not None
        return is_one or any(isinstance(item, OpCall) and item.reduces for item in self.tensors)


class Known(NamedTuple):
    """What binders ask of a tensor, beside sizes."""

    dtype: torch.dtype
    device_type: str
    rank: int
    is_contiguous: bool
    # In which of torch's formats kernels lay out what they make like it, if they do not keep its strides.
    memory_format: torch.memory_format

    @staticmethod
    def of(tensor: torch.Tensor) -> Known:
        """Return what there is to know of a real or fake tensor."""
        return Known(
            tensor.dtype, tensor.device.type, tensor.dim(), tensor.is_contiguous(), suggest_memory_format(tensor)
        )


def known_of(item: Any) -> Known | None:
    """Return what is known of the tensor that an operand stands for, from its value or its trace; None if nothing."""
    meta = getattr(item, "meta", {})
    value = meta.get("val")
    found: Known | None = Known.of(value) if isinstance(value, torch.Tensor) else meta.get(KNOWN)
    return found


Binder = Callable[..., "OpCall | None"]


# Binders that ask what is known of their tensors: traces note it for them, and rely on it.
ASKING: set[Binder] = set()


def asking(binder: Binder) -> Binder:
    """Say of a binder that it asks (a decorator)."""
    ASKING.add(binder)
    return binder


# Takes Python numbers of any kind, and answers, never None. A graph can name it.
Question = Callable[..., Any]


def asking_of_numbers(question: Question, *names: str) -> Callable[[Binder], Binder]:
    """Say of a binder what it asks of the numbers that its parameters of these names are given (a decorator).

    Which op a call is depends on the answer alone: traces settle it for numbers among their arguments, which stay
    arguments. Other numbers with the same answer make the same op.
    """

    def mark(binder: Binder) -> Binder:
        # What wraps a binder asks the same.
        vars(binder)[_QUESTION] = question, names
        return binder

    return mark


_QUESTION = "fuser_question"


def question_of(binder: Binder) -> tuple[Question, tuple[str, ...]] | None:
    """Return what a binder asks of numbers, and the names of their parameters."""
    found: tuple[Question, tuple[str, ...]] | None = vars(binder).get(_QUESTION)
    return found


def answer(question: Question, *items: Any) -> Any:
    """Return the answer of numbers, or of those that operands stand for; None where it is not known."""
    if all(map(is_constant, items)):
        return question(*items)
    answers, key = _find_answers(question, items)
    return answers.get(key)


def note_answer(found: Any, question: Question, *items: Any) -> None:
    """Keep what a trace relies on: the answer of numbers, one of which at least an operand stands for."""
    answers, key = _find_answers(question, items)
    answers[key] = found


def _find_answers(question: Question, items: tuple[Any, ...]) -> tuple[dict[Any, Any], tuple[Any, ...]]:
    # They are kept by the first item that is no constant.
    holder = next(item for item in items if not is_constant(item))
    meta = getattr(holder, "meta", {})
    return meta.setdefault(_ANSWERS, {}), (question, *(None if item is holder else item for item in items))


def tensor_first(binder: Binder) -> Binder:
    """Return it for torch's functions that take no number first: ``torch.add(2, x)`` is an error, and stays torch's."""

    @functools.wraps(binder)
    def bind(input: Any, *args: Any, **kwargs: Any) -> OpCall | None:  # noqa: A002 - torch's own parameter name
        return None if is_number(input) else binder(input, *args, **kwargs)

    return asking(bind) if binder in ASKING else bind


def device_type_of(call: OpCall) -> str:
    """Return the type of device that a call's tensors are on; empty where that is not known."""
    for item in call.tensors:
        meta = getattr(item, "meta", {})
        value = meta.get("val")
        found = value.device.type if isinstance(value, torch.Tensor) else meta.get(DEVICE_TYPE, "")
        found = device_type_of(item) if isinstance(item, OpCall) else found
        if found:
            return str(found)
    return ""


def is_constant(value: Any) -> bool:
    """Whether an operand is a Python number."""
    return isinstance(value, _NUMBER_TYPES)


def is_number(value: Any) -> bool:
    """Whether an operand is a Python number, or stands for one."""
    return is_constant(value) or bool(getattr(value, "meta", {}).get(IS_NUMBER))


@contextmanager
def bind_for(numerics: str | None) -> Iterator[None]:
    """Bind ops for groups with some numerics, inside a ``with`` block and its thread; None: as ``config`` says."""
    token = _numerics.set(numerics)
    try:
        yield
    finally:
        _numerics.reset(token)


def find_numerics() -> str:
    """Return the numerics of the groups that ops are bound for."""
    return _numerics.get() or config.numerics


_numerics: ContextVar[str | None] = ContextVar("numerics", default=None)


def static_value(x: Any) -> torch.Tensor | None:
    """Return what is known of a tensor whose sizes are numbers."""
    value = getattr(x, "meta", {}).get("val")
    is_known = isinstance(value, torch.Tensor) and all(type(size) is int for size in (*value.shape, *value.stride()))
    return value if is_known else None


def are_ints(*items: Any) -> bool:
    """Whether all are integers; of lists, each item."""
    return all(are_ints(*item) if isinstance(item, list | tuple) else type(item) is int for item in items)
