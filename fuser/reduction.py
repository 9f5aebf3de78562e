"""Reductions that users write: ``create_reduction_fn``."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, overload

import torch

from fuser.combining import Reduction
from fuser.cxx.builtin_types import dtype_named
from fuser.cxx.functor import EntryParameter, Functor, parse_functor
from fuser.cxx.preprocess import Problem
from fuser.dtypes import is_representable, plain_number
from fuser.errors import ArgumentError, FunctorError, describe_type, shows_users_frames, suggest
from fuser.function import Function
from fuser.jit_function import JitFunction, Number, R, check_scalar
from fuser.jiterator import check_index

__all__ = ["ReductionFunction", "create_reduction_fn"]

# Stands for an argument that was not given, where None is one.
_MISSING = object()
# What ``dir()`` shows.
PUBLIC = ("along", "check", "defaults", "function", "index", "warmup")
# Names that calls of the function use themselves.
_RESERVED = ("dim", "keepdim", "out")
# Types that show whether another type depends on T.
_SAMPLES = (torch.float32, torch.float64, torch.int32, torch.complex64)


# What a text for ``finish`` returns is not known to types.
@overload
def create_reduction_fn(
    code_string: str,
    *,
    identity: Number | Sequence[Number],
    map: str | JitFunction | None = None,
    finish: JitFunction[R],
    index: str | None = None,
    **scalars: Number,
) -> ReductionFunction[R]: ...
@overload
def create_reduction_fn(
    code_string: str,
    *,
    identity: Number,
    map: str | JitFunction | None = None,
    finish: None = None,
    index: str | None = None,
    **scalars: Number,
) -> ReductionFunction[torch.Tensor]: ...
@overload
def create_reduction_fn(
    code_string: str,
    *,
    identity: tuple[Number, Number, *tuple[Number, ...]],
    map: str | JitFunction | None = None,
    finish: None = None,
    index: str | None = None,
    **scalars: Number,
) -> ReductionFunction[tuple[torch.Tensor, ...]]: ...
@overload
def create_reduction_fn(
    code_string: str,
    *,
    identity: Number | Sequence[Number],
    map: str | JitFunction | None = None,
    finish: str | None = None,
    index: str | None = None,
    **scalars: Number,
) -> ReductionFunction[Any]: ...
@shows_users_frames
def create_reduction_fn(
    code_string: str,
    *,
    identity: Any = _MISSING,
    map: str | JitFunction | None = None,  # noqa: A002 - what everybody calls it
    finish: str | JitFunction | None = None,
    index: str | None = None,
    **scalars: Number,
) -> ReductionFunction:
    """Create a reduction from the functor that combines two parts of what is reduced.

    The order is fixed, and depends on nothing but how many elements are reduced: they are numbered along the reduced
    dimensions, row-major; batches of 8192 are combined as a balanced binary tree over their numbers, padded with the
    identity, and batches in order. Accumulators stay in their C++ types until they are finished.

    Args:
        code_string: C++ text of the combine functor, associative, the part with the smaller numbers first:
            ``template <typename T> T add(T a, T b) { return a + b; }``. With k accumulators it takes those of one
            part, then those of the other, and writes k results to ``T&`` parameters. Accumulators have the types of
            its first k parameters: T, or any arithmetic type of C++.
        identity: a number, or one for each of several accumulators, that changes nothing it is combined with. It is
            the result where there is nothing to reduce.
        map: functor (text or JitFunction) that makes the accumulators of one element of the tensors; None: the
            elements are the accumulators, of as many tensors as there are accumulators.
        finish: functor (text or JitFunction) that makes the results of the accumulators; None: they are the results.
            A result of type T has the tensors' common dtype, any other has the dtype of its type.
        index: the parameter of ``map`` that receives the element's number along the reduced dimensions (int64_t).
        **scalars: default value of each parameter that is a scalar, in whichever of the texts it is.

    Returns:
        A function of tensors that broadcasts and promotes as functors do, and reduces along ``dim``.

    Raises:
        ArgumentError: there is no identity, or an argument is of a wrong kind.
        FunctorError: a text has no entry, the texts do not fit together, or a name is no parameter's.
    """
    numbers = _read_identity(identity)
    _check_kinds(code_string, map, finish, index, scalars)
    defaults = {name: plain_number(value) for name, value in scalars.items()}
    count, names = len(numbers), tuple(defaults)
    combine = _parse(code_string, names, count)
    finished = None if finish is None else _functor_of(finish, names, 1)
    given = [_functor_of(map, names, count)] if map is not None else []
    _check_names(names, [combine, *given, *([finished] if finished else [])])
    _check_combine(combine, count)
    _check_returned(combine, combine)
    mapped = given[0] if given else _functor_of(_write_map(combine, count), names, count)
    _check_map(mapped, combine, count, is_own=map is None)
    if finished is not None and len(finished.tensors) != count:
        wanted = f"{finished.signature()} takes {len(finished.tensors)} accumulators, and the identity has {count}"
        raise _error(finished, None, f"finish={wanted}")
    for number, parameter in zip(numbers, combine.tensors, strict=False):
        types = [dtype for dtype in _types_of(parameter.type, combine) if dtype is not None]
        if not any(is_representable(number, dtype) for dtype in types):
            raise ArgumentError(f"identity {number!r} is no number of type {parameter.type}, as {parameter.name} is")
    functions = [item for item in (map, finish) if isinstance(item, JitFunction)]
    defaults = {name: value for item in functions for name, value in item.defaults.items()} | defaults
    reduction = Reduction(combine, numbers, finished)
    function = Function(
        mapped,
        unpromoted=() if index is None else (check_index(mapped, index),),
        out_dtypes=_read_dtypes(reduction.result, finish),
        reduction=reduction,
    )
    for name, value in defaults.items():
        check_scalar(function.signature(index), name, value)
    return ReductionFunction(function, defaults, index)


@dataclass(frozen=True, slots=True, eq=False)
class ReductionFunction(Generic[R]):
    """A reduction as a function of tensors. Made by ``create_reduction_fn``; immutable; threads may share it."""

    # Its texts with their typing rules; no dimensions yet.
    function: Function
    # Default values of the scalars that have one.
    defaults: Mapping[str, Number]
    # The parameter of the map that receives each element's number along the reduced dimensions; None: none does.
    index: str | None = None
    # The reduction of all dimensions, and others by dimensions and keepdim.
    _whole: JitFunction[R] = field(init=False, repr=False)
    _forms: dict[tuple[tuple[int, ...] | None, bool], JitFunction[R]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Make the form that knows its scalars."""
        object.__setattr__(self, "_whole", self.along())

    @shows_users_frames
    def __call__(
        self,
        /,
        *tensors: Any,
        dim: Any = None,
        keepdim: Any = False,
        out: Any = None,
        **scalars: Any,
    ) -> R:
        """Reduce.

        Args:
            *tensors: as many as the map takes; broadcast and promoted as in torch.
            dim: dimension or dimensions to reduce; None or none at all: all of them.
            keepdim: whether the result keeps them, with size 1.
            out: tensor (or one per output) to write to.
            **scalars: values of the scalars, by name: Python numbers or 0-dim tensors; only scalars of the map may
                require grad.

        Returns:
            A tensor, contiguous, or a tuple of tensors for several outputs.

        Raises:
            DimError: a dimension is out of range. ShapeError: one is there twice, or the tensors do not broadcast.
            ArgumentError: the identity is no number of its accumulator's type, and as for a functor.
            DeviceError, FunctorError, CompileError, GradientError: as for a functor.
        """
        if torch.compiler.is_dynamo_compiling():
            # Numbers from here on, also where they are arguments of what is compiled, which become symbols.
            dim = tuple([_settle(item) for item in dim]) if isinstance(dim, tuple | list) else _settle(dim)

            def find_operator(text: str, held: tuple[str, ...], count: int) -> tuple[str, tuple[str, ...]]:
                return self._find_operator(dim, keepdim, text, held, count)

            made: R = self._whole.call_operator(tensors, out, scalars, find_operator)
            return made
        form = None
        if type(keepdim) is bool and (dim is None or type(dim) is int):
            form = self._forms.get((None if dim is None else (dim,), keepdim))
        return (form or self.along(dim, keepdim=keepdim))(*tensors, out=out, **scalars)

    @shows_users_frames
    def along(self, dim: int | Sequence[int] | None = None, *, keepdim: bool = False) -> JitFunction[R]:
        """Return the reduction along some dimensions as a functor, which takes the tensors and the scalars.

        Raises:
            ArgumentError: ``dim`` or ``keepdim`` is of a wrong kind.
        """
        name = self.function.name
        if not isinstance(keepdim, bool):
            raise ArgumentError(f"{name}: keepdim must be a bool, got {describe_type(keepdim)}")
        key = _read_dims(name, dim), keepdim
        if key not in self._forms:
            assert self.function.reduction is not None, "it is one"
            reduction = self.function.reduction._replace(dims=key[0], keepdim=keepdim)
            self._forms.setdefault(
                key, JitFunction(replace(self.function, reduction=reduction), self.defaults, self.index)
            )
        return self._forms[key]

    def _find_operator(
        self, dim: Any, keepdim: bool, text: str, held: tuple[str, ...], count: int
    ) -> tuple[str, tuple[str, ...]]:
        return self.along(dim, keepdim=keepdim).find_operator(text, held, count)

    # As JitFunction's.
    _find_operator._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @shows_users_frames
    def check(self, *, device: str | None = None, dtype: torch.dtype | None = None) -> None:
        """Try the identity and the order on some numbers, then compile it, as ``JitFunction.check`` does.

        Args:
            device: "cuda" (NVRTC suffices, there need be no GPU) or "cpu"; the default is the GPU where there is one.
            dtype: of the tensors; None: float32, or what the texts take.

        Raises:
            ArgumentError: the identity changes what it is combined with, or the combine functor is not associative.
            FunctorError, CompileError, CompilerNotFoundError: as for a functor.
        """
        # Eager torch, which is a third of fuser.
        from fuser.reduction_check import check_reduction  # noqa: PLC0415

        whole = self._whole
        # A text that says too little (a path without a return) would come to any number.
        whole.spec(len(whole.tensor_names))
        scalars = {parameter.name: self.defaults.get(parameter.name, 1.0) for parameter in self.function.scalars}
        tried = check_reduction(self.function, scalars, dtype if isinstance(dtype, torch.dtype) else None)
        whole.check(device=device, dtype=dtype or tried)

    @shows_users_frames
    def warmup(
        self,
        *tensors: Any,
        dim: Any = None,
        keepdim: bool = False,
        out: Any = None,
        dynamic_shapes: Any = None,
        backward: bool = False,
        **scalars: Any,
    ) -> None:
        """Compile the kernels that calls need, without launching any; arguments as ``FusedFunction.warmup`` has them.

        Raises:
            ArgumentError: ``dynamic_shapes`` does not fit. Else as calls.
        """
        own = self.along(dim, keepdim=keepdim)
        own.warmup(*tensors, out=out, dynamic_shapes=dynamic_shapes, backward=backward, **scalars)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReductionFunction, (self.function, self.defaults, self.index)

    def __dir__(self) -> list[str]:
        # What is for users: the rest serves other stages.
        return [*(name for name in object.__dir__(self) if name.startswith("__")), *PUBLIC]

    def __repr__(self) -> str:
        return f"<fuser.ReductionFunction {self._whole.signature()}>"


