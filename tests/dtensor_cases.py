"""Calls on DTensors, for the ranks of one job; tests/test_dtensor.py starts it.

``python dtensor_cases.py DEVICE SIZE FOLDER quick`` (or ``all``) runs the cases.
Each rank writes a JSON file with the traceback of each case, empty where it passed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard

import fuser
from fuser.fx.backend import fuser_backend
from fuser.sharding import _shardings

Case = Callable[[DeviceMesh], None]
CASES: dict[str, Case] = {}
SLOW: dict[str, Case] = {}

# Torch 2.11 has another taste in which of two shards stays, and sums what is partial beside what is whole.
PLACES_AS_TORCH = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"
# How many random shapes of each dtype, and of the ways that a compiled function is called.
COUNT, WAYS = [3], [1]


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def slow(function: Case) -> Case:
    SLOW[function.__name__] = function
    return function


ADD = fuser.create_jit_fn("template <typename T> T plus(T x, T y) { return x + y; }")
MUL = fuser.create_jit_fn("template <typename T> T times(T x, T y) { return x * y; }")
LARGER = fuser.create_jit_fn("template <typename T> T larger(T x, T y) { return x > y ? x : y; }")
POSITIVE = fuser.create_jit_fn("template <typename T> T positive(T x) { return x > T(0) ? x : T(0); }")
AXPY = fuser.create_jit_fn("template <typename T> T axpy(T x, T y, T alpha) { return alpha * x + y; }", alpha=1.0)
BOTH = fuser.create_multi_output_jit_fn(
    "template <typename T> void both(T x, T y, T& twice, T& square) { twice = 2 * x; square = x * x + y; }", 2
)
NUMBERED = fuser.jit_fn("template <typename T> T numbered(T x, int64_t i) { return x * T(i); }", index="i")
LARGEST = fuser.create_reduction_fn(
    "template <typename T> T larger(T x, T y) { return x > y ? x : y; }", identity=float("-inf")
)
HALVE = fuser.create_jit_fn(
    "template <typename T> T halve(T x) { T s = x; while (s > T(1)) s = s * T(0.5); return s; }"
)


def make(mesh: DeviceMesh, shape: tuple[int, ...], placement: Placement | None, **options: Any) -> torch.Tensor:
    """Return a tensor of small random numbers along the first dimension of the mesh; a plain one for None."""
    kind = options.get("dtype", torch.float32)
    full = torch.randn(shape) if kind.is_floating_point else torch.randint(-5, 5, shape)
    full = full.to(kind).to(mesh.device_type)
    if placement is None:
        return full
    rest = [Replicate()] * (mesh.ndim - 1)
    if not placement.is_partial():
        return distribute_tensor(full, mesh, [placement, *rest])
    mine = full * (dist.get_rank() + 1)
    return DTensor.from_local(mine, mesh, [placement, *rest], run_check=False)


def whole(item: Any) -> torch.Tensor:
    return item.full_tensor() if isinstance(item, DTensor) else item


def same(found: Any, expected: Any, what: object = "", *, is_laid_out: bool = True) -> None:
    """Compare two DTensors: placements, layouts here and everywhere, and each bit."""
    assert isinstance(found, DTensor), (what, type(found))
    if found.placements != expected.placements and not PLACES_AS_TORCH:
        torch.testing.assert_close(whole(found), whole(expected))
        return
    assert found.placements == expected.placements, (what, found.placements, expected.placements)
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    assert found.dtype is expected.dtype, (what, found.dtype, expected.dtype)
    if is_laid_out:
        assert found.stride() == expected.stride(), (what, found.stride(), expected.stride())
        mine, theirs = found.to_local(), expected.to_local()
        assert mine.shape == theirs.shape, (what, mine.shape, theirs.shape)
        assert mine.stride() == theirs.stride(), (what, mine.stride(), theirs.stride())
    assert torch.equal(whole(found), whole(expected)), (what, whole(found), whole(expected))


def shards(shape: tuple[int, ...]) -> list[Placement]:
    return [Replicate(), *map(Shard, range(len(shape)))]


def random_shapes(seed: int, count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield pairs of shapes that broadcast; few sizes can be divided by the number of ranks, some are smaller."""
    draw = torch.Generator().manual_seed(seed)

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=draw))

    for _ in range(count):
        shape = tuple((1, 2, 3, 5, 7, 8)[number(6)] for _ in range(number(4)))
        other = tuple(size if number(3) else 1 for size in shape[number(len(shape) + 1) :])
        yield (shape, other) if number(2) else (other, shape)


