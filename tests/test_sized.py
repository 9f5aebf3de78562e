"""fuser.fuse where sizes are known: arrangements join groups, and calls of other sizes get what is theirs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import Tensor, nn

import fuser
from fuser import config
from fuser.fx import sized

DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)]

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "cat": lambda x, y: torch.cat([x * 2, y + 1], 1),
    "rope": lambda x, y: x * y + torch.cat([-x[:, 2:], x[:, :2]], -1) * (y + 1),
    "stack": lambda x, y: torch.stack([x - y, y - 0.5], -1),
    "pad": lambda x, y: F.pad(x + y, (1, 2)),
    "halves": lambda x, y: torch.relu(x.chunk(2, 1)[0]) * y[:, 1::2],
    "in place": lambda x, y: x.clone().mul_(2).add_(y),
    "part": lambda x, y: _with_row(x * 3, y),
    "dict": lambda x, y: {"sum": [x + y], "both": (torch.cat([x, y]) * 2, x), "n": 3},
}
# Two bytes to a kernel of its own, or none.
SHAPES = ((3, 4), (5, 4), (2, 6), (1, 8), (7, 2), (3, 4))


def _with_row(x: Tensor, y: Tensor) -> Tensor:
    x[0] = y[0]
    return x


def check(made: Any, wanted: Any) -> None:
    """Compare values, dtypes, strides and containers."""
    (mine, kind), (eagers, own) = map(torch.utils._pytree.tree_flatten, (made, wanted))
    assert kind == own
    for item, eager in zip(mine, eagers, strict=True):
        if isinstance(eager, Tensor):
            assert torch.equal(item, eager)
            assert (item.dtype, item.stride(), item.requires_grad) == (eager.dtype, eager.stride(), eager.requires_grad)
        else:
            assert item == eager


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_put_together_is_computed_where_it_lies(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = FUNCTIONS[name]
    fused = fuser.fuse(function)
    for shape in SHAPES:
        x, y = torch.randn(shape, device=device), torch.randn(shape, device=device)
        before = x.clone()
        for _ in range(3):
            check(fused(x, y), function(x, y))
        assert torch.equal(x, before)
    if name != "part":
        # Calls like earlier ones are replayed at once, whatever their size; one row of a part binds other numbers.
        with monkeypatch.context() as patch:
            patch.delattr(sized.SizedGraphs, "find")
            for shape in SHAPES[2:]:
                x, y = torch.randn(shape, device=device), torch.randn(shape, device=device)
                check(fused(x, y), function(x, y))
    fuser.reset_stats()
    fused(x, y)
    # What pads is written before and behind what is padded; on a GPU it is chosen by its place.
    padding = 1 if device == "cuda" else 3
    assert fuser.stats()["launches"] == {"dict": 2, "pad": padding, "part": 2}.get(name, 1)
    assert not fuser.stats()["fallbacks"]
    if name not in {"dict", "halves"}:
        assert "not fused" not in str(fuser.explain(fused, x, y))
        assert len(fused.groups) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_one_kernel_each_way(name: str, device: str) -> None:
    function = FUNCTIONS[name]
    fused = fuser.fuse(function)

    def run(call: Callable[..., Any], x: Tensor, y: Tensor) -> list[Tensor]:
        made = [item for item in torch.utils._pytree.tree_leaves(call(x, y)) if isinstance(item, Tensor)]
        total = sum((item.square().sum() for item in made if item.requires_grad), torch.zeros((), device=device))
        once = torch.autograd.grad(total, (x, y), create_graph=True)
        again = torch.autograd.grad(sum((item.square().sum() for item in once), total * 0), (x, y))
        return [*made, *once, *again]

    for shape in SHAPES[:3]:
        x, y = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
        for _ in range(2):
            for mine, eagers in zip(run(fused, x, y), run(function, x, y), strict=True):
                torch.testing.assert_close(mine, eagers, rtol=1e-5, atol=1e-5)
    if name != "rope":
        return
    x, y = (torch.randn(3, 4, device=device, requires_grad=True) for _ in range(2))
    upstream = torch.randn(3, 4, device=device)
    for _ in range(2):
        fuser.reset_stats()
        (mine,) = torch.autograd.grad(fused(x, y.detach()), x, upstream)
        assert fuser.stats()["launches"] == 2
    assert "not fused" not in str(fuser.explain(fused, x, y))
    eagers = torch.autograd.grad(function(x, y), (x, y), upstream)
    assert torch.equal(mine, eagers[0])
    # Where nobody asks for the gradient of x.
    (mine,) = torch.autograd.grad(fused(x, y), y, upstream)
    assert torch.equal(mine, eagers[1])
    assert fused(x.detach(), y).requires_grad
    assert not fused(x.detach(), y.detach()).requires_grad


@pytest.mark.cpu
def test_gradients_stay_each_nodes_where_a_function_is_more_than_its_results() -> None:
    noisy = fuser.fuse(lambda x: F.dropout(torch.cat([x, x * 2]), 0.5))
    seen = fuser.fuse(lambda x, y: (torch.cat([x, y]) * 2, x[0]))
    x, y = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)
    for _ in range(2):
        torch.manual_seed(0)
        made = noisy(x)
        (first,) = torch.autograd.grad(made.sum(), x, create_graph=True)
        torch.manual_seed(0)
        assert torch.equal(first, torch.autograd.grad(F.dropout(torch.cat([x, x * 2]), 0.5).sum(), x)[0])
        assert seen(x, y)[1]._base is x
    loss = fuser.fuse(lambda x, y: F.mse_loss(torch.cat([x, x]), y))
    with warnings.catch_warnings():
        # Which users ignore, and may not later.
        warnings.simplefilter("ignore")
        loss(x, y[:1])
    with pytest.warns(UserWarning, match="a target size"):
        loss(x, y[:1, :1])
    written = fuser.fuse(lambda x: ((made := torch.relu(x)), torch.cat([made, x]), made.add_(1))[1])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        written(x)
    # That it has no gradient is said by who asks for it.
    assert not said
    turned = fuser.fuse(lambda x: torch.cat([x.exp(), x]).exp().t())
    # What autograd read of it is another than it was.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        turned(x).mul_(2).sum().backward()
    moved = fuser.fuse(lambda x: (torch.cat([x * 2, x]) + 1).t())
    assert torch.equal(torch.autograd.grad(moved(x).mul_(3).sum(), x)[0], torch.full_like(x, 9))


@pytest.mark.cpu
@pytest.mark.parametrize("needs_grad", [False, True])
def test_what_torch_composes_of_other_ops_is_what_its_kernels_make_of_it(needs_grad: bool) -> None:
    # Torch has other formulas for symbols, of which one draws where eager torch does not.
    functions: list[Callable[[Tensor], Any]] = [
        lambda x: F.interpolate(torch.cat([x, x]), scale_factor=1.7, mode="bicubic") * 2,
        lambda x: torch.cat([F.dropout(x, 1.0), F.dropout(x, 0.5)]) * 2,
    ]
    for function in functions:
        fused = fuser.fuse(function)
        for rows in (5, 6):
            x = torch.randn(2, 3, rows, 4, requires_grad=needs_grad)
            made = []
            for call in (fused, function):
                torch.manual_seed(0)
                result = call(x)
                made.append((result, *(torch.autograd.grad(result.sum(), x) if needs_grad else ()), torch.rand(2)))
            check(*made)


@pytest.mark.cpu
def test_many_sizes_share_the_graph_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    trace = sized.SizedGraphs._trace
    monkeypatch.setattr(sized.SizedGraphs, "_trace", lambda *args: traced.append(args) or trace(*args))
    function = FUNCTIONS["cat"]
    fused = fuser.fuse(function)
    for rows in (*range(1, sized.MAX_GRAPHS + 4), 1, 2, sized.MAX_GRAPHS + 3):
        x = torch.randn(rows, 4)
        check(fused(x, x), function(x, x))
    assert len(traced) == sized.MAX_GRAPHS


@pytest.mark.cpu
def test_numbers_are_constants_of_few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    trace = sized.SizedGraphs._trace
    monkeypatch.setattr(sized.SizedGraphs, "_trace", lambda *args: traced.append(args) or trace(*args))

    def scaled(x: Tensor, shift: int = 1, factor: float = 2.0) -> Tensor:
        return torch.cat([x * factor, x + shift], 1)

    fused = fuser.fuse(scaled)
    x = torch.randn(3, 4)
    fuser.reset_stats()
    check(fused(x), scaled(x))
    assert fuser.stats()["launches"] == 1
    for _ in range(2):
        for numbers in ((), (2,), (1, 3.0), (1, 2.0), (1.0,), (1, -0.0), (1, 0.0), (5, 7.0), (6, 7.0)):
            check(fused(x, *numbers), scaled(x, *numbers))
    assert len(traced) == 4
    for factor in (0.5, 1.5, 0.5):
        y = x.clone().requires_grad_()
        check(fused(y, 1, factor), scaled(y, 1, factor))
        got, wanted = (torch.autograd.grad(call(y, 1, factor).sum(), y)[0] for call in (fused, scaled))
        assert torch.equal(got, wanted)


@pytest.mark.cpu
def test_who_writes_differentiates_or_maps_gets_the_graph_for_all() -> None:
    def write(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return torch.cat([x, y]) * 2

    fused = fuser.fuse(write)
    for _ in range(2):
        x, y = torch.zeros(2, 3), torch.ones(2, 3)
        check(fused(x, y), torch.cat([torch.ones(2, 3), y]) * 2)
        assert torch.equal(x, torch.ones(2, 3))
    for change in (lambda x: x.t_(), lambda x: x.requires_grad_()):  # type: ignore[misc]
        # Of the argument itself.
        fused = fuser.fuse(lambda x, change=change: (change(x), (torch.cat([x, x]) * 2).detach())[1])
        for _ in range(2):
            mine, eagers = torch.ones(2, 3), torch.ones(2, 3)
            fused(mine), change(eagers)
            check(mine, eagers)
    function = FUNCTIONS["rope"]
    fused = fuser.fuse(function)
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    with torch.no_grad():
        check(fused(x, y), function(x, y))
    for run in (fused, fused):
        mine, eagers = (torch.autograd.grad(call(x, y).sum(), x)[0] for call in (run, function))
        assert torch.equal(mine, eagers)
    check(torch.vmap(fused)(x.detach()[None], y[None]), function(x.detach(), y)[None])


@pytest.mark.cpu
def test_what_a_graph_relies_on_besides_sizes_is_looked_at_in_each_call() -> None:
    layer = nn.Linear(4, 4).requires_grad_(requires_grad=False)
    function: Any = lambda x: torch.cat([x + layer.bias, x * 2], 1)  # noqa: E731 - of a layer
    fused = fuser.fuse(function)
    x = torch.randn(3, 4)
    for change in (layer.double, layer.bfloat16, layer.float, lambda: layer.bias.data.fill_(2)):
        for _ in range(3):
            check(fused(x), function(x))
        change()
        check(fused(x), function(x))
    function = lambda x: torch.cat([torch.ones(2), x * 0.5])  # noqa: E731 - of the default dtype
    fused, whole = fuser.fuse(function), torch.arange(5)
    for dtype in (torch.float32, torch.float64, torch.float32):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            for _ in range(2):
                check(fused(whole), function(whole))
        finally:
            torch.set_default_dtype(before)
    for needs_grad in (False, True):
        fused, x = fuser.fuse(lambda x: (torch.cat([x, x]), torch.zeros(2) + 1)), x.clone().requires_grad_(needs_grad)
        for device in ("cpu", "meta", "cpu"):
            with torch.device(device):
                assert fused(x)[1].device.type == device


@pytest.mark.cpu
def test_calls_that_fail_say_only_what_torch_says_and_leave_others_their_kernels(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [caplog.handler])
    function = FUNCTIONS["rope"]
    for needs_grad in (False, True):
        fused = fuser.fuse(function)
        x = torch.ones(2, 4, requires_grad=needs_grad)
        for rows in range(3, sized.MAX_GRAPHS + 4):
            with pytest.raises(RuntimeError):
                fused(x, torch.ones(rows, 4))
        check(fused(x, x), function(x, x))
        fuser.reset_stats()
        check(fused(x, x), function(x, x))
        assert fuser.stats()["launches"] == 1
    assert not [item.getMessage() for item in caplog.records if item.levelno >= logging.WARNING]
    assert capsys.readouterr() == ("", "")


@pytest.mark.cpu
def test_warm_ups_hold_for_calls_of_their_sizes_and_of_others() -> None:
    function = FUNCTIONS["rope"]
    fused = fuser.fuse(function)
    fused.warmup(torch.empty(3, 16), torch.empty(3, 16))
    again = fuser.fuse(function)
    again.warmup(
        *[torch.empty(5, 16)] * 2, dynamic_shapes={"x": {0: (rows := fuser.Dim("rows", 2, 64))}, "y": {0: rows}}
    )
    with config.patch(no_compile=True):
        for run, rows in ((fused, 3), (fused, 9), (again, 5), (again, 33), (fuser.fuse(function), 7)):
            x, y = torch.randn(rows, 16), torch.randn(rows, 16)
            for _ in range(2):
                check(run(x, y), function(x, y))
    # What was drawn before a kernel was missing is drawn again.
    noisy: Any = lambda x: torch.cat([x * 3 - torch.rand_like(x), x]) * 2  # noqa: E731 - no function of the table
    fuser.fuse(noisy).warmup(torch.empty(5, 16), dynamic_shapes={"x": {0: fuser.Dim("rows", 2, 64)}})
    made, x = [], torch.randn(3, 16)
    for call in (fuser.fuse(noisy), noisy):
        torch.manual_seed(0)
        with config.patch(no_compile=True):
            made.append((call(x), torch.rand(2)))
    check(*made)


# --- what a function draws, and what it reads besides its arguments --------------------------------------------------
def _both_ways(function: Any, fused: Any, given: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Compare results, gradients, and what is drawn afterwards."""
    seen = []
    for run in (function, fused):
        torch.manual_seed(3)
        made = run(*given)
        seen.append([made, *torch.autograd.grad(made.sum(), wanted), torch.rand(2)])
    assert all(map(torch.equal, *seen))


