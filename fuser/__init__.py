"""Chain jiterator functors and torch's pointwise ops into one kernel launch, on CUDA and on the CPU."""

from typing import TYPE_CHECKING, Any

from fuser import autodiff as _autodiff  # noqa: F401 - where route.py and torch send what is differentiated
from fuser import errors, library
from fuser._version import __version__
from fuser.application import Application, Input
from fuser.config import config
from fuser.counters import reset_stats, stats
from fuser.disk_cache import load_cache, save_cache
from fuser.function import Function
from fuser.graph import FusionGroup, GroupBuilder
from fuser.jit_function import JitFunction
from fuser.jiterator import create_jit_fn, create_multi_output_jit_fn, jit_fn
from fuser.late import loading as _loading
from fuser.late import when_imported as _when_imported

if TYPE_CHECKING:
    from fuser import fx
    from fuser._later import (
        Dim,
        FusedFunction,
        FusedModule,
        ReductionFunction,
        autotune,
        can_fuse_on_cpu,
        can_fuse_on_gpu,
        clear_failures,
        create_reduction_fn,
        debug_get_fused_kernel_code,
        debug_launch_graph,
        differentiable,
        explain,
        foreach,
        fuse,
        n_compiled_kernels,
        override_can_fuse_on_cpu,
        override_can_fuse_on_gpu,
        register_fusion,
        run_fusion,
        warmup,
    )

__all__ = [
    "Application",
    "Dim",
    "Function",
    "FusedFunction",
    "FusedModule",
    "FusionGroup",
    "GroupBuilder",
    "Input",
    "JitFunction",
    "ReductionFunction",
    "__version__",
    "autotune",
    "can_fuse_on_cpu",
    "can_fuse_on_gpu",
    "clear_failures",
    "config",
    "create_jit_fn",
    "create_multi_output_jit_fn",
    "create_reduction_fn",
    "debug_get_fused_kernel_code",
    "debug_launch_graph",
    "differentiable",
    "errors",
    "explain",
    "foreach",
    "fuse",
    "fx",
    "jit_fn",
    "library",
    "load_cache",
    "n_compiled_kernels",
    "override_can_fuse_on_cpu",
    "override_can_fuse_on_gpu",
    "register_fusion",
    "reset_stats",
    "run_fusion",
    "save_cache",
    "stats",
    "warmup",
]


def _count_flops() -> None:
    from fuser import flops  # noqa: F401, PLC0415


def _shard() -> None:
    from fuser import sharding  # noqa: F401, PLC0415


_when_imported("torch.utils.flop_counter", _count_flops)
_when_imported("torch.distributed.tensor", _shard)


if not TYPE_CHECKING:  # mypy then knows that there are no others

    def __getattr__(name: str) -> Any:
        # What the calls of functors do not need is loaded when it is first named (PEP 562).
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with _loading():
            from fuser import _later  # noqa: PLC0415

        value = globals()[name] = getattr(_later, name)
        return value


def __dir__() -> list[str]:
    return __all__