# --- forward -----------------------------------------------------------------------------------------------------
@case
def results_lie_where_those_of_torch_lie(mesh: DeviceMesh) -> None:
    pairs = [(ADD, torch.add), (MUL, torch.mul), (LARGER, torch.maximum)]
    for shape, other in (((5, 4), (5, 4)), ((5, 4), (4,)), ((5, 4), (5, 1)), ((4, 6, 2), (6, 1)), ((4,), ())):
        for one, two in product(shards(shape), shards(other)):
            x, y = make(mesh, shape, one), make(mesh, other, two)
            if two.is_shard() and y.shape[two.dim] == 1:
                # Torch may have kept shards of which all but one are empty.
                continue
            for function, reference in pairs:
                same(function(x, y), reference(x, y), (reference, shape, other, one, two))


@case
def partial_sums_stay_partial_where_torch_keeps_them(mesh: DeviceMesh) -> None:
    shape = (5, 4)
    for kind in ("sum", "avg"):
        for one, two in product([Partial(kind), *shards(shape)], repeat=2):
            x, y = make(mesh, shape, one), make(mesh, shape, two)
            pairs = [(ADD, torch.add), (POSITIVE, torch.relu), (LARGER, torch.maximum), (MUL, torch.mul)]
            for function, reference in pairs:
                if reference is torch.mul and one.is_partial() and two.is_partial():
                    continue
                operands = (x,) if reference is torch.relu else (x, y)
                same(function(*operands), reference(*operands), (reference, one, two))


@case
def random_shapes_have_the_bits_of_one_process(mesh: DeviceMesh) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape, other in random_shapes(seed=dtype.itemsize, count=COUNT[0]):
            for one, two in product(shards(shape), shards(other)):
                x, y = make(mesh, shape, one, dtype=dtype), make(mesh, other, two, dtype=dtype)
                what = (dtype, shape, other, one, two)
                found = AXPY(x, y, alpha=2)
                assert torch.equal(whole(found), AXPY(whole(x), whole(y), alpha=2)), what
                twice, square = BOTH(x, y)
                expected = BOTH(whole(x), whole(y))
                assert torch.equal(whole(twice), expected[0]), what
                assert torch.equal(whole(square), expected[1]), what
                # What each rank has is what torch's op gives for the same shards.
                mine = x.to_local() if found.placements == x.placements else None
                if mine is not None and found.shape == x.shape:
                    assert found.to_local().shape == mine.shape, what


@case
def strides_are_those_of_torch(mesh: DeviceMesh) -> None:
    base = torch.randn(6, 5, 4, 3, device=mesh.device_type)
    for full in (base, base.to(memory_format=torch.channels_last), base.permute(2, 0, 3, 1), base[::2, :, 1:]):
        for placement in shards(full.shape):
            x = distribute_tensor(full, mesh, [placement, *[Replicate()] * (mesh.ndim - 1)])
            same(ADD(x, x), torch.add(x, x), placement)
            same(POSITIVE(x), torch.relu(x), placement)