def _settle(item: Any) -> Any:
    # Of a symbol Dynamo makes the number that it stands for, and guards it.
    return operator.index(item) if isinstance(item, int) and not isinstance(item, bool) else item


def _read_dims(name: str, dim: Any) -> tuple[int, ...] | None:
    found = []
    for item in dim if isinstance(dim, tuple | list) else () if dim is None else (dim,):
        index = _index_of(item)
        if index is None:
            raise ArgumentError(f"{name}: dim must be an int or a tuple of ints, got {describe_type(item)} ({item!r})")
        found.append(index)
    # As torch has it, none are all.
    return tuple(sorted(found)) or None


def _index_of(item: Any) -> int | None:
    # Arrays of numpy have an index where they are one integer.
    try:
        return None if isinstance(item, bool | torch.Tensor) else operator.index(item)
    except TypeError:
        return None


def _read_identity(identity: Any) -> tuple[Number, ...]:
    if identity is _MISSING:
        raise ArgumentError(
            "create_reduction_fn needs identity=: the number that changes nothing it is combined with, such as 0 for a "
            "sum, or one for each accumulator; it is the result where there is nothing to reduce"
        )
    numbers = tuple(map(plain_number, identity if isinstance(identity, tuple | list) else (identity,)))
    for number in numbers:
        if not isinstance(number, bool | int | float | complex):
            raise ArgumentError(f"identity must be a number, or one for each accumulator; got {describe_type(number)}")
    if not numbers:
        raise ArgumentError("identity is empty: it has one number for each accumulator")
    return numbers


