"""Drop-ins for torch.cuda.jiterator, and ``jit_fn`` with everything fuser adds: a text becomes a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal, TypedDict, Unpack, overload

import torch

from fuser.cxx.functor import Functor, Role, parse_functor
from fuser.dtypes import plain_number
from fuser.errors import ArgumentError, describe_type, shows_users_frames, suggest
from fuser.function import Function
from fuser.jit_function import JitFunction, Number, check_scalar

__all__ = ["check_index", "create_jit_fn", "create_multi_output_jit_fn", "jit_fn"]


class JitOptions(TypedDict, total=False):
    """What ``jit_fn`` takes by name, beside ``num_outputs``."""

    scalars: Mapping[str, Number] | Sequence[str]
    out_dtypes: torch.dtype | Sequence[torch.dtype | None] | None
    index: str | None
    fallback: Callable[..., Any] | None
    backward: JitFunction | None


@shows_users_frames
def create_jit_fn(code_string: str, **scalars: Number) -> JitFunction[torch.Tensor]:
    """Create a function from a functor text; takes what ``torch.cuda.jiterator._create_jit_fn`` takes.

    Args:
        code_string: C++ text whose last function template is the entry, such as
            ``template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }``.
        **scalars: default value of each parameter that is a scalar, by its name in the text.

    Returns:
        A function of tensors (and Python numbers) that broadcasts and promotes as torch's pointwise ops do.

    Raises:
        FunctorError: the text has no entry, or a scalar names no parameter.
    """
    return jit_fn(code_string, scalars=scalars)


@shows_users_frames
def create_multi_output_jit_fn(
    code_string: str, num_outputs: int, **scalars: Number
) -> JitFunction[tuple[torch.Tensor, ...]]:
    """Create a function with several outputs, each a ``T&`` parameter of the entry.

    Takes what ``torch.cuda.jiterator._create_multi_output_jit_fn`` takes; the function returns a tuple of tensors
    (one tensor for ``num_outputs=1``).

    Raises:
        FunctorError: the text has no entry, another number of outputs, or a scalar names no parameter.
    """
    return jit_fn(code_string, num_outputs=num_outputs, scalars=scalars)


@overload
def jit_fn(  # type: ignore[overload-overlap]
    code_string: str, *, num_outputs: Literal[1] = 1, **options: Unpack[JitOptions]
) -> JitFunction[torch.Tensor]: ...
@overload
def jit_fn(
    code_string: str, *, num_outputs: int, **options: Unpack[JitOptions]
) -> JitFunction[tuple[torch.Tensor, ...]]: ...
@shows_users_frames
def jit_fn(
    code_string: str,
    *,
    num_outputs: int = 1,
    scalars: Mapping[str, Number] | Sequence[str] = (),
    out_dtypes: torch.dtype | Sequence[torch.dtype | None] | None = None,
    index: str | None = None,
    fallback: Callable[..., Any] | None = None,
    backward: JitFunction | None = None,
) -> JitFunction:
    """Create a function from a functor text.

    Args:
        code_string: C++ text whose last function template is the entry.
        num_outputs: number of outputs; 2 or more are written to one ``T&`` parameter each.
        scalars: the parameters that are scalars: names with default values, or names alone when every call must
            give them. Scalars are run-time arguments: a new value compiles nothing.
        out_dtypes: dtype of the output, or one per output; None stands for the inputs' common dtype.
        index: the parameter, best declared ``int64_t``, that no call gives: each element's linear index in the
            broadcast shape of the call's tensors, row-major whatever the layout. It has no say in dtypes and no
            gradient; in ``torch.func.vmap`` it counts within one element of the batch. In a shard of a DTensor it would
            be another one: all ranks compute the whole.
        fallback: the same computation in eager torch, called with the tensors (the index among them, as the functor)
            and the scalars by name. It serves where a kernel cannot: without a compiler, or on other devices. Without
            it the eager version, too, is derived from the text.
        backward: the derivative, where it is not to be derived from the text: a functor that takes the tensors (and
            the index), then the gradient of every output, and has one output per tensor, its gradient.
            ``differentiable`` can say what else it takes.

    Raises:
        FunctorError: the text has no entry, another number of outputs, or a scalar names no parameter.
        ArgumentError: an argument is of a wrong kind; ``index`` names no tensor parameter; ``backward`` takes or makes
            another number of tensors, or has scalars of its own.
    """
    names = _check_kinds(code_string, num_outputs, scalars, fallback, backward)
    defaults = {name: plain_number(value) for name, value in scalars.items()} if isinstance(scalars, Mapping) else {}
    functor = parse_functor(code_string, names, num_outputs)
    for name, value in defaults.items():
        check_scalar(functor.signature(), name, value)
    dtypes = _read_dtypes(functor, out_dtypes)
    unpromoted = () if index is None else (check_index(functor, index),)
    function = Function(functor, unpromoted=unpromoted, out_dtypes=dtypes, fallback=fallback)
    made = JitFunction(function, defaults, index)
    return made if backward is None else made.with_backward(backward)


def _check_kinds(code_string: Any, num_outputs: Any, scalars: Any, fallback: Any, backward: Any) -> tuple[str, ...]:
    # Returns the names of the scalars.
    if not isinstance(code_string, str):
        raise ArgumentError(f"a functor is made of its C++ text, a str; got {describe_type(code_string)}")
    if not isinstance(num_outputs, int) or isinstance(num_outputs, bool):
        raise ArgumentError(f"num_outputs must be an int, got {describe_type(num_outputs)}")
    is_list = isinstance(scalars, Mapping | Sequence | Set) and not isinstance(scalars, str | bytes)
    if not is_list or not all(isinstance(name, str) for name in scalars):
        raise ArgumentError(f"scalars must be a list of names, or a dict of names and default values, got {scalars!r}")
    if "out" in scalars:
        raise ArgumentError("a scalar cannot be called 'out': out= of a call says where the result goes; rename it")
    if fallback is not None and not callable(fallback):
        raise ArgumentError(f"fallback must be a function of the tensors and scalars, got {describe_type(fallback)}")
    if backward is not None and not isinstance(backward, JitFunction):
        raise ArgumentError(f"backward must be a function made by jit_fn, got {describe_type(backward)}")
    return tuple(dict.fromkeys(scalars))


def check_index(functor: Functor, index: Any) -> str:
    """Return the name of the parameter that receives the index; raises ArgumentError if there is none."""
    if not isinstance(index, str):
        raise ArgumentError(f"index must be the name of a parameter, a str; got {describe_type(index)}")
    parameter = next((item for item in functor.parameters if item.name == index), None)
    if parameter is None:
        near = suggest(index, [item.name for item in functor.tensors])
        raise ArgumentError(f"{functor.signature()} has no parameter {index!r} to receive the index{near}")
    if parameter.role is not Role.TENSOR:
        kind = "an output" if parameter.role is Role.OUTPUT else "a scalar"
        raise ArgumentError(f"{functor.signature()}: {index!r} cannot receive the index: it is {kind}")
    return index


def _read_dtypes(functor: Functor, out_dtypes: Any) -> tuple[torch.dtype | None, ...]:
    if out_dtypes is None:
        return ()
    dtypes = tuple(out_dtypes) if isinstance(out_dtypes, tuple | list) else (out_dtypes,)
    for dtype in dtypes:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            wanted = getattr(torch, str(getattr(dtype, "__name__", dtype)), None)
            example = wanted if isinstance(wanted, torch.dtype) else torch.float32
            raise ArgumentError(f"{functor.entry}: out_dtypes takes torch's dtypes, such as {example}; got {dtype!r}")
    if len(dtypes) != functor.num_outputs:
        raise ArgumentError(f"{functor.entry}: {len(dtypes)} out_dtypes for {functor.num_outputs} outputs")
    return dtypes