@case
def linear_functors_keep_partial_sums(mesh: DeviceMesh) -> None:
    x, y = make(mesh, (5, 4), Partial()), make(mesh, (5, 4), Partial())
    with CommDebugMode() as comm:
        found = AXPY(x, y, alpha=3.0)
    assert found.placements[0] == Partial(), found.placements
    assert comm.get_total_counts() == 0
    assert torch.equal(found.to_local(), AXPY(x.to_local(), y.to_local(), alpha=3.0))
    # A product of two sums is none of the products; integers might be divided; x + 1 would be summed too often.
    number = fuser.create_jit_fn("template <typename T> T next(T x) { return x + T(1); }")
    for function, operands in ((MUL, (x, y)), (number, (x,)), (POSITIVE, (x,))):
        found = function(*operands)
        assert found.placements[0] == Replicate(), (function, found.placements)
        assert torch.equal(whole(found), function(*map(whole, operands)))
    whole_numbers = make(mesh, (5,), Partial(), dtype=torch.int64)
    found = ADD(whole_numbers, whole_numbers)
    assert found.placements[0] == Replicate(), found.placements
    largest = make(mesh, (5,), Partial("max"))
    found = ADD(largest, largest)
    assert found.placements[0] == Replicate(), found.placements
    assert torch.equal(whole(found), 2 * whole(largest))


@case
def a_group_is_cut_where_a_sum_must_be_known(mesh: DeviceMesh) -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.relu((x + y) * z) * z + x

    x, y, z = make(mesh, (5, 4), Partial()), make(mesh, (5, 4), Partial()), make(mesh, (4,), Replicate())
    with CommDebugMode() as comm:
        found = fuser.fuse(function)(x, y, z)
    with CommDebugMode() as expected_comm:
        expected = function(x, y, z)
    same(found, expected)
    assert not PLACES_AS_TORCH or comm.get_total_counts() == expected_comm.get_total_counts()


@case
def fused_functions_are_one_launch(mesh: DeviceMesh) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x * y + 1.0) - y

    fused = fuser.fuse(function)
    for one, two in product(shards((5, 4)), shards((4,))):
        x, y = make(mesh, (5, 4), one), make(mesh, (4,), two)
        expected = fuser.fuse(function)(whole(x), whole(y))
        fused(x, y)
        fuser.reset_stats()
        found = fused(x, y)
        assert fuser.stats()["launches"] == 1, fuser.stats()
        assert not fuser.stats()["fallbacks"], fuser.stats()
        assert found.placements == function(x, y).placements, (one, two)
        assert torch.equal(whole(found), expected), (one, two)


@case
def what_torch_reduces_lies_where_torch_has_it(mesh: DeviceMesh) -> None:
    def summed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * 2.0 + y).sum(0) * 2.0

    def weights(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * y, -1) + x

    with fuser.config.patch(numerics="fast"):
        for function, one in product((summed, weights), shards((6, 4))):
            x, y = make(mesh, (6, 4), one), make(mesh, (6, 4), one)
            fused = fuser.fuse(function)
            found, expected = fused(x, y), function(x, y)
            assert any(item.function.reshapes for group in fused.groups for item in group.applications), fused.groups
            assert found.placements == expected.placements, (function, one, found.placements, expected.placements)
            torch.testing.assert_close(whole(found), whole(expected))


@case
def numbers_and_plain_tensors_of_one_element_are_the_same_on_all_ranks(mesh: DeviceMesh) -> None:
    x = make(mesh, (5, 4), Shard(0))
    for other in (2.0, 3, True, torch.tensor(2.5, device=mesh.device_type), torch.tensor(4)):
        found = ADD(x, other)
        assert found.placements[0] == Shard(0)
        assert torch.equal(whole(found), ADD(whole(x), other)), other
    # Any other may differ from rank to rank.
    with pytest.raises(RuntimeError, match="got mixed"):
        ADD(x, torch.randn(5, 4, device=mesh.device_type))
    with implicit_replication():
        same(ADD(x, torch.ones(4, device=mesh.device_type)), x + 1)