def _check_kinds(code: Any, map_: Any, finish: Any, index: Any, scalars: Mapping[str, Any]) -> None:
    if not isinstance(code, str):
        raise ArgumentError(f"a reduction is made of its combine functor's C++ text, a str; got {describe_type(code)}")
    for name, item in (("map", map_), ("finish", finish)):
        if item is not None and not isinstance(item, str | JitFunction):
            raise ArgumentError(f"{name} must be a functor's text or made by jit_fn, got {describe_type(item)}")
        function = item.function if isinstance(item, JitFunction) else None
        if function is not None and (function.reduction or function.fallback or function.backward):
            raise ArgumentError(f"{name}={function.name} must be a plain functor: no reduction, fallback= or backward=")
    if isinstance(map_, JitFunction) and map_.index is not None:
        raise ArgumentError(
            f"map={map_.function.name} numbers all elements: give index= to create_reduction_fn instead"
        )
    if isinstance(map_, JitFunction) and map_.function.out_dtypes:
        raise ArgumentError(
            f"map={map_.function.name} has out_dtypes, and accumulators are not rounded: leave them out"
        )
    if index is not None and map_ is None:
        raise ArgumentError(f"index={index!r} is to be a parameter of map, and there is no map")
    for name in _RESERVED:
        if name in scalars:
            raise ArgumentError(
                f"a scalar cannot be called {name!r}: {name}= of a call means something else; rename it"
            )


