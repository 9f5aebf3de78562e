"""When fuser itself fails while it plans a call: a script that shows it, and eager torch for the user."""

from __future__ import annotations

import shlex
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from fuser._version import __version__
from fuser.config import config
from fuser.errors import FuserError, UnsupportedError
from fuser.kernel_spec import KernelSpec
from fuser.process import is_of_signal_handler
from fuser.tensor_desc import TensorDesc

__all__ = ["MISTAKES", "is_internal", "report"]


class MistakeError(UnsupportedError):
    """Fuser itself failed."""


# What a mistake in a program raises.
MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)

# The reason, by group and line: calls of other shapes would write scripts without end, and each would be warned of.
_reported: dict[tuple[int, str, int | None, str | None], str] = {}


def is_internal(error: Exception) -> bool:
    """Whether an exception, caught around code that calls nothing of the user's, is a mistake of fuser's."""
    if config.internal_errors == "raise" or isinstance(error, FuserError):
        return False
    return isinstance(error, MISTAKES) and not is_of_signal_handler(error)


def report(
    spec: KernelSpec, inputs: Sequence[TensorDesc], out: Sequence[TensorDesc], error: Exception
) -> UnsupportedError:
    """Write a script that makes the call again, and return the reason why the call is not fused.

    Of a mistake of one line's there is one script for each group.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    key = (spec.key, place.filename, place.lineno, config.dump)
    if key not in _reported:
        _reported[key] = _write_script(spec, inputs, out, error)
    return MistakeError(_reported[key])


def _write_script(spec: KernelSpec, inputs: Sequence[TensorDesc], out: Sequence[TensorDesc], error: Exception) -> str:
    what = f"{type(error).__name__}: {error}".strip(": ")
    text = _SCRIPT.format(
        version=__version__,
        torch=torch.__version__,
        trace="".join(traceback.format_exception(error)).replace('"""', "'''").replace("\\", "/"),
        group=spec.text,
        settings="\n".join(f"fuser.config.{name} = {value!r}" for name, value in config.code_key()),
        default_dtype=torch.get_default_dtype(),
        inputs=_rebuild_all(inputs),
        out=_rebuild_all(out),
    )
    try:
        folder = Path(config.dump or tempfile.mkdtemp(prefix="fuser-report-")).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / f"reproduce-{spec.key:016x}.py"
        # Names of files in the traceback may have bytes that are no UTF-8.
        script.write_text(text, encoding="utf-8", errors="backslashreplace")
        where = f"python {shlex.quote(str(script))} shows it: please report it with that file"
    except (OSError, RuntimeError) as problem:
        if is_of_signal_handler(problem):
            raise
        where = f"no script shows it: {problem}"
    return f"fuser failed ({what}); {where}"


def _rebuild_all(items: Sequence[TensorDesc]) -> str:
    return "\n".join(f"    {_rebuild(item)}," for item in items)


def _rebuild(item: TensorDesc) -> str:
    if item.dtype is None:
        return {bool: "True", int: "3", float: "1.5", complex: "1.5 + 0.5j"}[item.kind]
    return f"tensor({list(item.shape)}, {list(item.strides)}, {item.dtype}, {str(item.device)!r}, {item.is_aligned})"


_SCRIPT = '''"""A call with which fuser {version} failed, with torch {torch}. Inputs are random.

{trace}"""

import torch

import fuser


def tensor(shape, strides, dtype, device, is_aligned):
    size = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    begin = 0 if is_aligned else 1
    # make_tensor does not know all of float8.
    drawn = torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else dtype
    flat = torch.testing.make_tensor(max(size, 0) + begin, dtype=drawn, device=device).to(dtype)
    return flat.as_strided(shape, strides, begin)


group = fuser.FusionGroup.from_json({group!r})
inputs = [
{inputs}
]
# What it writes to, where it was told.
out = [
{out}
]
fuser.config.internal_errors = "raise"
{settings}
torch.set_default_dtype({default_dtype})
print(group)
print(fuser.fx.FusionModule(group).run(*inputs, out=out[0] if len(out) == 1 else tuple(out) or None))
'''