@case
def a_scalar_is_no_part_of_what_is_kept(mesh: DeviceMesh) -> None:
    x = make(mesh, (5, 4), Shard(0))
    AXPY(x, x, alpha=0.5)
    before = len(_shardings)
    for value in range(20):
        assert torch.equal(whole(AXPY(x, x, alpha=value + 0.25)), AXPY(whole(x), whole(x), alpha=value + 0.25))
    assert len(_shardings) == before


@case
def plain_tensors_of_one_element_in_any_place(mesh: DeviceMesh) -> None:
    one, plain = make(mesh, (1,), Replicate()), torch.full((1,), 2.0, device=mesh.device_type)
    for x, y in ((one, plain), (plain, one)):
        assert torch.equal(whole(MUL(x, y)), whole(one) * 2)


@case
def plain_tensors_are_cut_where_all_ranks_have_them(mesh: DeviceMesh) -> None:
    for shape in ((2,), (4, 2)):
        x, plain = make(mesh, shape, Shard(0)), torch.randn(shape).to(mesh.device_type)
        with implicit_replication():
            same(MUL(x, plain), torch.mul(x, plain), shape)


@case
def two_meshes_are_refused(mesh: DeviceMesh) -> None:
    other = init_device_mesh(mesh.device_type, (1, mesh.size()))
    x, y = make(mesh, (4, 4), Shard(0)), distribute_tensor(torch.randn(4, 4), other, [Replicate(), Shard(0)])
    with pytest.raises(RuntimeError, match="mesh"):
        ADD(x, y)


@case
def meshes_of_two_dimensions(mesh: DeviceMesh) -> None:
    for sizes in ((mesh.size(), 1), (1, mesh.size())):
        grid = init_device_mesh(mesh.device_type, sizes)
        kinds: list[list[Placement]] = [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]]
        for one, two in product(kinds, kinds):
            torch.manual_seed(1)
            x, y = (distribute_tensor(torch.randn(8, 6, device=mesh.device_type), grid, item) for item in (one, two))
            same(ADD(x, y), torch.add(x, y), (sizes, one, two))
        # Partial along one dimension, shards along the other.
        x = DTensor.from_local(torch.randn(3, 6, device=mesh.device_type), grid, [Partial(), Shard(0)], run_check=False)
        same(ADD(x, x), torch.add(x, x), sizes)
        # Where torch goes on with is a matter of what it takes to send.
        assert torch.equal(whole(POSITIVE(x)), torch.relu(whole(x))), sizes


@case
def strided_shards_stay_where_they_are(mesh: DeviceMesh) -> None:
    grid = init_device_mesh(mesh.device_type, (mesh.size(), 1))
    placements = [_StridedShard(0, split_factor=1), Shard(0)]
    local = torch.randn(4, 3, device=mesh.device_type)
    x = DTensor.from_local(local, grid, placements, run_check=False)
    found = ADD(x, x)
    assert found.placements == x.placements
    assert torch.equal(found.to_local(), local + local)


@case
def fused_functions_redistribute(mesh: DeviceMesh) -> None:
    @fuser.fuse
    def function(x: DTensor, y: DTensor) -> DTensor:
        whole_rows = AXPY(x, y, alpha=2.0).redistribute(mesh, [Replicate()] * mesh.ndim)
        return torch.relu(whole_rows) * y

    x, y = make(mesh, (5, 4), Shard(0)), make(mesh, (5, 4), Shard(0))
    for _ in range(2):
        same(function(x, y), function.function(x, y))


@case
def results_of_collectives_are_waited_for(mesh: DeviceMesh) -> None:
    x = make(mesh, (5, 4), Partial())
    full = whole(x)
    found = POSITIVE(x.redistribute(placements=[Replicate()] * mesh.ndim, async_op=True))
    assert torch.equal(whole(found), POSITIVE(full))


