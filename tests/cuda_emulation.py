"""Runs the loops of CUDA kernels with reductions on the CPU: each thread of a block is a fiber.

The text is the one that a GPU gets, with the CPU dialect's prelude in place of the functions of CUDA: what is tested is
which thread reads, combines and writes what, and where threads wait for each other. Fibers run in turn until they wait,
in ascending or descending order; what holds in both hardly depends on a barrier that is missing.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fuser import planner
from fuser.access import VECTOR_BYTES
from fuser.codegen import build_source
from fuser.compiler import register
from fuser.cpu.prelude import emit_prelude
from fuser.cuda.dialect import DIALECT
from fuser.expanded import expand_in_order
from fuser.fused_kernel import ArgumentPacker
from fuser.geometry import launch_shape, workspace_bytes
from fuser.graph import FusionGroup
from fuser.kernel_source import KernelSource
from fuser.kernel_spec import infer_layouts
from fuser.prelude import load_blocks
from fuser.route import run
from fuser.tensor_desc import describe, value_layouts

__all__ = ["run_emulated"]

# Before the kernel.
_SHIM = """
#undef __shared__
#define __shared__ static
#define __grid_constant__
#define memcpy __builtin_memcpy
#define __builtin_assume(condition)
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct fuser_dim { unsigned x; };
extern "C" fuser_dim threadIdx, blockIdx, gridDim;
extern "C" void __syncthreads();
extern "C" void __assertfail(const char*, const char*, unsigned int, const char*, size_t) { __builtin_trap(); }
extern "C" unsigned fuser_shuffle(unsigned value, int mask);
static inline unsigned __shfl_xor_sync(unsigned, unsigned value, int mask) { return fuser_shuffle(value, mask); }
extern "C" unsigned fuser_shuffle_from(unsigned value, int lane, int width);
static inline unsigned __shfl_sync(unsigned, unsigned value, int lane, int width = 32) {
  return fuser_shuffle_from(value, lane, width);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return ((unsigned long long)high << 32 | low) >> (by & 31);
}
template <typename C> static inline C fuser_cross(C v, long long) { return v; }
static inline float fuser_brief_exp(float v) { return __builtin_expf(v); }
static inline void __threadfence() {}
static inline float __frcp_rn(float v) { return 1.0f / v; }
static inline float fuser_inverse_of_count(float v) { return 1.0f / v; }
static inline float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double __fma_rn(double x, double y, double z) { return __builtin_fma(x, y, z); }
static inline unsigned fuser_bits_of(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
static inline float fuser_float_of(unsigned u) { float v; memcpy(&v, &u, 4); return v; }
// The host's prelude has them for some types.
#define __float_as_uint fuser_bits_of
#define __uint_as_float fuser_float_of
static inline unsigned atomicAdd(unsigned* to, unsigned by) { const unsigned was = *to; *to += by; return was; }
static inline unsigned atomicExch(unsigned* to, unsigned by) { const unsigned was = *to; *to = by; return was; }
static inline unsigned __ldcg(const unsigned* from) { return *from; }
static inline void __stcg(unsigned* to, unsigned value) { *to = value; }
extern "C" unsigned fuser_cluster;
extern "C" void fuser_arrive();
extern "C" void fuser_wait();
static size_t fuser_shared_bytes;
static inline unsigned fuser_rank() { return blockIdx.x % fuser_cluster; }
static inline void fuser_expect(unsigned long long* box, unsigned bytes) { *box = 0; }
template <int N> static inline void fuser_tell(
    unsigned* to, const unsigned long long*, unsigned rank, const unsigned (&words)[N]) {
  const long blocks = static_cast<long>(rank) - static_cast<long>(fuser_rank());
  memcpy(reinterpret_cast<char*>(to) + blocks * static_cast<long>(fuser_shared_bytes), words, sizeof(words));
}
static inline void fuser_await(const unsigned long long*) { fuser_arrive(); fuser_wait(); }
template <typename S> struct fuser_pairs {
  template <bool is_larger, bool keeps_nan> static unsigned extreme(unsigned a, unsigned b) {
    S own[2], other[2];
    memcpy(own, &a, 4), memcpy(other, &b, 4);
    for (int i = 0; i < 2; ++i) {
      const float first = fuser_to_compute(own[i]), second = fuser_to_compute(other[i]);
      bool is_other = first != first || (is_larger ? second > first : second < first);
      if (keeps_nan) is_other = second != second || second > first;
      if (is_other) own[i] = other[i];
    }
    memcpy(&a, own, 4);
    return a;
  }
};
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
"""
# Dynamic shared memory: of the most that a block has, for each block of a cluster.
_HELD = (
    "extern __shared__ uint4 fuser_held[];",
    "static uint4 fuser_held_of[16][232448 / 16];\n  uint4* const fuser_held = fuser_held_of[fuser_rank()];",
)
# Shared memory of each block of a cluster; other blocks write to the one that has no other name.
_SHARED = (
    re.compile(r"__shared__ unsigned char (shared\w*)(.*);"),
    lambda found: (
        f"__shared__ unsigned char {found[1]}_of[16]{found[2]};\n  auto& {found[1]} = {found[1]}_of[fuser_rank()];"
        + "\n  fuser_shared_bytes = sizeof(shared);" * (found[1] == "shared")
    ),
)
# After it.
_ENTRY = 'extern "C" void fuser_entry(const fuser_args* a) { fuser_kernel(*a); }'

# The threads of a block, or of the blocks of a cluster.
_FIBERS = """
#include <setjmp.h>
#include <stdlib.h>
#include <ucontext.h>
struct fuser_dim { unsigned x; };
struct barrier { int arrived; unsigned generation; };
struct fiber { ucontext_t start; jmp_buf at; bool is_started, is_done; unsigned seen; char* stack; };
static fiber fibers[8192];
static jmp_buf scheduler;
static barrier cluster, blocks[16], warps[256];
static unsigned values[8192], base;
static int count, total, current;
static const void* arguments;
static void (*kernel)(const void*);
extern "C" {
fuser_dim threadIdx, blockIdx, gridDim;
unsigned fuser_cluster;
static void resume() {
  threadIdx.x = current % count;
  blockIdx.x = base + current / count;
}
static void yield() {
  if (!_setjmp(fibers[current].at)) _longjmp(scheduler, 1);
  resume();
}
static unsigned arrive(barrier& on, int size) {
  const unsigned before = on.generation;
  if (++on.arrived == size) { on.arrived = 0; ++on.generation; }
  return before;
}
static void wait(barrier& on, int size) {
  const unsigned before = arrive(on, size);
  while (on.generation == before) yield();
}
void __syncthreads() { wait(blocks[current / count], count); }
void fuser_arrive() { fibers[current].seen = arrive(cluster, total); }
void fuser_wait() { while (cluster.generation == fibers[current].seen) yield(); }
static unsigned exchange(unsigned value, int from) {
  // ``from``: the thread of the block whose value this one gets.
  const int own = current % count, first = current - own, left = count - own / 32 * 32, lanes = left < 32 ? left : 32;
  barrier& warp = warps[first / count * ((count + 31) / 32) + own / 32];
  values[current] = value;
  wait(warp, lanes);
  const unsigned other = values[first + from];
  wait(warp, lanes);
  return other;
}
unsigned fuser_shuffle(unsigned value, int mask) { return exchange(value, current % count ^ mask); }
unsigned fuser_shuffle_from(unsigned value, int lane, int width) {
  const int own = current % count;
  return exchange(value, own - own % 32 % width + lane);
}
static void begin() {
  kernel(arguments);
  fibers[current].is_done = true;
  _longjmp(scheduler, 1);
}
int fuser_emulate(
    void (*entry)(const void*), const void* a, unsigned grid, int size, int blocks, int descending, int in_order) {
  enum { STACK = 262144, MOST_ROUNDS = 1000000 };
  kernel = entry;
  arguments = a;
  gridDim.x = grid;
  count = size;
  fuser_cluster = blocks;
  total = size = size * blocks;
  for (int i = 0; i < size; ++i) if (!fibers[i].stack) fibers[i].stack = static_cast<char*>(malloc(STACK));
  for (unsigned b = 0; b < grid; b += blocks) {
    base = descending && !in_order ? grid - blocks - b : b;
    for (int i = 0; i < size; ++i) fibers[i].is_started = fibers[i].is_done = false;
    volatile int left = size, rounds = 0, i;
    for (; left; ++rounds) {
      if (rounds > MOST_ROUNDS) return 1;
      left = 0;
      for (i = 0; i < size; ++i) {
        current = descending ? size - 1 - i : i;
        if (fibers[current].is_done) continue;
        resume();
        if (!_setjmp(scheduler)) {
          fiber& next = fibers[current];
          if (next.is_started) _longjmp(next.at, 1);
          next.is_started = true;
          getcontext(&next.start);
          next.start.uc_stack.ss_sp = next.stack;
          next.start.uc_stack.ss_size = STACK;
          makecontext(&next.start, begin, 0);
          setcontext(&next.start);
        }
        left = left + !fibers[current].is_done;
      }
    }
  }
  return 0;
}
}
"""

# Kernels have functions of the same names: each calls its own.
FLAGS = (
    "-O1 -std=c++17 -shared -fPIC -w -fno-strict-aliasing -ffp-contract=off -fno-math-errno -march=native "
    "-Wl,-Bsymbolic -fno-gnu-unique -U_FORTIFY_SOURCE -fsanitize=alignment -fsanitize-undefined-trap-on-error"
).split()


def run_emulated(
    group: FusionGroup,
    inputs: Sequence[Any],
    *,
    descending: bool = False,
    largest_grid: int = 0,
    overtakes: bool = False,
    over: Mapping[int, int] | None = None,
    all_kernels: bool = False,
    **tuning: Any,
) -> list[torch.Tensor]:
    """Run a group's CUDA kernels on CPU tensors.

    Args:
        group: a group with reductions.
        inputs: CPU tensors and numbers.
        descending: the order in which threads take their turns, and blocks, unless they wait for those before them.
        largest_grid: at most so many blocks.
        overtakes: whether of two launches that run side by side the second one ends before the first one begins.
        over: inputs that results are written over, by the number of the result.
        all_kernels: also those without reductions, which else run as the CPU's.
        tuning: fields of Tuning to set.
    """
    device, over = torch.device("cuda", 0), over or {}
    spec = register(group)
    described = [describe(item) for item in inputs]
    described = [
        item._replace(device=device, is_aligned=given.data_ptr() % VECTOR_BYTES == 0) if item.device else item
        for item, given in zip(described, inputs, strict=True)
    ]
    layouts = infer_layouts(spec.group, value_layouts(described))
    steps, orders = expand_in_order(spec, described, device, layouts)
    values = steps.values
    parts = planner._cut_and_order(steps, steps.lay_out(steps.outputs), device, orders)
    if overtakes:
        for slot in [slot for slot, part in enumerate(parts) if part.args.tuning.follows]:
            parts[slot - 1 : slot + 1] = [parts[slot], parts[slot - 1]]
    known: dict[int, Any] = {}
    for number, (slot, view) in enumerate(steps.expansion.inputs):
        known[number] = inputs[slot]
        if view is not None:
            known[number] = inputs[slot].as_strided(*view.apply(inputs[slot].shape, inputs[slot].stride()))
    for part in parts:
        if part.args.rows is None and not all_kernels:
            # Of a group that is cut after its reductions.
            given = [known[value] for value in part.inputs]
            made = run(part.spec, given)
            for target, result in zip(part.targets, made, strict=True):
                if target in over:
                    known[over[target]].copy_(result)
            known |= zip(part.outputs, made, strict=True)
            continue
        args = part.args._replace(tuning=part.args.tuning._replace(**tuning))
        source = build_source(part.spec.group, args, DIALECT._replace(emit_prelude=_emit_prelude))
        made = [_poisoned(values[value].desc) for value in part.outputs]
        for slot, target in enumerate(part.targets):
            if target in over:
                made[slot] = inputs[over[target]].as_strided(made[slot].shape, made[slot].stride())
        known |= zip(part.outputs, made, strict=True)
        if part.space.is_empty:
            continue
        operands = [made[item.index] if item.is_output else known[part.inputs[item.index]] for item in source.operands]
        numbers = [known[part.inputs[index]] for index, _ in source.numbers]
        addresses = [item.data_ptr() for item in operands]
        own_bytes = workspace_bytes(source, part.space.sizes)
        workspace = torch.zeros(own_bytes + 256, dtype=torch.uint8)
        if source.has_workspace:
            addresses.insert(len(made), workspace.data_ptr())
        packed = ArgumentPacker(source, part.space).pack(addresses, numbers)
        launch = launch_shape(source, part.space)
        grid = min(launch.grid, largest_grid or launch.grid)
        _launch(source, packed, grid, descending)
        assert not workspace[own_bytes:].any(), "blocks write beyond their workspace"
    made = [known[value] for value in steps.group.outputs]
    return [item.as_strided(own.shape, own.strides) for item, own in zip(made, steps.outputs, strict=True)]


def _poisoned(desc: Any) -> torch.Tensor:
    made = torch.empty_strided(desc.shape, desc.strides, dtype=desc.dtype)
    torch.as_strided(made, (made.untyped_storage().nbytes() // made.itemsize,), (1,)).view(torch.uint8).fill_(0x5A)
    return made


def _emit_prelude(names: frozenset[str], features: frozenset[str]) -> str:
    # How a GPU divides, but for the first inverse.
    (division,) = (block.text for block in load_blocks("cuda_math.h") if "fuser_by" in block.names)
    division = re.sub(r"asm\(.*\);", "inverse = 1.0f / by;", division)
    blocks = [
        block
        for file in ("cuda_access.h", "cuda_rows.h", "cuda_orders.h", "cuda_scans.h")
        for block in load_blocks(file)
    ]
    # One name is in the shim, whoever asks for it.
    own = emit_prelude(names - {"__fmul_rn"}, features)
    for name in ("vector", "place"):
        # Both dialects have one.
        own = own.replace(f"fuser_{name}", f"fuser_host_{name}")
    return "\n".join([own, _SHIM, division, *(block.text for block in blocks if block.features <= features), ""])


def _launch(source: KernelSource, packed: bytes, grid: int, descending: bool) -> None:
    tuning = source.tuning
    text = re.sub(*_SHARED, source.text) if tuning.cluster > 1 else source.text
    text = re.sub(r'extern "C" __global__ void (__cluster_dims__\(.*?\))?', "static void ", text)
    fibers = _build(_FIBERS)
    kernel = _build(text.replace(*_HELD) + _ENTRY)
    # Blocks that have a batch each wait for those before them.
    rows = source.rows
    in_order = rows is not None and bool(tuning.piece) and rows.order is None and not rows.is_across
    status = fibers.fuser_emulate(kernel.fuser_entry, packed, grid, tuning.block, tuning.cluster, descending, in_order)
    assert status == 0, "threads wait for ever"


@cache
def _build(text: str) -> ctypes.CDLL:
    folder = Path(tempfile.gettempdir()) / "fuser-emulation"
    folder.mkdir(exist_ok=True)
    library = folder / f"{hashlib.sha256((text + str(FLAGS)).encode()).hexdigest()}.so"
    if not library.exists():
        # Processes may build the same one.
        with tempfile.TemporaryDirectory(dir=folder) as own:
            source, made = Path(own, "kernel.cpp"), Path(own, "kernel.so")
            source.write_text(text)
            subprocess.run(["g++", *FLAGS, str(source), "-o", str(made)], check=True)
            made.replace(library)
    return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
