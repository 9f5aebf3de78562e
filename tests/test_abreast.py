"""Launches side by side: which kernels of a call go together, and that nobody sees them half done."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from cuda_emulation import run_emulated
from torch import Tensor

import fuser
from fuser import abreast, planner
from fuser.abreast import Kernel, side_by_side
from fuser.arg_spec import starts_abreast
from fuser.compiler import register
from fuser.cuda.fused_kernel import CudaKernel
from fuser.cuda.nvrtc import compile_text, load_kernel
from fuser.debug import kernel_sources
from fuser.geometry import Launch, launch_shape
from fuser.graph import FusionGroup, GroupBuilder
from fuser.kernel_spec import ArgSpec
from fuser.layout import IterationSpace
from fuser.ops import OPS, composite_function, reduction_function
from fuser.planner import make_plan, plan_texts
from fuser.prelude import load_blocks
from fuser.tensor_desc import describe

CUDA = torch.device("cuda")
ROWS, LENGTH = 512, 1024


def gradients(length: int = LENGTH) -> FusionGroup:
    """Return the gradients of a layer_norm."""
    form = ((length,), 2, True, True, True, (True, True, True))
    builder = GroupBuilder()
    given = [builder.add_input(name) for name in ("dy", "x", "mean", "rstd", "weight", "bias")]
    return builder.build(builder.apply(composite_function("native_layer_norm_backward", form), given))


def tensors(dtype: torch.dtype, device: str = "meta") -> list[Tensor]:
    full = [torch.empty(ROWS, LENGTH, dtype=dtype, device=device) for _ in range(2)]
    own = [torch.empty(ROWS, 1, device=device) for _ in range(2)]
    return full + own + [torch.empty(LENGTH, dtype=dtype, device=device) for _ in range(2)]


def drawn(rows: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw what a layer_norm's gradients are computed of."""
    dy, x = torch.randn(2, rows, length).to(dtype)
    _, mean, rstd = torch.native_layer_norm(x.float(), (length,), None, None, 1e-5)
    return [dy, x, mean, rstd, *torch.randn(2, length).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_begin_and_rows_go_along(dtype: torch.dtype) -> None:
    columns, rows = (source.text for source in kernel_sources(register(gradients()), tensors(dtype), "cuda"))
    for text, own, other in (
        (columns, "fuser_admit_next();", "fuser_await_former();"),
        (rows, "fuser_await_former();", "fuser_admit_next();"),
    ):
        _, _, kernel = text.partition("__global__")
        assert own in kernel
        assert other not in kernel


def apart(dtype: torch.dtype = torch.float32) -> tuple[ArgSpec, ArgSpec]:
    """Return the kernels of a layer_norm's gradients as they are if nobody goes along: over rows, over columns."""
    columns, rows = (args for _, args in plan_texts(register(gradients()), tensors(dtype), CUDA))
    return (
        rows._replace(tuning=rows.tuning._replace(follows=False)),
        columns._replace(tuning=columns.tuning._replace(leads=False)),
    )


def test_columns_go_first() -> None:
    rows, columns = apart()
    (first, leads), (second, follows) = side_by_side(
        [Kernel(rows, {0, 1}, {5}, 8 * LENGTH), Kernel(columns, {0, 1}, {6}, 8 * LENGTH)]
    )
    assert (first, second) == (1, 0)
    assert leads == columns.tuning._replace(leads=True, unroll=leads.unroll)
    assert follows == rows.tuning._replace(follows=True)


def test_wide_rows_are_read_ahead_by_less() -> None:
    """All threads have about as much in flight, whatever the width, in whole vectors of torch's schedule."""
    _, columns = apart()
    assert (columns.rows.order.schedule.y, columns.rows.order.schedule.vector) == (32, 8)
    columns = columns._replace(tuning=columns.tuning._replace(unroll=32))
    found = [abreast._unroll(Kernel(columns, (), (), row_bytes)) for row_bytes in (1 << 10, 1 << 13, 1 << 14, 1 << 16)]
    assert found == [32, 16, 8, 8]


def both_sums() -> FusionGroup:
    """Return the sums of squares of each row and of each column."""
    builder = GroupBuilder()
    x = builder.add_input("x")
    (squares,) = builder.apply(OPS["mul"].function, [x, x])
    sums = [builder.apply(reduction_function("sum", (dim,)), [squares])[0] for dim in (1, 0)]
    return builder.build(sums)


def test_each_accumulator_of_a_thread_has_its_elements() -> None:
    """Of rows so wide that few elements of each thread are in flight, too."""
    for rows, length in ((8192, 2048), (65536, 256), (1024, 1 << 16)):
        args = [args for _, args in plan_texts(register(both_sums()), [torch.empty(rows, length, device="meta")], CUDA)]
        (columns,) = (item for item in args if item.rows.is_across)
        assert columns.tuning.leads
        assert columns.rows.order.schedule.accumulators == 4
        assert columns.tuning.unroll % 4 == 0


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_rows_and_columns_have_torchs_bits(dtype: torch.dtype) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * x).sum(-1), (x * x).sum(0)

    fused = fuser.fuse(both)
    for shape in ((8192, 2048), (65536, 256), (1000, 3000), (300, 70000), (4096, 4096)):
        x = torch.randn(shape, device="cuda").to(dtype)
        assert all(map(torch.equal, fused(x), both(x))), shape