@case
def inference_mode(mesh: DeviceMesh) -> None:
    with torch.inference_mode():
        for placement in shards((5, 4)):
            x = make(mesh, (5, 4), placement)
            same(ADD(x, x), torch.add(x, x))
            assert ADD(x, x).is_inference()


@case
def out_tensors_are_written_to(mesh: DeviceMesh) -> None:
    x, y = make(mesh, (5, 4), Shard(0)), make(mesh, (5, 4), Shard(0))
    out = torch.zeros_like(x)
    expected = ADD(x, y)
    assert ADD(x, y, out=out) is out
    same(out, expected)


# --- backward ----------------------------------------------------------------------------------------------------
def gradients(function: Callable[..., Any], *tensors: torch.Tensor) -> tuple[Any, ...]:
    leaves = [item.detach().clone().requires_grad_() for item in tensors]
    result = function(*leaves)
    (result * result).sum().backward()
    return (result.detach(), *(leaf.grad for leaf in leaves))


@case
def gradients_are_those_of_torch(mesh: DeviceMesh) -> None:
    pairs = [(ADD, torch.add), (MUL, torch.mul), (POSITIVE, torch.relu)]
    for shape, other in (((5, 4), (5, 4)), ((5, 4), (4,))):
        for one, two in product(shards(shape), shards(other)):
            if two.is_shard() and other[two.dim] == 1:
                continue
            x, y = make(mesh, shape, one), make(mesh, other, two)
            for function, reference in pairs:
                operands = (x,) if reference is torch.relu else (x, y)
                for found, expected in zip(
                    gradients(function, *operands), gradients(reference, *operands), strict=True
                ):
                    same(found, expected, (reference, shape, other, one, two))


