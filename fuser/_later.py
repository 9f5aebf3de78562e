"""Public names that calls of functors do not need. The first one loads all: see Note [Loading later] in late.py."""

import fuser.fx as fx
from fuser.debug import debug_get_fused_kernel_code, debug_launch_graph, explain
from fuser.fx.fused_module import FusedModule, fuse
from fuser.fx.trace import FusedFunction
from fuser.fx.warmup import warmup
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
from fuser.over_lists import foreach
from fuser.own_derivatives import differentiable
from fuser.reduction import ReductionFunction, create_reduction_fn
from fuser.warming.dims import Dim

__all__ = [
    "Dim",
    "FusedFunction",
    "FusedModule",
    "ReductionFunction",
    "autotune",
    "can_fuse_on_cpu",
    "can_fuse_on_gpu",
    "clear_failures",
    "create_reduction_fn",
    "debug_get_fused_kernel_code",
    "debug_launch_graph",
    "differentiable",
    "explain",
    "foreach",
    "fuse",
    "fx",
    "n_compiled_kernels",
    "override_can_fuse_on_cpu",
    "override_can_fuse_on_gpu",
    "register_fusion",
    "run_fusion",
    "warmup",
]
