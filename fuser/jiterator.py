"""The callables users hold: drop-ins for torch.cuda.jiterator, and ``jit_fn`` with everything fuser adds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fuser.compiler import dump, register
from fuser.config import config
from fuser.errors import ArgumentError
from fuser.executor import run_and_record, split_inputs, warm_up
from fuser.functor import Functor, parse_functor
from fuser.graph import Function, FusionGroup, GroupBuilder
from fuser.kernel_spec import KernelSpec
from fuser.launcher import Replayer, called_in_c

__all__ = ["JitFunction", "create_jit_fn", "create_multi_output_jit_fn", "jit_fn"]

Number = bool | int | float | complex


def create_jit_fn(code_string: str, **scalars: Number) -> JitFunction:
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


def create_multi_output_jit_fn(code_string: str, num_outputs: int, **scalars: Number) -> JitFunction:
    """Create a function with several outputs, each a ``T&`` parameter of the entry.

    Takes what ``torch.cuda.jiterator._create_multi_output_jit_fn`` takes; the function returns a tuple of tensors
    (one tensor for ``num_outputs=1``).

    Raises:
        FunctorError: the text has no entry, another number of outputs, or a scalar names no parameter.
    """
    return jit_fn(code_string, num_outputs=num_outputs, scalars=scalars)


def jit_fn(
    code_string: str,
    *,
    num_outputs: int = 1,
    scalars: Mapping[str, Number] | Sequence[str] = (),
    out_dtypes: torch.dtype | Sequence[torch.dtype | None] | None = None,
    fallback: Callable[..., Any] | None = None,
) -> JitFunction:
    """Create a function from a functor text.

    Args:
        code_string: C++ text whose last function template is the entry.
        num_outputs: number of outputs; 2 or more are written to one ``T&`` parameter each.
        scalars: the parameters that are scalars: names with default values, or names alone when every call must
            give them. Scalars are run-time arguments: a new value compiles nothing.
        out_dtypes: dtype of the output, or one per output; None stands for the inputs' common dtype.
        fallback: the same computation in eager torch, called with the tensors and the scalars by name. It serves
            where a kernel cannot: without a compiler, on other devices, and when an input requires grad. By default
            it is derived from the text.

    Raises:
        FunctorError: the text has no entry, another number of outputs, or a scalar names no parameter.
    """
    defaults = dict(scalars) if isinstance(scalars, Mapping) else {}
    functor = parse_functor(code_string, tuple(scalars), num_outputs)
    for name, value in defaults.items():
        _check_scalar(functor, name, value)
    if out_dtypes is None:
        dtypes: tuple[torch.dtype | None, ...] = ()
    else:
        dtypes = (out_dtypes,) if isinstance(out_dtypes, torch.dtype) else tuple(out_dtypes)
        if len(dtypes) != num_outputs:
            raise ArgumentError(f"{functor.entry}: {len(dtypes)} out_dtypes for {num_outputs} outputs")
    return JitFunction(Function(functor, out_dtypes=dtypes, fallback=fallback), defaults)


@called_in_c
class JitFunction(Replayer):
    """A functor as a function of tensors. Made by ``jit_fn``; immutable; threads may share it.

    Attributes:
        function: the functor with its typing rules.
        defaults: default values of the scalars that have one.
    """

    def __init__(self, function: Function, defaults: Mapping[str, Number]) -> None:
        self.function = function
        self.defaults = dict(defaults)
        # torch.fx writes calls by these names.
        self.__name__ = self.__qualname__ = function.functor.entry
        self.__module__ = "fuser.functors"
        self.__doc__ = f"{function.functor.signature()}\n\n{function.functor.source}"
        # Names of the scalars, in the order of the declaration.
        self.scalar_names = tuple(parameter.name for parameter in function.functor.scalars)
        # Spec by number of tensors: trailing tensors with a C++ default may be left out.
        self._specs: dict[int, KernelSpec] = {}
        super().__init__(self.scalar_names, tuple(map(defaults.get, self.scalar_names)))
        if "functor" in config.dump:
            dump("functor", function.functor.source)

    def __call__(self, *tensors: Any, out: Any = None, **scalars: Any) -> Any:
        """Apply the functor elementwise.

        Args:
            *tensors: tensors, 0-dim CPU tensors and Python numbers; broadcast and promoted as in torch.
            out: tensor (or one per output) to write to; may be an input itself.
            **scalars: values of the functor's scalars, by name.

        Returns:
            A tensor, or a tuple of tensors for several outputs.

        Raises:
            ArgumentError: too few or too many tensors, or an unknown, missing or ill-typed scalar.
            ShapeError, DeviceError: the tensors do not broadcast, or live on two devices.
            FunctorError, CompileError: the text is wrong; shows the user's own line.
            GradientError: an input requires grad and there is no derivative.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._call_operator(tensors, out, scalars)
        result = self.launch(tensors, scalars, out)
        return self.call_anew(*tensors, out=out, **scalars) if result is None else result

    def call_anew(self, *tensors: Any, out: Any = None, **scalars: Any) -> Any:
        """Serve a call that is not like an earlier one; as ``__call__``."""
        if torch.overrides.has_torch_function(tensors) or _any_has_torch_function(scalars):
            return torch.overrides.handle_torch_function(
                self, (*tensors, *scalars.values()), *tensors, **({} if out is None else {"out": out}), **scalars
            )
        inputs = [*tensors, *self.bind_scalars(scalars).values()]
        outs = None if out is None else tuple(out) if isinstance(out, tuple | list) else (out,)
        results = run_and_record(self.spec(len(tensors)), inputs, self, tensors, scalars, outs)
        return results[0] if len(results) == 1 else tuple(results)

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

    def check_count(self, count: int) -> None:
        """Raise ArgumentError unless the functor can be applied to ``count`` tensors."""
        if not self.function.accepts(count) or count == 0:
            functor = self.function.functor
            wanted = len(functor.tensors)
            raise ArgumentError(f"{functor.signature()} takes {wanted} tensor{'s' if wanted != 1 else ''}, got {count}")

    def bind_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of every scalar in the order of the declaration, defaults filled in.

        Raises:
            ArgumentError: an unknown or missing scalar, or one that is no number.
        """
        for name in scalars:
            if name not in self.scalar_names:
                raise ArgumentError(f"{self.function.functor.signature()} has no scalar {name!r}")
        values = {}
        for name in self.scalar_names:
            value = scalars.get(name, self.defaults.get(name))
            if value is None:
                raise ArgumentError(f"{self.function.functor.signature()} needs the scalar {name!r}")
            if type(value) not in (float, int, bool, complex):
                _check_scalar(self.function.functor, name, value)
            values[name] = value
        return values

    def check(self, *, device: str | None = None) -> None:
        """Parse the text and compile it for float32 now, without launching.

        Warns where the text has no eager version, naming line, column and construct: the functor runs fused, and
        fails where that is not possible.

        Args:
            device: "cuda" or "cpu"; the default is the GPU where there is one.

        Raises:
            FunctorError: the text does not parse (line, column, caret).
            CompileError: it does not compile; points at the user's own line.
            CompilerNotFoundError: there is no compiler for the device.
        """
        count = len(self.function.functor.tensors)
        scalars = [self.defaults.get(name, 1.0) for name in self.scalar_names]
        sample = [torch.empty(2, 2, device="meta") for _ in range(count)]
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        spec = self.spec(count)
        for name, obstacle in spec.fallback.obstacles:
            warnings.warn(f"{name!r} has no eager version: {obstacle}", stacklevel=2)
        warm_up(spec, [*sample, *scalars], where, allow_fallback=False)

    def _call_operator(self, tensors: tuple[Any, ...], out: Any, scalars: dict[str, Any]) -> Any:
        # Traced by Dynamo: one call of the operator, so that the graph does not break.
        needs_grad = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
        if needs_grad and out is None and self.function.fallback is not None:
            return self.function.fallback(*tensors, **{**self.defaults, **scalars})
        values = [*tensors, *(scalars[name] if name in scalars else self.defaults[name] for name in self.scalar_names)]
        results = torch.ops.fuser.run(self._key(len(tensors)), *split_inputs(values))
        if out is not None:
            outs = [out] if isinstance(out, torch.Tensor) else list(out)
            for tensor, result in zip(outs, results, strict=True):
                tensor.copy_(result)
            return out
        return results[0] if len(results) == 1 else tuple(results)

    def _key(self, count: int) -> str:
        return str(self.spec(count).key)

    # What torch.compiler.assume_constant_result sets; the decorator itself would import all of Dynamo.
    _key._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _group(self, count: int) -> FusionGroup:
        functor = self.function.functor
        builder = GroupBuilder()
        tensors = [builder.add_input(parameter.name) for parameter in functor.tensors[:count]]
        scalars = [builder.add_input(name, is_scalar=True) for name in self.scalar_names]
        return builder.build(builder.apply(self.function, tensors, scalars, functor.entry))

    def __reduce__(self) -> tuple[Any, ...]:
        return JitFunction, (self.function, self.defaults)

    def __repr__(self) -> str:
        return f"<fuser.JitFunction {self.function.functor.signature()}>"


def _any_has_torch_function(scalars: Mapping[str, Any]) -> bool:
    return any(type(value) not in (float, int, bool, complex) for value in scalars.values()) and (
        torch.overrides.has_torch_function(tuple(scalars.values()))
    )


def _check_scalar(functor: Functor, name: str, value: Any) -> None:
    # Symbolic numbers and FX nodes stand for numbers.
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | torch.fx.Node | torch.fx.Proxy):
        return
    if not isinstance(value, bool | int | float | complex):
        raise ArgumentError(
            f"{functor.signature()}: scalar {name!r} must be a Python number, got {type(value).__name__}"
        )
