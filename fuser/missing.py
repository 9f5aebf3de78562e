"""A kernel that is missing where none may be compiled: the warm-up that covers it."""

from collections.abc import Sequence

from fuser.function import Isolation
from fuser.graph import FusionGroup
from fuser.tensor_desc import TensorDesc

__all__ = ["name_warmup"]

_RANGES = "with dynamic_shapes= also other sizes"


def name_warmup(group: FusionGroup, inputs: Sequence[TensorDesc], out: Sequence[TensorDesc]) -> str:
    """Return a sentence with the call that compiles what a call of a group lacks.

    Of a functor's own call it can be run as it stands. Of other groups only their tensors are known here, not the
    function, the module or the model that they are part of.
    """
    samples = [_write_sample(item) for item in inputs]
    written = ", ".join(map(_write_sample, out))
    into = [f"out=({written})" if len(out) > 1 else f"out={written}"] if out else []
    if any(item.function.isolation is not Isolation.FULL for item in group.applications):
        return f"a warm-up with backward=True covers it; among the tensors of the gradient: {', '.join(samples)}"
    # An index is part of the functor that receives it, and no argument of its calls.
    application, *others = [item for item in group.applications if item.function.op != "index"] or group.applications
    function = application.function
    if others or function.op is not None:
        return f"the warm-up of what calls it covers it, here with {', '.join(samples + into)}; {_RANGES}"
    given = [samples[value] for value in application.tensors if value < len(samples)]
    names = (parameter.name for parameter in function.scalars)
    given += [f"{name}={samples[value]}" for name, value in zip(names, application.scalars, strict=True)]
    if function.reduction is not None:
        given += [f"dim={function.reduction.dims}", f"keepdim={function.reduction.keepdim}"]
    return f"{function.name}.warmup({', '.join(given + into)}) covers it, {_RANGES}"


def _write_sample(item: TensorDesc) -> str:
    if item.dtype is None:
        return {bool: "True", int: "1", float: "1.0", complex: "1j"}[item.kind]
    made = f"torch.empty_strided({item.shape}, {item.strides}, dtype={item.dtype}"
    return f"{made}, device={str(item.device)!r})"