def _parse(source: str, names: Sequence[str], count: int) -> Functor:
    # With as many outputs as it has, whatever is wanted: who wants another number can say so better.
    held = _names_in(source, names, count)
    first: FunctorError | None = None
    for outputs in (count, *range(1, 17)):
        try:
            return parse_functor(source, held, outputs)
        except FunctorError as error:
            # A variable for a traceback that has this frame in it would keep what the callers hold.
            first = first or error.with_traceback(None)
    assert first is not None, "one was raised"
    raise first


def _names_in(source: str, names: Sequence[str], count: int) -> tuple[str, ...]:
    # Those that are parameters of the text.
    if not names:
        return ()
    parameters = _parse(source, (), count).parameters
    return tuple(item.name for item in parameters if item.name in names)


def _functor_of(item: str | JitFunction, names: Sequence[str], count: int) -> Functor:
    if isinstance(item, str):
        return _parse(item, names, count)
    functor = item.function.functor
    more = {parameter.name for parameter in functor.scalars} | {*names}
    return _parse(functor.source, tuple(more), functor.num_outputs)


def _check_names(names: Sequence[str], functors: Sequence[Functor]) -> None:
    known = list(dict.fromkeys(item.name for functor in functors for item in functor.parameters))
    for name in names:
        if name not in known:
            which = f"{functors[0].entry} has no parameter {name!r}"
            raise FunctorError(f"{which} (there are {', '.join(known)}){suggest(name, known)}")


def _write_map(combine: Functor, count: int) -> str:
    # The elements as accumulators, converted to their types.
    name = combine.template_parameters[0]
    types = [parameter.type for parameter in combine.tensors[:count]]
    if count == 1:
        return f"template <typename {name}> {types[0]} element({name} x) {{ return x; }}"
    taken = ", ".join(f"{name} x{slot}" for slot in range(count))
    made = ", ".join(f"{kind}& a{slot}" for slot, kind in enumerate(types))
    body = " ".join(f"a{slot} = x{slot};" for slot in range(count))
    return f"template <typename {name}> void elements({taken}, {made}) {{ {body} }}"


