"""The peers with arrays of their own: CuPy, JAX, numexpr and Numba. Inputs are shared with torch, not copied."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.chains import ALPHA, CPP_OPS, Chain, Ops, print_expression, text_ops
from benchmarks.peers.base import Absent, Peer, Unsupported, import_library


class Cupy(Peer):
    """What the two CuPy peers share. Its default stream and torch's are the same one."""

    devices = ("cuda",)
    # Its memory pool asks the driver for memory while a stream is captured.
    capturable = False

    @override
    def load(self) -> None:
        self.cp: Any = import_library("cupy")
        if not self.cp.cuda.is_available():
            raise Absent("CuPy finds no CUDA device")

    @override
    def to_tensor(self, result: Any) -> Tensor:
        return torch.utils.dlpack.from_dlpack(result)


class CupyElementwise(Cupy):
    """The chain written by hand as one ``cupy.ElementwiseKernel``."""

    name = "cupy_elementwise"
    label = "CuPy ElementwiseKernel"

    @override
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        parameters = ", ".join(f"T {name}" for name in chain.names)
        body = f"out = {print_expression(chain, CPP_OPS)}"
        kernel = self.cp.ElementwiseKernel(parameters, "T out", body, f"chain_{chain.name}")
        return partial(kernel, *map(self.cp.from_dlpack, inputs))


class CupyFuse(Cupy):
    """The chain over CuPy's own functions, under ``cupy.fuse``."""

    name = "cupy_fuse"
    label = "cupy.fuse"

    @override
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        ops = Ops(
            axpy=lambda x, y: ALPHA * x + y,
            mul=operator.mul,
            add=operator.add,
            sigmoid=lambda x: 1 / (1 + self.cp.exp(-x)),
            tanh=self.cp.tanh,
        )
        return partial(self.cp.fuse(chain.compose(ops)), *map(self.cp.from_dlpack, inputs))


class Jax(Peer):
    """The chain under ``jax.jit``. It has streams of its own, so it is timed on the wall clock."""

    name = "jax"
    label = "JAX"
    on_torch_stream = False

    @override
    def load(self) -> None:
        # Read when the device starts: torch needs the memory too.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self.jax: Any = import_library("jax")
        try:
            self.jax.devices(self.device.type)
        except RuntimeError as error:
            raise Absent(f"JAX finds no {self.device.type} device: {error}") from error

    @override
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        ops = Ops(
            axpy=lambda x, y: ALPHA * x + y,
            mul=operator.mul,
            add=operator.add,
            sigmoid=self.jax.nn.sigmoid,
            tanh=self.jax.numpy.tanh,
        )
        if not set(chain.layouts) <= set("fmrctn"):
            raise Unsupported("JAX has no strided arrays")
        run = chain.compose(ops)

        # JAX takes row-major arrays only, so transposing is a part of its chain.
        def with_views(*arrays: Any) -> Any:
            return run(*(a.T if layout == "t" else a for a, layout in zip(arrays, chain.layouts, strict=True)))

        stored = (x.t() if layout == "t" else x for x, layout in zip(inputs, chain.layouts, strict=True))
        return partial(self.jax.jit(with_views), *map(self.jax.dlpack.from_dlpack, stored))

    @override
    def to_tensor(self, result: Any) -> Tensor:
        return torch.utils.dlpack.from_dlpack(result)

    @override
    def wait(self, result: Any) -> None:
        result.block_until_ready()


class Numexpr(Peer):
    """The chain as a numexpr expression."""

    name = "numexpr"
    label = "numexpr"
    devices = ("cpu",)

    @override
    def load(self) -> None:
        self.numexpr: Any = import_library("numexpr")
        self.numexpr.set_num_threads(torch.get_num_threads())

    @override
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        refuse_bfloat16(chain, self.label)
        # Whole numbers: a fractional constant would turn the expression into float64.
        ops = text_ops("(1 / (1 + exp(-{0})))", "tanh({0})", str(int(ALPHA)))
        arrays = dict(zip(chain.names, (x.numpy() for x in inputs), strict=True))
        return partial(self.numexpr.evaluate, print_expression(chain, ops), arrays)

    @override
    def to_tensor(self, result: Any) -> Tensor:
        return torch.from_numpy(result)


class Numba(Peer):
    """The chain as a Numba ufunc over all threads."""

    name = "numba"
    label = "Numba"
    devices = ("cpu",)

    @override
    def load(self) -> None:
        self.numba: Any = import_library("numba")
        self.numba.set_num_threads(min(torch.get_num_threads(), self.numba.config.NUMBA_NUM_THREADS))

    @override
    def build(self, chain: Chain, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        refuse_bfloat16(chain, self.label)
        ops = text_ops("(ONE / (ONE + math.exp(-{0})))", "math.tanh({0})", "ALPHA")
        text = f"lambda {', '.join(chain.names)}: {print_expression(chain, ops)}"
        np = import_library("numpy")
        function = eval(text, {"math": math, "ONE": np.float32(1), "ALPHA": np.float32(ALPHA)})
        float32 = self.numba.float32
        ufunc = self.numba.vectorize([float32(*[float32] * len(inputs))], target="parallel")(function)
        return partial(ufunc, *(x.numpy() for x in inputs))

    @override
    def to_tensor(self, result: Any) -> Tensor:
        return torch.from_numpy(result)


def refuse_bfloat16(chain: Chain, label: str) -> None:
    """Raise Unsupported for a peer that computes through NumPy's own dtypes."""
    if chain.dtype == torch.bfloat16:
        raise Unsupported(f"{label} has no bfloat16")