@case
def gradients_have_the_bits_of_one_process(mesh: DeviceMesh) -> None:
    def chain(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.sigmoid(AXPY(x, y, alpha=2.0)) * y

    fused = fuser.fuse(chain)
    for function in (chain, fused):
        for one, two in product(shards((5, 4)), repeat=2):
            x, y = make(mesh, (5, 4), one), make(mesh, (5, 4), two)
            expected = gradients(function, whole(x), whole(y))
            for found, other in zip(gradients(function, x, y), expected, strict=True):
                assert isinstance(found, DTensor), (one, two)
                assert torch.equal(whole(found), other), (one, two)


@case
def a_gradient_that_is_a_partial_sum_stays_one(mesh: DeviceMesh) -> None:
    x, y = make(mesh, (5, 4), Replicate()), make(mesh, (4,), Replicate())
    found, expected = [], []
    for results, function in ((found, MUL), (expected, torch.mul)):
        leaves = [item.detach().clone().requires_grad_() for item in (x, y)]
        torch.manual_seed(5)
        function(*leaves).backward(make(mesh, (5, 4), Partial()))
        results += [leaf.grad for leaf in leaves]
    for one, two in zip(found, expected, strict=True):
        assert one.placements[0] == Partial(), one.placements
        same(one, two)


@case
def a_derivative_in_eager_torch(mesh: DeviceMesh) -> None:
    for placement in shards((5, 4)):
        x = make(mesh, (5, 4), placement)
        leaf, full = x.detach().requires_grad_(), whole(x).clone().requires_grad_()
        HALVE(leaf * 4).sum().backward()
        HALVE(full * 4).sum().backward()
        assert torch.equal(whole(leaf.grad), full.grad), placement


@case
def an_index_counts_through_the_whole_tensor(mesh: DeviceMesh) -> None:
    x = torch.arange(24.0).view(6, 4).to(mesh.device_type)
    for placement in (Shard(0), Shard(1), Replicate()):
        found = NUMBERED(distribute_tensor(x, mesh, [placement]))
        assert found.placements == (Replicate(),), placement
        assert torch.equal(found.to_local(), x * x), placement
    # Of partial sums every rank has the whole shape.
    found = NUMBERED(DTensor.from_local(x, mesh, [Partial()], run_check=False))
    assert found.placements == (Partial(),)
    assert torch.equal(found.to_local(), x * x)


@case
def a_reduction_reads_whole_tensors(mesh: DeviceMesh) -> None:
    for placement in shards((6, 4)):
        x = make(mesh, (6, 4), placement)
        leaf, full = x.detach().requires_grad_(), whole(x).clone().requires_grad_()
        for dim in (None, 0, 1):
            found = LARGEST(leaf, dim=dim)
            assert found.placements == (Replicate(),), placement
            assert torch.equal(found.to_local(), LARGEST(full, dim=dim)), placement
            gradient = torch.autograd.grad(found.sum(), leaf)[0]
            wanted = torch.autograd.grad(LARGEST(full, dim=dim).sum(), full)[0]
            assert torch.equal(whole(gradient), wanted), placement


# --- compiled ----------------------------------------------------------------------------------------------------
def check_compiled(mesh: DeviceMesh, backend: Any) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return POSITIVE(AXPY(x, y, alpha=2.0)) + y * 2

    ways = (Partial(), Replicate()), (Shard(0), Shard(0)), (Shard(1), Replicate())
    for one, two in ways[: WAYS[0]]:
        torch.compiler.reset()
        x, y = make(mesh, (6, 4), one), make(mesh, (4,), Replicate()) if two.is_replicate() else make(mesh, (6, 4), two)
        found = gradients(torch.compile(function, backend=backend, fullgraph=True), x, y)
        for mine, expected in zip(found, gradients(function, x, y), strict=True):
            # A compiler may lay out what it returns in its own way; Inductor adds up in an order of its own as well.
            if backend == "inductor":
                assert mine.placements == expected.placements, (one, two)
                torch.testing.assert_close(whole(mine), whole(expected))
            else:
                same(mine, expected, (backend, one, two), is_laid_out=False)


@slow
def compiled_by_aot_eager(mesh: DeviceMesh) -> None:
    check_compiled(mesh, "aot_eager")


@case
def compiled_by_fuser(mesh: DeviceMesh) -> None:
    check_compiled(mesh, fuser_backend)


@slow
def compiled_for_any_size(mesh: DeviceMesh) -> None:
    function = torch.compile(lambda x, y: POSITIVE(AXPY(x, y, alpha=2.0)), backend="aot_eager", dynamic=True)
    for rows in (6, 8, 10):
        x, y = make(mesh, (rows, 4), Shard(0)), make(mesh, (4,), Replicate())
        same(function(x, y), POSITIVE(AXPY(x, y, alpha=2.0)), rows, is_laid_out=False)


@slow
def compiled_by_inductor(mesh: DeviceMesh) -> None:
    check_compiled(mesh, "inductor")


def main(device: str, size: int, folder: Path, chosen: str) -> None:
    """Fork the ranks: what takes longest, to import torch, is done once."""
    import torch._dynamo  # noqa: F401

    processes = multiprocessing.get_context("fork")
    ranks = [processes.Process(target=run_rank, args=(device, rank, size, folder, chosen)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def run_rank(device: str, rank: int, size: int, folder: Path, chosen: str) -> None:
    # AOTAutograd's cache takes one rank's graph for another's, with torch's own ops too.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"inductor{rank}")
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    store = f"file://{folder / 'store'}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    mesh = init_device_mesh(device, (size,))
    failures = {}
    if chosen == "all":
        COUNT[0], WAYS[0] = 40, 3
    for name, function in (CASES if chosen == "quick" else CASES | SLOW).items():
        torch.manual_seed(0)
        torch.compiler.reset()
        began = time.process_time()
        try:
            function(mesh)
            failures[name] = ""
        except Exception:
            failures[name] = traceback.format_exc()
        sys.stdout.write(f"{time.process_time() - began:6.2f} CPU-s {name}\n")
    (folder / f"{rank}.json").write_text(json.dumps(failures), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