@pytest.mark.cpu
def test_what_is_in_flight_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows end within a vector of torch's schedule."""
    torch.manual_seed(0)
    for rows, length in ((300, 100), (517, 36)):
        given = drawn(rows, length, torch.float32)
        made: dict[int, list[Tensor]] = {}
        for unroll in (8, 16, 32):
            monkeypatch.setattr(abreast, "_unroll", lambda _, unroll=unroll: unroll)
            made[unroll] = run_emulated(gradients(length), given)
        assert all(all(map(torch.equal, made[8], other)) for other in made.values())


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (({0, 1}, {0, 5}), ({5}, {6})),
        (({0, 6}, {0, 1}), ({5}, {6})),
        (({0, 1}, {0, 1}), ({0}, {6})),
        (({0, 1}, {0, 1}), ({5}, {1})),
        (({0, 1}, {0, 1}), ({5}, {5})),
        (({0, 1}, {2}), ({5}, {6})),
    ],
    ids=["columns read rows", "rows read columns", "rows in place", "columns in place", "one tensor", "nothing shared"],
)
def test_what_touches_the_other_waits_for_it(
    given: tuple[set[int], set[int]], written: tuple[set[int], set[int]]
) -> None:
    rows, columns = apart()
    kernels = [Kernel(*each, 1) for each in zip((rows, columns), given, written, strict=True)]
    assert side_by_side(kernels) == [(0, rows.tuning), (1, columns.tuning)]


@pytest.mark.parametrize("other", [{"piece": 4}, {"cluster": 2}, {"most_blocks": 132}], ids=str)
def test_rows_of_several_blocks_wait(other: dict[str, int]) -> None:
    rows, columns = apart()
    rows = rows._replace(tuning=rows.tuning._replace(**other))
    kernels = [Kernel(rows, {0, 1}, {5}, 1), Kernel(columns, {0, 1}, {6}, 1)]
    assert not any(tuning.leads or tuning.follows for _, tuning in side_by_side(kernels))


def test_no_two_pairs_have_a_kernel_in_common() -> None:
    """What begins early leads nobody: a third kernel waits for both."""
    rows, columns = apart()
    kernels = [Kernel(args, {0, 1}, {5 + slot}, 1) for slot, args in enumerate((rows, columns, rows, columns, columns))]
    found = side_by_side(kernels)
    assert [slot for slot, _ in found] == [1, 0, 3, 2, 4]
    assert [(tuning.leads, tuning.follows) for _, tuning in found] == [(1, 0), (0, 1), (1, 0), (0, 1), (0, 0)]


def test_older_gpus_and_cpus_start_nothing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "starts_abreast", lambda _: False)
    found = [args.tuning for _, args in plan_texts(register(gradients()), tensors(torch.float32), CUDA)]
    assert [(tuning.leads, tuning.follows) for tuning in found] == [(False, False)] * 2
    assert not starts_abreast(torch.device("cpu"))


def test_no_block_that_goes_along_ends_before_it_waits() -> None:
    _, rows = (source.text for source in kernel_sources(register(gradients()), tensors(torch.bfloat16), "cuda"))
    kernel = rows[rows.index("__global__") :]
    assert kernel.rstrip().endswith("  fuser_await_former();\n}")
    assert "return;" not in kernel


def test_the_launch_knows() -> None:
    columns, rows = (
        launch_shape(source, IterationSpace((LENGTH, ROWS), (), 1))
        for source in kernel_sources(register(gradients()), tensors(torch.float32), "cuda")
    )
    assert not columns.follows
    assert rows.follows


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("overtakes", [False, True])
def test_either_may_end_first(dtype: torch.dtype, overtakes: bool) -> None:
    """The kernels' bits do not depend on which of them runs first, nor on what outputs held."""
    torch.manual_seed(0)
    for rows, length in ((70, 256), (300, 100)):
        dy, x, mean, rstd, weight, bias = given = drawn(rows, length, dtype)
        made = run_emulated(gradients(length), given, overtakes=overtakes)
        wanted = torch.ops.aten.native_layer_norm_backward(
            *(item.double() for item in (dy, x)), [length], *(item.double() for item in (mean, rstd, weight, bias)),
            [True, True, True],
        )  # fmt: skip
        for own, exact in zip(made, wanted, strict=True):
            torch.testing.assert_close(own.double(), exact, rtol=2e-2, atol=0.2 if dtype is torch.bfloat16 else 1e-3)


