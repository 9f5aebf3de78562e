"""The callable that users hold: a functor as a function of tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic

import torch

from fuser import log
from fuser import torch_ops as ops
from fuser.compiler import register
from fuser.cxx.functor import parse_functor
from fuser.dtypes import plain_number
from fuser.errors import ArgumentError, GradientError, describe_type, shows_users_frames, suggest
from fuser.executor import try_to_compile
from fuser.fallback import Fallback
from fuser.function import Function, HandWritten
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_spec import KernelSpec
from fuser.launcher import Replayer, called_in_c
from fuser.library import has_dispatch_mode, split_inputs
from fuser.outputs import finish_traced_out
from fuser.route import Route, call_anew, find_route, has_derivative
from fuser.tensor_desc import read_device, read_number

__all__ = ["JitFunction", "Number", "R", "check_scalar"]

PUBLIC = (
    "check", "defaults", "function", "index", "scalar_names", "signature", "source", "spec", "tensor_names", "warmup"
)  # fmt: skip

# What a call returns: a tensor, or a tuple of them.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R = TypeVar("R", default=Any)
else:
    from typing import TypeVar

    R = TypeVar("R")

Number = bool | int | float | complex
FindOperator = Callable[[str, tuple[str, ...], int], tuple[str, tuple[str, ...]]]


@called_in_c
class JitFunction(Replayer, Generic[R]):
    """A functor as a function of tensors. Made by ``jit_fn``; immutable; threads may share it.

    Attributes:
        function: the functor with its typing rules.
        defaults: default values of the scalars that have one.
        index: the parameter that receives each element's index; None: none does.
    """

    def __init__(self, function: Function, defaults: Mapping[str, Number], index: str | None = None) -> None:
        self.function = function
        self.defaults: Mapping[str, Number] = MappingProxyType(dict(defaults))
        self.index = index
        # torch.fx writes calls by these names.
        self.__name__ = self.__qualname__ = function.name
        self.__module__ = "fuser.functors"
        self.__doc__ = "\n\n".join([self.signature(), *(functor.source for functor in function.functors)])
        # Names of what calls give by position, in the order of the declaration.
        names = [item.name for item in function.functor.tensors]
        self._index_place = None if index is None else names.index(index)
        self.tensor_names = tuple(name for name in names if index is None or name != index)
        # Names of the scalars, in the order of the declaration.
        self.scalar_names = tuple(parameter.name for parameter in function.scalars)
        # Those that no tensor can take the place of in a kernel.
        later = function.functors[1:]
        self.number_names = tuple({item.name: None for functor in later for item in functor.scalars})
        # Spec by number of tensors: trailing tensors with a C++ default may be left out.
        self._specs: dict[int, KernelSpec] = {}
        # By names of scalars, this function with those as tensors.
        self._with_tensors: dict[tuple[str, ...], JitFunction] = {}
        # All that a graph of Dynamo's depends on.
        self._text = f"{function.to_json()}, {index}"
        super().__init__(self.scalar_names, tuple(map(defaults.get, self.scalar_names)))
        for functor in function.functors:
            log.say("functor", functor.source)

    def __call__(self, /, *tensors: Any, out: Any = None, **scalars: Any) -> R:
        """Apply the functor elementwise.

        Args:
            *tensors: tensors, 0-dim CPU tensors and Python numbers; broadcast and promoted as in torch.
            out: tensor (or one per output) to write to; may be an input itself.
            **scalars: values of the functor's scalars, by name: Python numbers, or 0-dim tensors, which may require
                grad; the host does not wait for those on a GPU. They have no say in the dtype of the result.

        Returns:
            A tensor, or a tuple of tensors for several outputs.

        Raises:
            ArgumentError: too few or too many tensors, or an unknown, missing or ill-typed scalar.
            ShapeError, DeviceError: the tensors do not broadcast, or live on two devices.
            FunctorError, CompileError: the text is wrong; shows the user's own line.
            GradientError: an input requires grad and there is no derivative.
        """
        result: R
        if torch.compiler.is_dynamo_compiling():
            result = self.call_operator(tensors, out, scalars, self.find_operator)
            return result
        replayed = self.launch(tensors, scalars, out)
        result = self.call_anew(*tensors, out=out, **scalars) if replayed is None else replayed
        return result

    @shows_users_frames
    def call_anew(self, /, *tensors: Any, out: Any = None, **scalars: Any) -> Any:
        """Serve a call that is not like an earlier one; as ``__call__``."""
        if torch.overrides.has_torch_function(tensors) or _any_has_torch_function(scalars):
            return torch.overrides.handle_torch_function(
                self, (*tensors, *scalars.values()), *tensors, **({} if out is None else {"out": out}), **scalars
            )
        if any(isinstance(item, torch.SymFloat) for item in (*tensors, *scalars.values())):
            tensors, scalars = _hold_floats(tensors, scalars, lambda item: isinstance(item, torch.SymFloat))
        if any(map(_is_readable, scalars.values())):
            # On the host anyway: it shares the kernel of Python's numbers.
            scalars = {name: value.item() if _is_readable(value) else value for name, value in scalars.items()}
            replayed = self.launch(tensors, scalars, out)
            if replayed is not None:
                return replayed
        scalars = self._read_numbers(scalars)
        held = tuple(
            name for name, value in scalars.items() if isinstance(value, torch.Tensor) and name not in self.number_names
        )
        if held and all(name in self.scalar_names for name in held):
            return self._call_with_tensors(held, tensors, out, scalars)
        tensors = tuple(map(plain_number, tensors))
        self._check_positions(tensors, scalars)
        scalars = {name: plain_number(value) for name, value in scalars.items()}
        inputs = [*tensors, *self.bind_scalars(scalars).values()]
        outs = None if out is None else tuple(out) if isinstance(out, tuple | list) else (out,)
        return call_anew(self.spec(len(tensors)), inputs, self, tensors, scalars, outs)

    def spec(self, count: int) -> KernelSpec:
        """Return the registered group of this function alone, applied to ``count`` tensors.

        Raises:
            ArgumentError: the functor takes another number of tensors. FunctorError: it does not parse.
        """
        spec = self._specs.get(count)
        if spec is None:
            self.check_count(count)
            spec = self._specs[count] = register(self._group(count))
        return spec

    def signature(self) -> str:
        """Return how it is called, for messages: ``axpy(x, y, *, alpha)``, or ``mask(x, i=index)``."""
        return self.function.signature(self.index)

    def check_count(self, count: int) -> None:
        """Raise ArgumentError unless the functor can be applied to ``count`` tensors."""
        total = count if self._index_place is None else count + 1
        # Only tensors at the end can be left out, and the index is always there.
        if count < max(self._index_place or 0, 1) or not self.function.accepts(total):
            wanted = len(self.tensor_names)
            takes = f"takes {wanted} tensor{'s' if wanted != 1 else ''}, got {count}"
            # One that changes its argument, say.
            outputs = [f"T& {item.name}" for item in self.function.functor.outputs]
            written = f": {', '.join(outputs)} is written to, and a tensor is read as T x" if outputs else ""
            raise ArgumentError(f"{self.signature()} {takes if wanted else f'has no tensor to work on{written}'}")

    def index_function(self, count: int) -> Function:
        """Return the function of ``count`` tensors that makes its index: of a reduction, along its dimensions."""
        reduction = self.function.reduction
        return ops.index_function(count, None if reduction is None else reduction.dims)

    def insert_index(self, tensors: Sequence[Any], index: Any) -> list[Any]:
        """Return what the functor takes as tensors: those of a call, and the index at its place, if it has one."""
        place = self._index_place
        return [*tensors] if place is None else [*tensors[:place], index, *tensors[place:]]

    def _check_positions(self, tensors: tuple[Any, ...], scalars: Mapping[str, Any]) -> None:
        wanted = len(self.tensor_names)
        unnamed = [name for name in self.scalar_names if name not in scalars]
        unnamed = ["dim"] if self.function.reduction is not None else unnamed
        if len(tensors) > wanted and unnamed and not isinstance(tensors[wanted], torch.Tensor):
            takes = f"takes {wanted} tensor{'s' if wanted != 1 else ''}, got {len(tensors)} arguments"
            what = "dim is" if unnamed == ["dim"] else "scalars are"
            hint = f"{what} given by name: {unnamed[0]}={tensors[wanted]!r}"
            raise ArgumentError(f"{self.signature()} {takes}; {hint}")

    def bind_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of every scalar in the order of the declaration, defaults filled in.

        Raises:
            ArgumentError: an unknown or missing scalar, or one that is no number.
        """
        for name in scalars:
            if name not in self.scalar_names:
                others = ("dim", "keepdim") if self.function.reduction is not None else ()
                near = suggest("dim" if name == "axis" else name, (*self.scalar_names, *others))
                near = "; give tensors by position" if name in self.tensor_names else near
                near = "; it is each element's index" if name == self.index else near
                raise ArgumentError(f"{self.signature()} has no scalar {name!r}{near}")
        values = {}
        for name in self.scalar_names:
            value = scalars.get(name, self.defaults.get(name))
            if value is None:
                raise ArgumentError(f"{self.signature()} needs the scalar {name!r}")
            is_held = isinstance(value, torch.Tensor) and name in self.number_names
            if type(value) not in (float, int, bool, complex) and not is_held:
                check_scalar(self.signature(), name, value)
            values[name] = value
        return values

    @shows_users_frames
    def check(self, *, device: str | None = None, dtype: torch.dtype = torch.float32) -> None:
        """Parse the text and compile it for tensors of a dtype now, without launching.

        Warns where the text has no eager version, naming line, column and construct: the functor runs fused, and
        fails where that is not possible.

        Args:
            device: "cuda" (NVRTC suffices, there need be no GPU) or "cpu"; the default is the GPU where there is one.
            dtype: of the tensors.

        Raises:
            ArgumentError: there is no such device or dtype.
            FunctorError: the text does not parse (line, column, caret).
            CompileError: it does not compile; points at the user's own line.
            CompilerNotFoundError: there is no compiler for the device.
        """
        usual = "cuda" if torch.cuda.is_available() else "cpu"
        where = read_device(usual if device is None else device, f"{self.signature()}: ")
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError(
                f"{self.signature()}: dtype must be one of torch's, such as torch.float32; got {dtype!r}"
            )
        count = len(self.tensor_names)
        scalars = [self.defaults.get(name, 1.0) for name in self.scalar_names]
        sample = [torch.empty(2, 2, dtype=dtype, device="meta") for _ in range(count)]
        spec = self.spec(count)
        try_to_compile(spec, [*sample, *scalars], where)
        for name, obstacle in Fallback(spec.group).obstacles:
            warnings.warn(f"{name!r} has no eager version: {obstacle}", stacklevel=2)

    @shows_users_frames
    def warmup(
        self, *tensors: Any, out: Any = None, dynamic_shapes: Any = None, backward: bool = False, **scalars: Any
    ) -> None:
        """Compile the kernels that calls need, without launching any; arguments as ``FusedFunction.warmup`` has them.

        Raises:
            ArgumentError: ``dynamic_shapes`` does not fit. Else as calls.
        """
        names = [*self.tensor_names]
        from fuser.warming.symbolic import warm_up  # noqa: PLC0415 - most programs warm nothing up

        given = scalars if out is None else {**scalars, "out": out}
        warm_up(self, tensors, given, names=names, dynamic_shapes=dynamic_shapes, backward=backward)

    def with_tensors(self, names: tuple[str, ...]) -> JitFunction:
        """Return this function with some scalars as tensors, which take no part in promotion."""
        if names not in self._with_tensors:
            function = self.function
            rest = tuple(name for name in self.scalar_names if name not in names)
            functor = parse_functor(function.functor.source, rest, function.functor.num_outputs)
            defaults = {name: value for name, value in self.defaults.items() if name in rest}
            backward = function.backward and function.backward.with_tensors(names, function.functor, functor)
            unpromoted = (*function.unpromoted, *names)
            function = replace(function, functor=functor, unpromoted=unpromoted, backward=backward)
            self._with_tensors[names] = JitFunction(function, defaults, self.index)
        return self._with_tensors[names]

    def merge_arguments(self, names: tuple[str, ...], tensors: Sequence[Any], scalars: Mapping[str, Any]) -> list[Any]:
        """Return what ``with_tensors(names)`` takes in place of ``tensors`` and those scalars.

        Raises:
            ArgumentError: the functor takes another number of tensors.
        """
        self.check_count(len(tensors))
        rest = iter(tensors)
        # Only tensors at the end can be left out, and a scalar after them would be out of place.
        parameters = self.with_tensors(names).tensor_names[: len(tensors) + len(names)]
        return [scalars[name] if name in names else next(rest) for name in parameters]

    def with_backward(
        self, backward: JitFunction, saved: Sequence[int] | None = None, count: int | None = None
    ) -> JitFunction:
        """Return this function with a derivative of the user's; see ``fuser.differentiable``.

        Args:
            backward: takes the saved tensors, then the gradient of every output; its outputs are gradients.
            saved: slots of the tensors it takes, among this function's tensors and, after them, its outputs; None: all
                tensors.
            count: how many of the first tensors it makes gradients of; None: all.

        Raises:
            ArgumentError: it takes or makes another number of tensors, or has a scalar that this function has not.
        """
        functor, theirs = self.function.functor, backward.function.functor
        saved = range(len(functor.tensors)) if saved is None else saved
        targets = [slot for slot in range(len(functor.tensors)) if slot != self._index_place]
        tensors = len(targets)
        wanted = len(saved) + functor.num_outputs, tensors if count is None else count
        if (len(theirs.tensors), theirs.num_outputs) != wanted or wanted[1] > tensors:
            raise ArgumentError(
                f"{theirs.entry}, the backward functor of {functor.entry}, takes {len(theirs.tensors)} tensors and has "
                f"{theirs.num_outputs} outputs; expected {wanted[0]} ({len(saved)} saved, {functor.num_outputs} "
                f"gradients) and {wanted[1]}"
            )
        unknown = [name for name in backward.scalar_names if name not in self.scalar_names]
        if unknown:
            raise ArgumentError(f"{theirs.entry} has the scalar {unknown[0]!r}, which {functor.entry} has not")
        hand_written = HandWritten(theirs, tuple(saved), tuple(targets[: wanted[1]]))
        return JitFunction(replace(self.function, backward=hand_written), self.defaults, self.index)

    def _call_with_tensors(
        self, names: tuple[str, ...], tensors: tuple[Any, ...], out: Any, scalars: Mapping[str, Any]
    ) -> Any:
        self._check_zero_dim(names, scalars)
        rest = {name: value for name, value in scalars.items() if name not in names}
        return self.with_tensors(names)(*self.merge_arguments(names, tensors, scalars), out=out, **rest)

    def _read_numbers(self, scalars: dict[str, Any]) -> dict[str, Any]:
        # What follows a reduction's map takes no tensor but those that it reduces.
        held = tuple(name for name in self.number_names if isinstance(scalars.get(name), torch.Tensor))
        self._check_zero_dim(held, scalars)
        for name in held:
            if has_derivative(scalars[name]):
                raise GradientError(
                    f"{self.signature()}: the scalar {name!r} has a gradient, and reductions have one of what "
                    "their map takes only: detach it"
                )
        if has_dispatch_mode():
            # Somebody traces: the operator reads them where it runs.
            return scalars
        return {**scalars, **{name: read_number(scalars[name]) for name in held}} if held else scalars

    def _check_zero_dim(self, names: tuple[str, ...], scalars: Mapping[str, Any]) -> None:
        for name in names:
            if scalars[name].dim():
                shape = list(scalars[name].shape)
                raise ArgumentError(f"{self.signature()}: scalar {name!r} has shape {shape}, not []")

    def call_operator(
        self, tensors: tuple[Any, ...], out: Any, scalars: dict[str, Any], find_operator: FindOperator
    ) -> Any:
        """Serve a call that Dynamo traces by one of the operator, so that the graph does not break.

        Args:
            tensors: as in ``__call__``.
            out: likewise.
            scalars: likewise.
            find_operator: called with a text that says which function this is, the names of the scalars that are
                tensors here and the number of tensors, and constant for Dynamo: returns the group's text and the names
                of the tensors that it takes.
        """
        # A float that is computed from sizes is a float here like any other.
        from torch.fx.experimental.symbolic_shapes import has_static_value  # noqa: PLC0415 - brings sympy

        tensors, scalars = _hold_floats(tensors, scalars, lambda item: not has_static_value(item))
        tensor_names = tuple(name for name in self.scalar_names if isinstance(scalars.get(name), torch.Tensor))
        self._check_zero_dim(tensor_names, scalars)
        held = tuple(name for name in tensor_names if name not in self.number_names)
        group, names = find_operator(self._text, held, len(tensors))
        given = iter(tensors)
        values = [scalars[name] if name in held else next(given) for name in names]
        bound = self.bind_scalars({**scalars, **dict.fromkeys(tensor_names, 0)})
        # The operator reads the value of a tensor in place of a number.
        values += [scalars[name] if name in tensor_names else bound[name] for name in bound if name not in held]
        results = torch.ops.fuser.run(group, *split_inputs(values))
        if out is not None:
            finish_traced_out(out, results)
            return out
        return results[0] if len(results) == 1 else tuple(results)

    def find_operator(self, text: str, held: tuple[str, ...], count: int) -> tuple[str, tuple[str, ...]]:  # noqa: ARG002
        """Return the text of this function with some scalars as tensors, and the names of what it takes.

        Dynamo guards arguments of what it takes for constant, and nothing that is read there: by ``text``, its graph
        does not serve another functor in this one's place.
        """
        function = self.with_tensors(held) if held else self
        count += len(held)
        return function.spec(count).text, function.tensor_names[:count]

    # What torch.compiler.assume_constant_result sets; the decorator itself would import all of Dynamo.
    find_operator._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _group(self, count: int) -> FusionGroup:
        builder = GroupBuilder()
        tensors = [builder.add_input(name) for name in self.tensor_names[:count]]
        scalars = [builder.add_input(name, is_scalar=True) for name in self.scalar_names]
        if self.index is not None:
            tensors = self.insert_index(tensors, *builder.apply(self.index_function(count), tensors))
        return builder.build(builder.apply(self.function, tensors, scalars, self.__name__))

    def __reduce__(self) -> tuple[Any, ...]:
        return JitFunction, (self.function, dict(self.defaults), self.index)

    @property
    def source(self) -> str:
        """The functor's text, as it was given."""
        return self.function.functor.source

    def __dir__(self) -> list[str]:
        # What is for users: the rest serves other stages.
        return [*(name for name in super().__dir__() if name.startswith("__")), *PUBLIC]

    def __repr__(self) -> str:
        return f"<fuser.JitFunction {self.signature()}>"