def _check_combine(combine: Functor, count: int) -> None:
    tensors, outputs = len(combine.tensors), combine.num_outputs
    if tensors != 2 * count or outputs != count:
        one = f"{tensors} accumulators and makes {outputs}"
        wanted = f"{2 * count} and {count}" if count > 1 else "2 and 1"
        shape = "T f(T a, T b)" if count == 1 else "void f(T a1, T a2, T b1, T b2, T& r1, T& r2)"
        raise _error(
            combine,
            None,
            f"{combine.signature()} takes {one}; with an identity of {count} number{'s' * (count != 1)} it is "
            f"{wanted}, as in {shape}",
        )
    for slot, first in enumerate(combine.tensors[:count]):
        types = _types_of(first.type, combine)
        if types[0] is None:
            raise _error(combine, first, f"{first.name} is of type {first.type}: an accumulator is T or a C++ number")
        for other in (combine.tensors[count + slot], *combine.outputs[slot : slot + 1]):
            if _types_of(other.type, combine) != types:
                raise _error(
                    combine,
                    other,
                    f"accumulator {slot} is {first.type} as {first.name} and {other.type} as {other.name}",
                )


def _check_returned(functor: Functor, combine: Functor) -> None:
    # Where there is one accumulator: what a text returns becomes it, and must not lose what accumulators are for.
    held = combine.tensors[0]
    pairs = [
        (made, kept)
        for made, kept in zip(_types_of(functor.result, functor), _types_of(held.type, combine), strict=True)
        if made is not None and kept is not None
    ]
    if not functor.outputs and pairs and all(torch.promote_types(made, kept) != kept for made, kept in pairs):
        own = f"the accumulator of {combine.entry} is {held.type}: it would narrow"
        raise _error(functor, None, f"{functor.signature()} returns {functor.result}, and {own}")


def _check_map(mapped: Functor, combine: Functor, count: int, *, is_own: bool) -> None:
    if mapped.num_outputs != count:
        made = f"makes {mapped.num_outputs} accumulator{'s' * (mapped.num_outputs != 1)}"
        raise _error(mapped, None, f"map={mapped.signature()} {made}, and the identity has {count}")
    if is_own:
        return
    _check_returned(mapped, combine)
    for slot, (output, accumulator) in enumerate(zip(mapped.outputs, combine.tensors, strict=False)):
        if _types_of(output.type, mapped) != _types_of(accumulator.type, combine):
            own = f"accumulator {slot} of {combine.entry} is {accumulator.type}"
            raise _error(mapped, output, f"{output.name} is {output.type}, and {own}")


def _read_dtypes(result: Functor, finish: Any) -> tuple[torch.dtype | None, ...]:
    # Of each output, None for the common dtype.
    if isinstance(finish, JitFunction) and finish.function.out_dtypes:
        return finish.function.out_dtypes
    outputs: Sequence[EntryParameter | None] = result.outputs or (None,)
    dtypes = [_read_dtype(result, output) for output in outputs]
    return tuple(dtypes) if any(dtypes) else ()


def _read_dtype(result: Functor, output: EntryParameter | None) -> torch.dtype | None:
    text = output.type if output else result.result
    if text in {result.template_parameters[0], "auto"}:
        return None
    first, *others = _types_of(text, result)
    if first is None or any(other is not first for other in others):
        raise _error(
            result, output, f"a result of type {text} has no dtype: it must be T, or a number's type without T"
        )
    return first


def _types_of(text: str, functor: Functor) -> tuple[torch.dtype | None, ...]:
    # What a type is for several T.
    return tuple(dtype_named(text, functor.template_parameters[0], compute) for compute in _SAMPLES)


def _error(functor: Functor, parameter: EntryParameter | None, message: str) -> FunctorError:
    # Shows the user's line.
    shown = parameter or next(iter(functor.parameters), None)
    return functor.error(Problem(shown.place if shown else (1, 1), message))
