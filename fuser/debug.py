"""Looking inside: the generated kernel of a group, and what fused into which one, what did not, and why."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fuser.compiler import build_kernel_source, has_host_compiler, register
from fuser.errors import (
    ArgumentError,
    DeviceError,
    FuserError,
    UnsupportedError,
    describe_type,
    shows_users_frames,
)
from fuser.fallback import Fallback
from fuser.fx.bodies import bodies_of, find_bodies
from fuser.fx.dropouts import draw_dropout_mask, find_obstacle
from fuser.fx.fused_module import FusedModule
from fuser.fx.fusion_node import FusionModule
from fuser.fx.gains import count_unread, gains_nothing
from fuser.fx.nodes import UNSAFE_VIEWS, find_bar, read_nodes
from fuser.fx.trace import FusedFunction
from fuser.graph import FusionGroup
from fuser.in_parts import needs_devices
from fuser.jit_function import JitFunction
from fuser.kernel_source import KernelSource
from fuser.kernel_spec import KernelSpec
from fuser.ops import REDUCTIONS, bind_for, is_known
from fuser.outputs import unusual_kind
from fuser.planner import can_fuse, make_plan, plan_texts
from fuser.reduction import ReductionFunction
from fuser.route import run
from fuser.tensor_desc import check_inputs, common_device, describe, read_device

if TYPE_CHECKING:
    from fuser.fx.recording import RecordedGraph

__all__ = [
    "CompiledExplanation",
    "Explanation",
    "GroupReport",
    "debug_get_fused_kernel_code",
    "debug_launch_graph",
    "explain",
]


@dataclass(frozen=True, slots=True, repr=False)
class GroupReport:
    """One fusion group, and what it becomes for the given inputs."""

    group: FusionGroup
    # Names of the FX nodes it stands for; empty for a functor called alone.
    nodes: tuple[str, ...]
    # Kernel texts, one per output shape; empty where the inputs are not known or the group is not fused.
    kernels: tuple[KernelSource, ...]
    # Why it runs in eager torch; empty when it is fused.
    fallback_reason: str
    # What keeps functors of it from running there: name, and line, column and construct.
    obstacles: tuple[str, ...] = ()
    # Whether it is cut, so that all but some applications, which the reason is about, have kernels.
    is_cut: bool = False

    @property
    def is_eager(self) -> bool:
        """Whether all of it runs in eager torch."""
        return bool(self.fallback_reason) and not self.is_cut

    def __repr__(self) -> str:
        # Texts of kernels are long.
        return f"<fuser.GroupReport {self.group!r}, {len(self.kernels)} kernels>"


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """What ``explain`` found, which prints as a summary."""

    groups: tuple[GroupReport, ...]
    # Node name and why it is in no group.
    unfused: tuple[tuple[str, str], ...]
    # The graph.
    module: fx.GraphModule | None = None
    # Of a compiled model: which pass it is, how many bytes each group saves, how many each node that is in none still
    # moves, and how many each group does that runs in eager torch, at the sizes of the call.
    kind: str = ""
    bytes_saved: tuple[int, ...] = ()
    bytes_left: tuple[int, ...] = ()
    bytes_in_eager: tuple[int, ...] = ()
    # Of a fused function's call: why less of it is fused than could be, as far as it concerns no single node.
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Groups with their applications and kernels, then the nodes left out and why."""
        lines = []
        if self.kind:
            saved, left = _mebibytes(sum(self.bytes_saved)), _mebibytes(sum(self.bytes_left + self.bytes_in_eager))
            groups = "1 group saves" if len(self.groups) == 1 else f"{len(self.groups)} groups save"
            lines.append(f"{self.kind} pass: {groups} {saved}; what is not fused moves {left}")
        for number, report in enumerate(self.groups):
            count = len(report.kernels)
            what = f"{count} kernel{'s' if count != 1 else ''}" if count else "fused"
            what += f", saves {_mebibytes(self.bytes_saved[number])}" if self.bytes_saved else ""
            if report.fallback_reason:
                what = f"{'in parts' if report.is_cut else 'eager torch'}: {report.fallback_reason}"
            nodes = f", nodes {', '.join(report.nodes)}" if report.nodes else ""
            lines += [f"group {number}: {what}{nodes}", *(f"  {line}" for line in str(report.group).splitlines())]
            lines += [f"  no eager version of {obstacle}" for obstacle in report.obstacles]
        for number, (name, reason) in enumerate(self.unfused):
            moved = f", moves {_mebibytes(self.bytes_left[number])}" if self.bytes_left else ""
            lines.append(f"not fused: {name}: {reason}{moved}")
        return "\n".join([*lines, *self.remarks]) or "nothing to fuse"

    def __repr__(self) -> str:
        return str(self)

    def svg(self) -> str:
        """Return a picture of the graph: groups orange, other operators grey, the lighter ones move no bytes."""
        if self.module is None:
            raise ArgumentError("only the explanation of a graph has a picture")
        groups = iter(enumerate(self.groups))
        reasons, names = dict(self.unfused), set[str]()
        left = dict(zip(reasons, self.bytes_left, strict=False))
        # It escapes HTML, and Python's module for that brings a table of thousands of names.
        from fuser.drawing import Box, draw_graph  # noqa: PLC0415

        boxes: list[Box] = []
        for node in self.module.graph.nodes:
            sources = tuple(source.name for source in node.all_input_nodes if source.name in names)
            if _is_fusion(self.module, node):
                number, report = next(groups)
                texts = (f"group {number}", ", ".join(report.nodes))
                boxes.append(Box(node.name, texts, str(report.group), "#ffcf87", sources))
            elif node.op in {"placeholder", "output"}:
                continue
            else:
                texts = (node.name, _mebibytes(left[node.name]) if left.get(node.name) else "")
                colour = "#cccccc" if left.get(node.name) else "#f2f2f2"
                boxes.append(Box(node.name, texts, reasons.get(node.name, ""), colour, sources))
            names.add(node.name)
        return draw_graph(boxes, self.kind or "graph")


