"""Narrow elements at odd places move in whole vectors: each row's begin where the output is aligned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from cuda_emulation import run_emulated
from torch import Tensor

import fuser
from fuser.codegen import build_source
from fuser.compiler import register
from fuser.cuda.backend import compile_cubin
from fuser.cuda.dialect import DIALECT
from fuser.cxx.functor import parse_functor
from fuser.function import Function
from fuser.graph import GroupBuilder
from fuser.planner import plan_texts

NARROW = (torch.bfloat16, torch.uint8)


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return torch.randint(0, 9, shape, device=device).to(dtype)


def group_of(text: str, count: int) -> fuser.FusionGroup:
    """Return the group of one functor."""
    builder = GroupBuilder()
    inputs = [builder.add_input(f"x{slot}") for slot in range(count)]
    return builder.build(builder.apply(Function(parse_functor(text)), inputs))


NEAR = group_of("template <typename T> T near(T a, T b, T c) { return (a + b) * c; }", 3)


def near(x: Tensor) -> list[Tensor]:
    return [x[:, 1:], x[:, :-1], x[:, :1]]


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_rows_are_cut_where_the_output_is_aligned(dtype: torch.dtype) -> None:
    for width in (515, 520, 529, 1030):
        x = draw(5, width, dtype=dtype)
        ((spec, args),) = plan_texts(register(NEAR), near(x), torch.device("cuda"))
        source = build_source(spec.group, args, DIALECT)
        is_whole = (width - 1) * x.element_size() % 16 == 0
        assert args.vector * x.element_size() == 16
        assert ("fuser_store_level<" in source.text) is not is_whole
        # What lies elsewhere than the output is shifted; columns that all of a row have in common are not.
        assert source.text.count("= fuser_load_askew<") == 2
        assert compile_cubin(source, "sm_90")
        for descending in (False, True):
            (found,) = run_emulated(NEAR, near(x), all_kernels=True, descending=descending)
            assert torch.equal(found, (x[:, 1:] + x[:, :-1]) * x[:, :1])


def test_short_rows_and_wide_elements_are_not_cut_so() -> None:
    for dtype, width in ((torch.bfloat16, 100), (torch.float32, 515), (torch.int64, 515)):
        ((_, args),) = plan_texts(register(NEAR), near(draw(5, width, dtype=dtype)), torch.device("cuda"))
        assert not args.tuning.begins_level


PLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda x: F.pad(x * 2, (1, 2)),
    "roll": lambda x: (x * 2).roll(3, 1),
    "cat": lambda x: torch.cat([x * 2, x[:, :-1] + 1, x], 1),
    "slice": lambda x: x[1:, 1:] * 2,
    "widened": lambda x: (x[:, 1:] + x[:, :-1]).float() * 0.5,
    "compared": lambda x: x[:, 1:] > x[:, :-1],
    "scaled": lambda x: x[:, 1:] * x[:, :1].double(),
    "in place": lambda x: x.clone()[:, 1:].mul_(2),
}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.int16, torch.float32], ids=str)
@pytest.mark.parametrize("name", PLACED)
def test_what_lies_at_odd_places_has_torchs_values(name: str, dtype: torch.dtype) -> None:
    function = PLACED[name]
    fused = fuser.fuse(lambda x: function(x))
    for rows, width in ((3, 255), (7, 256), (5, 513), (1, 1025), (257, 519), (2, 4099)):
        whole = draw(rows + 1, width + 3, dtype=dtype, device="cuda")
        for x in (whole, whole[:, 1:], whole[1:, 2:-1]):
            made, wanted = fused(x), function(x)
            assert made.stride() == wanted.stride()
            assert torch.equal(made, wanted), (rows, width)


@pytest.mark.cuda
def test_nothing_is_written_beside_rows_that_begin_anywhere() -> None:
    functor = fuser.create_jit_fn("template <typename T> T twice(T x) { return x + x; }")
    x = draw(9, 1030, dtype=torch.bfloat16, device="cuda")
    for begin in range(9):
        memory = torch.full((9, 1100), -1.0, dtype=torch.bfloat16, device="cuda")
        out = memory[:, begin : begin + 1021]
        functor(x[:, 3:1024], out=out)
        assert torch.equal(out, x[:, 3:1024] * 2)
        assert (memory == -1).sum() == 9 * (1100 - 1021)
