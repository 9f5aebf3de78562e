"""Chain jiterator functors and torch's pointwise ops into one kernel launch, on CUDA and on the CPU."""

from fuser import errors, fx, library
from fuser._version import __version__
from fuser.application import Application, Input
from fuser.autodiff import autograd as _autograd  # noqa: F401 - where route.py sends what is differentiated
from fuser.config import config
from fuser.counters import reset_stats, stats
from fuser.debug import debug_get_fused_kernel_code, debug_launch_graph, explain
from fuser.differentiable import differentiable
from fuser.disk_cache import load_cache, save_cache
from fuser.foreach import foreach
from fuser.function import Function
from fuser.fx.fused_module import FusedModule, fuse
from fuser.fx.trace import FusedFunction
from fuser.fx.warmup import warmup
from fuser.graph import FusionGroup, GroupBuilder
from fuser.interface import (
    autotune,
    can_fuse_on_cpu,
    can_fuse_on_gpu,
    clear_failures,
    n_compiled_kernels,
    override_can_fuse_on_cpu,
    override_can_fuse_on_gpu,
    register_fusion,
    run_fusion,
)
from fuser.jit_function import JitFunction
from fuser.jiterator import create_jit_fn, create_multi_output_jit_fn, jit_fn
from fuser.late import when_imported as _when_imported
from fuser.reduction import ReductionFunction, create_reduction_fn
from fuser.warming.dims import Dim

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


def __dir__() -> list[str]:
    return __all__