@dataclass(frozen=True, slots=True, repr=False)
class CompiledExplanation:
    """What ``explain`` found of a compiled model: each graph, in the order in which it was compiled."""

    graphs: tuple[Explanation, ...]

    def __str__(self) -> str:
        """All of them."""
        return "\n\n".join(map(str, self.graphs))

    def __repr__(self) -> str:
        return str(self)


@shows_users_frames
def debug_get_fused_kernel_code(group: FusionGroup, inputs: Sequence[Any], device: str | None = None) -> str:
    """Return the kernel text of a group for these inputs, without compiling or launching.

    Args:
        group: a FusionGroup.
        inputs: one tensor (real, fake or meta) or Python number per input.
        device: "cuda" or "cpu", to see the other device's text (needs no GPU); default: where the tensors are.

    Returns:
        The text; several kernels (outputs of different shapes) one after another.

    Raises:
        ArgumentError: there is no such device.
        UnsupportedError: the group is not fused for these inputs; says why.
    """
    return "\n".join(source.text for source in kernel_sources(register(group), group.fill_inputs(inputs), device))


@shows_users_frames
def debug_launch_graph(group: FusionGroup, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Register a group, compile it for these inputs and run it, without keeping a key; returns the outputs."""
    return run(register(group), group.fill_inputs(inputs))


_Explained: TypeAlias = (
    FusedFunction[..., Any] | FusedModule | JitFunction[Any] | ReductionFunction | FusionGroup | fx.GraphModule
)


@overload
def explain(target: _Explained, *args: Any, **kwargs: Any) -> Explanation: ...
@overload
def explain(target: Callable[..., Any], *args: Any, **kwargs: Any) -> CompiledExplanation: ...
@shows_users_frames
def explain(target: Any, *args: Any, **kwargs: Any) -> Explanation | CompiledExplanation:
    """Say which nodes fuse into which kernel, which do not, and why.

    Args:
        target: a fused function or module, a functor, a reduction, a graph module with fusion nodes, a FusionGroup, or
            what torch.compile made: its forward and backward graphs, with the bytes that fusion saves and those that
            are left. It is compiled once more for that.
        *args: example inputs; with them a graph is run, and kernel texts and fallback reasons are worked out. What
            torch.compile made is called for that: it changes what its calls change (buffers, random state, arguments).
        **kwargs: those by name, of what is called with them.

    Raises:
        ArgumentError: the target is none of these. Else as calls.
    """
    if hasattr(target, "_torchdynamo_orig_callable"):
        from fuser.fx.recording import record_graphs  # noqa: PLC0415 - brings Dynamo and Inductor

        return CompiledExplanation(tuple(map(_explain_recorded, record_graphs(target, args, kwargs))))
    if isinstance(target, ReductionFunction):
        target = target.along(kwargs.pop("dim", None), keepdim=kwargs.pop("keepdim", False))
    if kwargs and isinstance(target, FusionGroup | fx.GraphModule):
        raise ArgumentError(f"explain takes what a group or a graph is called with by position, got {min(kwargs)!r}")
    if isinstance(target, FusionGroup):
        return Explanation((_report(target, (), args),), ())
    if isinstance(target, JitFunction):
        count = len(args) or len(target.tensor_names)
        # A scalar that every call must give stands as some number.
        scalars = target.bind_scalars({**dict.fromkeys(target.scalar_names, 1.0), **target.defaults, **kwargs})
        inputs = [*args, *scalars.values()] if args else []
        return Explanation((_report(target.spec(count).group, (), inputs),), ())
    module: Any = target.fused if isinstance(target, FusedModule) else target
    remarks: tuple[str, ...] = ()
    if isinstance(module, FusedFunction):
        if args or kwargs:
            remarks, (module, args) = module.remarks_for(args, kwargs), module.graph_for(args, kwargs)
        else:
            module, args = module.graph_module, ()
    if not isinstance(module, fx.GraphModule):
        takes = "explain takes a fused function, functor, graph module or group"
        hint = "; fuser.fuse or torch.compile makes one of it" if callable(target) else ""
        raise ArgumentError(f"{takes}, got {describe_type(target)}{hint}")
    recorder = _Recorder(module)
    if args:
        recorder.run(*args)
    return Explanation(tuple(recorder.reports()), tuple(_unfused(module)), module, remarks=remarks)


def _explain_recorded(recorded: RecordedGraph) -> Explanation:
    module = recorded.module
    fusions = [node for node in module.graph.nodes if _is_fusion(module, node)]
    groups, saved, in_eager = [], [], []
    for node in fusions:
        fusion: Any = module.get_submodule(str(node.target))
        inputs = map_arg(node.args, lambda item: _without_symbols(item.meta.get("val")))
        is_known = None not in tree_leaves(inputs)
        groups.append(_report(fusion.group, fusion.node_names, inputs if is_known else []))
        alone = sum(recorded.traffic.get(name, 0) for name in fusion.node_names)
        # Of lists all is read.
        parted = [*map(describe, inputs)] if is_known and type(fusion) is FusionModule else []
        unread = count_unread(fusion.group, parted) if parted else 0
        # In eager torch its nodes are as they were.
        saved.append(0 if groups[-1].is_eager else alone - (recorded.traffic[node.name] - unread))
        in_eager.append(alone if groups[-1].is_eager else 0)
    unfused = _unfused(module)
    left = tuple(recorded.traffic.get(name, 0) for name, _ in unfused)
    return Explanation(tuple(groups), tuple(unfused), module, recorded.kind, tuple(saved), left, tuple(in_eager))


def _without_symbols(value: Any) -> Any:
    # With the sizes of the call; None where they depend on its data.
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    if not isinstance(value, FakeTensor) or not any(isinstance(size, torch.SymInt) for size in value.shape):
        return value
    sizes, strides = map(_without_symbols, value.shape), map(_without_symbols, value.stride())
    known = tuple(sizes), tuple(strides)
    if None in itertools.chain(*known):
        return None
    with value.fake_mode:
        return torch.empty_strided(*known, dtype=value.dtype, device=value.device)


def _is_fusion(module: fx.GraphModule, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), FusionModule)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.3g} MiB"


def kernel_sources(spec: KernelSpec, inputs: Sequence[Any], device: str | None) -> list[KernelSource]:
    """Return the kernel texts of a spec for these inputs; raise UnsupportedError where no kernel can read them."""
    where = None if device is None else read_device(device)
    kind = next(filter(None, (unusual_kind(item) for item in inputs if isinstance(item, torch.Tensor))), "")
    if kind:
        raise UnsupportedError(f"a {kind} tensor")
    return [build_kernel_source(part, args) for part, args in plan_texts(spec, inputs, where)]


def _report(group: FusionGroup, nodes: tuple[str, ...], inputs: Sequence[Any]) -> GroupReport:
    obstacles = tuple(f"{name!r}: {str(obstacle).splitlines()[0]}" for name, obstacle in Fallback(group).obstacles)
    if not inputs:
        return GroupReport(group, nodes, (), "", obstacles)
    # Of lists, the first position.
    inputs = [item[0] if isinstance(item, list | tuple) else item for item in inputs]
    spec, filled = register(group), group.fill_inputs(inputs)
    is_cut = False
    try:
        check_inputs(group, filled)
        kernels = kernel_sources(spec, filled, None)
        reason = _find_fallback(spec, filled)
        if reason:
            return GroupReport(group, nodes, (), reason, obstacles)
    except FuserError as error:
        reason = str(error).splitlines()[0]
        if isinstance(error, UnsupportedError) and error.application >= 0 and len(group.applications) > 1:
            is_long = error.application == len(group.applications)
            rest = (
                "its halves have kernels" if is_long else "that application alone is torch's: the others keep kernels"
            )
            reason += f" ({rest})"
            is_cut = True
        elif isinstance(error, DeviceError) and needs_devices(spec, filled):
            reason = "its tensors are on several devices (each has kernels of its own)"
            is_cut = True
        elif not nodes and not isinstance(error, UnsupportedError):
            # A node of a graph has run with these inputs; here nothing has, and a call would raise this.
            raise
        return GroupReport(group, nodes, (), reason, obstacles, is_cut)
    return GroupReport(group, nodes, tuple(kernels), "", obstacles)


def _find_fallback(spec: KernelSpec, inputs: Sequence[Any]) -> str:
    # Why the kernels of a call are not made, without making them: there is no compiler, or fusion is switched off.
    described = [describe(item) for item in inputs]
    kind = common_device(spec.group, described).type
    if kind == "meta" or (can_fuse(kind) and (kind != "cpu" or has_host_compiler())):
        return ""
    # But those that are ready serve.
    return make_plan(spec, described).fallback_reason


def _unfused(module: fx.GraphModule) -> list[tuple[str, str]]:
    found = []
    nodes = list(module.graph.nodes)
    reading = read_nodes(nodes)
    with bind_for("fast"):
        in_fast = read_nodes(nodes)
    for node in module.graph.nodes:
        if node.op in {"placeholder", "output", "get_attr"} or _is_plumbing(node):
            continue
        if _is_fusion(module, node):
            continue
        call = reading.calls[node]
        if node in reading.numbers:
            reason = "arithmetic on numbers is Python's"
        elif call is None and in_fast.calls[node] is not None:
            reason = "strict numerics leave it to torch: in which order that adds up is not known here"
        elif node.target is torch.ops.aten.native_dropout.default and find_obstacle(node):
            reason = f"a dropout: {find_obstacle(node)}"
        elif node.target is draw_dropout_mask:
            reason = "of a dropout: on the CPU torch draws what it keeps"
        elif (call is not None and call.is_view) or _is_torchs_view(node.target):
            reason = "a view, which moves nothing"
        elif call is None and is_known(node.target):
            reason = f"no kernel of fuser's for these arguments: {_target_name(node)}"
        elif bodies_of(module, node):
            count = _count_groups(bodies_of(module, node))
            reason = f"calls other graphs, which have {count} groups of their own"
        elif call is None:
            reason = f"no op of fuser's table: {_target_name(node)}"
        elif bar := find_bar(node, call):
            reason = bar
        elif call.function.op in REDUCTIONS:
            reason = "alone: torch reduces as well as a kernel would"
        elif call.function.op == "convert":
            reason = "torch returns the tensor itself where it has the dtype, and others would see a copy"
        elif call.arranges or gains_nothing([node], reading):
            reason = "alone: torch copies as well as a kernel would"
        else:
            reason = "no pass put it into a group (is there fuel?)"
        found.append((node.name, reason))
    return found


def _is_torchs_view(target: Any) -> bool:
    return getattr(target, "is_view", False) or target in UNSAFE_VIEWS


def _count_groups(bodies: Mapping[str, fx.GraphModule]) -> int:
    own = sum(_is_fusion(body, node) for body in bodies.values() for node in body.graph.nodes)
    return own + sum(_count_groups(find_bodies(body)) for body in bodies.values())


def _is_plumbing(node: fx.Node) -> bool:
    is_tuple = isinstance(node.target, type) and issubclass(node.target, tuple)
    return is_tuple or getattr(node.target, "__name__", "") == "getitem"


def _target_name(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, str) else torch.typename(node.target)


class _Recorder(fx.Interpreter):
    """Runs a graph and notes the inputs of each fusion node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.inputs: dict[str, tuple[Any, ...]] = {}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.inputs[str(target)] = args
        return super().call_module(target, args, kwargs)

    def reports(self) -> list[GroupReport]:
        found = []
        graph_module = self.module
        assert isinstance(graph_module, fx.GraphModule), "__init__ took one"
        for node in graph_module.graph.nodes:
            fusion = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(fusion, FusionModule):
                found.append(_report(fusion.group, fusion.node_names, self.inputs.get(str(node.target), ())))
        return found