def _hold_floats(
    tensors: tuple[Any, ...], scalars: Mapping[str, Any], is_unknown: Callable[[Any], bool]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Floats that are not known while somebody traces, as 0-dim tensors: the operator's floats are known ones.
    def hold(item: Any) -> Any:
        if isinstance(item, float | torch.SymFloat) and is_unknown(item):
            return torch.scalar_tensor(item, dtype=torch.float64, device="cpu")  # type: ignore[arg-type]
        return item

    # Among integers such a tensor would say more about the dtype of the result than a number does.
    is_weak = any(isinstance(item, torch.Tensor) and not _is_integral(item) for item in tensors)
    return (
        tuple([hold(item) for item in tensors]) if is_weak else tensors,
        {name: hold(value) for name, value in scalars.items()},
    )


def _is_integral(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _any_has_torch_function(scalars: Mapping[str, Any]) -> bool:
    return any(type(value) not in (float, int, bool, complex) for value in scalars.values()) and (
        torch.overrides.has_torch_function(tuple(scalars.values()))
    )


def _is_readable(value: Any) -> bool:
    # Whether a scalar is a plain 0-dim CPU tensor that nobody differentiates or traces.
    if type(value) is not torch.Tensor or value.dim() or value.device.type != "cpu":
        return False
    return find_route([value]).route is Route.KERNEL and not torch.compiler.is_compiling()


def check_scalar(signature: str, name: str, value: Any) -> None:
    """Raise ArgumentError unless the value of a scalar is a number."""
    # Symbolic numbers and FX nodes stand for numbers.
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | torch.fx.Node | torch.fx.Proxy):
        return
    if not isinstance(value, bool | int | float | complex):
        raise ArgumentError(f"{signature}: scalar {name!r} must be a Python number, got {describe_type(value)}")