# The first one takes some milliseconds for what the second one finds undone, and the third one done.
TOLD = """
struct numbers { int *done, *second, *third; };
extern "C" __global__ void first(numbers a) {
  fuser_admit_next();
  for (const long long begin = clock64(); clock64() - begin < 20000000;) {}
  *a.done = 1;
}
extern "C" __global__ void second(numbers a) {
  if (blockIdx.x == 0) *a.second = *reinterpret_cast<volatile int*>(a.done);
  fuser_await_former();
}
extern "C" __global__ void third(numbers a) { *a.third = *reinterpret_cast<volatile int*>(a.done); }
"""


@pytest.mark.cuda
def test_the_third_one_finds_the_first_one_done() -> None:
    blocks = [block.text for block in load_blocks("cuda_rows.h") if block.features == {"abreast"}]
    major, minor = torch.cuda.get_device_capability()
    text = "\n".join(["#define FUSER_INLINE __device__ __forceinline__", *blocks, TOLD])
    cubin, _ = compile_text(text, (f"-arch=sm_{major}{minor}",))
    values = torch.zeros(3, dtype=torch.int32, device="cuda")
    arguments = struct.pack("3Q", *(values.data_ptr() + 4 * slot for slot in range(3)))
    # Not freed before they have run.
    kernels = [load_kernel(cubin, name) for name in ("first", "second", "third")]
    runs = [
        CudaKernel(None, kernel, None).bind(launch, torch.cuda.current_device())
        for kernel, launch in zip(kernels, (Launch(), Launch(grid=64, follows=True), Launch()), strict=True)
    ]
    # The first time kernels are loaded meanwhile.
    for _ in range(2):
        values.zero_()
        for run in runs:
            run(arguments)
    assert values.tolist() == [1, 1 - starts_abreast(values.device), 1]


def gradients_of(function: Callable[..., Tensor], leaves: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the gradients, read at once; then their memory and the gradient given are written to."""
    kept = grad.clone()
    made = torch.autograd.grad(function(*leaves), leaves, grad)
    grad.fill_(torch.nan)
    found = [item + 0 for item in made]
    for item in made:
        item.zero_()
    grad.copy_(kept)
    return found


def edges(captured: torch.cuda.CUDAGraph) -> list[int]:
    """Return of each edge of a graph whether what it leads to begins before what it comes from has ended."""
    from cuda.bindings import driver

    graph = driver.CUgraph(captured.raw_cuda_graph())
    status, *_, count = driver.cuGraphGetEdges(graph)
    status, *_, data, _ = driver.cuGraphGetEdges(graph, count)
    assert status == driver.CUresult.CUDA_SUCCESS
    return [int(item.type) for item in data]


@pytest.mark.cuda
def test_both_launchers_say_so() -> None:
    """In a graph it is seen how launches were made: by the C launcher, and in Python."""
    group, given = gradients(), tensors(torch.float32, "cuda")
    for _ in range(3):
        fuser.run_fusion(fuser.register_fusion(group), given)
    plan = make_plan(register(group), [describe(item, reads_address=True) for item in given])
    made = [torch.empty_strided(item.shape, item.strides, dtype=item.dtype, device="cuda") for item in plan.outputs]
    values = [*given, *made]

    def in_python() -> None:
        for step in plan.steps:
            operands = [*(made[slot] for slot in step.outputs), *(values[slot] for slot in step.inputs)]
            step.run(step.packer.pack([item.data_ptr() for item in operands], []))

    assert not plan.temporaries
    assert not plan.workspaces
    for call in (in_python, lambda: fuser.run_fusion(fuser.register_fusion(group), given)):
        captured = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(captured):
            for _ in range(2):
                call()
        # Pairs side by side, one pair after the other.
        assert edges(captured) == [1, 0, 1]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nobody_sees_it_half_done(dtype: torch.dtype) -> None:
    """What is launched before and after neither changes the gradients nor finds them half done; in a graph, too."""

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias)

    torch.manual_seed(0)
    fused = fuser.fuse(norm)
    # Sums of columns take longer or shorter than what runs beside them.
    shapes = [(20000, 1024), (4096, 4096), (70, 4096), (3, 768), (1, 64), (9000, 200), (30000, 64), (2000, 8192)]
    for rows, length in [*shapes, (1000, 16384)]:
        x, grad = torch.randn(2, rows, length, device="cuda").to(dtype)
        leaves = [x, *torch.randn(2, length, device="cuda").to(dtype)]
        for item in leaves:
            item.requires_grad_()
        wanted = gradients_of(norm, leaves, grad)
        for turn in range(20):
            made = gradients_of(fused, leaves, grad)
            assert all(map(torch.equal, made, wanted)), (rows, length, turn)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            made = gradients_of(fused, leaves, grad)
        for turn in range(3):
            captured.replay()
            assert all(map(torch.equal, made, wanted)), (rows, length, turn)