@pytest.mark.cpu
def test_functions_that_draw_are_differentiated_at_once() -> None:
    def dropped(x: Tensor, y: Tensor) -> Tensor:
        kept = F.dropout(x + torch.rand(1), 0.3)
        return torch.cat([kept * y, kept - kept.mean(-1, keepdim=True)], 1)

    fused = fuser.fuse(dropped)
    for size in (5, 5, 7):
        given = [torch.randn(4, size, requires_grad=True) for _ in range(2)]
        _both_ways(dropped, fused, given, given)
    assert fused(*given).grad_fn.name() == "_DifferentiatedBackward"


@pytest.mark.cpu
def test_gradients_of_gradients_draw_the_same_numbers_again() -> None:
    def dropped(x: Tensor) -> Tensor:
        return torch.cat([F.dropout(x * x * 0.5, 0.5), x], 1)

    seen = []
    for run in (dropped, fuser.fuse(dropped)):
        torch.manual_seed(3)
        x = torch.arange(12.0).view(3, 4).requires_grad_()
        (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        after = torch.rand(2)
        (second,) = torch.autograd.grad(first.sum(), x)
        seen.append([first, after, second, torch.rand(2)])
    assert all(map(torch.equal, *seen))


@pytest.mark.cpu
def test_a_tensor_that_a_function_reads_may_change() -> None:
    scale = torch.nn.Parameter(torch.randn(5))

    def scaled(x: Tensor) -> Tensor:
        return torch.cat([x * scale, x + 1], 1)

    fused, x = fuser.fuse(scaled), torch.randn(4, 5)

    def check(*wanted: Tensor) -> None:
        for _ in range(2):
            _both_ways(scaled, fused, [x], wanted)

    check(scale)
    x.requires_grad_()
    check(x, scale)
    scale.requires_grad_(False)
    check(x)
    scale.requires_grad_(True)
    with torch.no_grad():
        scale.mul_(2)
    check(x, scale)
    scale.data = torch.randn(1)
    check(x, scale)
    scale.data = torch.randn(5, dtype=torch.float64)
    check(x, scale)
    assert fused(x).grad_fn.name() == "_DifferentiatedBackward"


@pytest.mark.cpu
def test_what_nobody_looks_at_any_more_is_not_returned() -> None:
    def edged(x: Tensor) -> Tensor:
        made = x * 2
        made[:, 0] = 1
        made[:, -1] = 3
        return made

    fused, x = fuser.fuse(edged), torch.randn(4, 6)
    assert torch.equal(fused(x), edged(x))
    assert [len(group.outputs) for group in fused.groups] == [1]


def _filled(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    made = x.t() * 2
    made.masked_fill_(mask, 0)
    return made, torch.cat([made, made])


def _windowed(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.where(mask, x.t(), 2)
    # The last row is in no window.
    made.unfold(0, 2, 2).mul_(3)
    return made, torch.cat([made, made])


PERMUTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "filled": _filled,
    "windows": _windowed,
    "dropped": lambda x, mask: torch.cat([F.dropout(x.t(), 0.5), mask * 1.0]),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", PERMUTED)
def test_what_torch_makes_otherwise_in_a_trace_is_as_in_eager_torch(name: str) -> None:
    function, mask = PERMUTED[name], torch.rand(33, 64) > 0.5
    fused = fuser.fuse(function)
    for needs_grad in (False, True):
        x = torch.randn(64, 33, requires_grad=needs_grad)
        seen = []
        for run in (function, fused):
            torch.manual_seed(3)
            made = run(x, mask)
            made = list(made) if isinstance(made, tuple) else [made]
            seen.append(made + ([*torch.autograd.grad(made[0], x, torch.ones_like(made[0]))] if needs_grad else []))
        for item, want in zip(*seen, strict=True):
            assert item.stride() == want.stride()
            assert torch.equal(item, want)


@pytest.mark.cpu
def test_what_a_function_reads_is_dispatched_otherwise_in_inference_and_in_custom_ops() -> None:
    scale, x = torch.nn.Parameter(torch.randn(5)), torch.randn(4, 5)

    def scaled(x: Tensor) -> Tensor:
        return torch.cat([x * scale, x + 1], 1)

    fused = fuser.fuse(scaled)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad, torch._C._AutoDispatchBelowAutograd):
        with mode():
            assert torch.equal(fused(x), scaled(x))
            is_one_kernel = all(node.op != "call_function" for node in fused.graph_for((x,))[0].graph.nodes)
            assert is_one_kernel == (mode is not torch._C._AutoDispatchBelowAutograd)


@pytest.mark.cpu
def test_parameters_are_multiplied_as_such_also_without_gradients() -> None:
    # Rows of all matrices at once, which torch does where the other one requires grad.
    x, weight = torch.randn(8, 33, 1).transpose(1, 2), torch.nn.Parameter(torch.randn(33, 1))

    def multiplied(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([torch.matmul(x, weight) * 2, x], 2)

    fused = fuser.fuse(multiplied)
    with torch.no_grad():
        assert torch.equal(fused(x, weight), multiplied(x, weight))
        names = [str(node.target) for node in fused.graph_for((x, weight))[0].graph.nodes]
    assert "aten.mm.default" in names


@pytest.mark.cpu
def test_views_of_parameters_are_returned_by_graphs_for_known_sizes() -> None:
    fused = fuser.fuse(lambda x: (torch.cat([x * 2, x + 1]), x[1:], x))
    x = torch.randn(4, 5, requires_grad=True)
    with torch.no_grad():
        made = fused(x)
        assert [item.requires_grad for item in made] == [False, x[1:].requires_grad, True]
        assert made[2] is x
        assert "cat" not in str(fused.graph_for((x,))[0].graph)


@pytest.mark.cpu
def test_one_matrix_for_a_batch_is_multiplied_as_where_nobody_traces() -> None:
    def multiplied(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([(x @ y) * 2, x], 2)

    fused, x, y = fuser.fuse(multiplied), torch.randn(3, 1, 33, requires_grad=True), torch.randn(1, 33, 1)
    _both_ways(multiplied, fused, [x, y], [x])
    assert fused(x, y).grad_fn.name() == "_DifferentiatedBackward"
    with torch.no_grad():
        assert torch.equal(fused(x, y), multiplied(x, y))
        names = [str(node.target) for node in fused.graph_for((x, y))[0].graph.nodes]
    assert "aten.bmm.default" in names


@pytest.mark.cpu
@pytest.mark.parametrize("find", [torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.cond])
def test_values_of_matrices_are_computed_without_vectors(find: Any) -> None:
    def joined(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([find(x).reshape(-1) * 2, y])

    fused, x, y = fuser.fuse(joined), torch.randn(20, 12, 12), torch.randn(5)
    assert torch.equal(fused(x, y), joined(x, y))
    assert "aten" not in str(fused.graph_module.graph)
    y.requires_grad_()
    _both_ways(joined, fused, [x, y], [y])


@pytest.mark.cpu
def test_an_argument_may_have_the_name_of_a_product() -> None:
    def beside(matmul: Tensor, y: Tensor) -> Tensor:
        return torch.cat([matmul * 2, y], 1)

    fused, x, y = fuser.fuse(beside), torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(fused(x, y), beside(x, y))
    assert len(fused.groups) == 1
    assert all(node.op != "call_function" for node in fused.graph_for((x, y))[0].graph.nodes)
