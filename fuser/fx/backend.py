"""``torch.compile(model, backend="fuser")``: AOTAutograd, then fusion nodes in the forward and backward graphs."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._inductor import codecache
from torch.compiler import config as compiler_config
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils.checkpoint import CheckpointPolicy

from fuser import library, log
from fuser._version import __version__
from fuser.compiler import backend_for, registered
from fuser.config import config
from fuser.errors import ArgumentError
from fuser.fx.ahead import Ahead, load_compilers
from fuser.fx.buffers import (
    copy_together,
    drop_unread,
    write_results_in_place,
    write_statistics_in_place,
)
from fuser.fx.convolution_biases import add_biases_apart, sum_biases_apart
from fuser.fx.cuda_graphs import CudaGraphs
from fuser.fx.dropouts import Otherwise, find_dropouts, open_dropouts
from fuser.fx.equal_nodes import merge_equal
from fuser.fx.flat import FlatGraph, flatten
from fuser.fx.idle_copies import drop_idle_copies
from fuser.fx.idle_views import drop_idle_views
from fuser.fx.lists import fuse_lists
from fuser.fx.masks import drop_idle_masks
from fuser.fx.nodes import UNSAFE_VIEWS
from fuser.fx.norm_rows import lay_out_norms, part_column_sums
from fuser.fx.norms_again import POINTWISE, join_norms, part_norms
from fuser.fx.odd_products import describe_choice, order_products
from fuser.fx.outer_products import open_outer_products
from fuser.fx.passes import Fuel, FusionPass
from fuser.fx.pooling import narrow_places
from fuser.fx.products import pad_products
from fuser.fx.puts import sort_puts
from fuser.fx.reuse import write_over_dead
from fuser.fx.scatters import mark_scatters, write_scatters_in_place
from fuser.fx.schedule import free_early, mark_own
from fuser.graph import FusionGroup
from fuser.planner import can_fuse
from fuser.tuning.table import latest
from fuser.warming.graphs import follow_graph

__all__ = ["build_backend", "compile_graph", "fuser_backend"]


def compile_graph(
    graph_module: fx.GraphModule,
    numerics: str | None = None,
    fuel: Fuel | None = None,
    ahead: Ahead | None = None,
) -> FlatGraph:
    """Compile one ATen graph (forward or backward) of AOTAutograd: substitute fusion nodes, run the rest eagerly.

    Args:
        graph_module: is changed.
        numerics: as in FusionPass.
        fuel: likewise.
        ahead: plans the calls of the fusion nodes; None: the first call does.

    Returns:
        A function of a list of arguments, which it empties.
    """
    chosen = numerics or config.numerics
    drop_idle_copies(graph_module.graph)
    if chosen == "fast":
        pad_products(graph_module.graph)
    else:
        order_products(graph_module.graph)
    open_outer_products(graph_module.graph, chosen)
    add_biases_apart(graph_module.graph)
    sum_biases_apart(graph_module.graph)
    if chosen == "strict":
        # In another order kernels read what lies anywhere.
        lay_out_norms(graph_module.graph)
        part_column_sums(graph_module.graph)
    dropouts = find_dropouts(graph_module.graph)
    orders = tuple(dict.fromkeys(item.order for item in dropouts if item.order))
    as_it_was = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph)) if orders else None
    open_dropouts(dropouts, beside_reductions=chosen == "strict")
    made = flatten(_fuse(graph_module, numerics, fuel, ahead))
    if as_it_was is None:
        return made
    return made.unless(Otherwise(orders), flatten(_fuse(as_it_was, numerics, fuel, ahead)))


def _fuse(graph_module: fx.GraphModule, numerics: str | None, fuel: Fuel | None, ahead: Ahead | None) -> fx.GraphModule:
    fuse_lists(graph_module, numerics, fuel)
    sort_puts(graph_module, numerics or config.numerics, fuel)
    mark_scatters(graph_module.graph)
    FusionPass(numerics=numerics, fuel=fuel)(graph_module)
    if ahead is not None:
        ahead.add(graph_module)
    write_scatters_in_place(graph_module)
    write_statistics_in_place(graph_module)
    write_results_in_place(graph_module)
    copy_together(graph_module)
    drop_idle_views(graph_module.graph)
    free_early(graph_module)
    write_over_dead(graph_module)
    if ahead is not None:
        # Those that are told where to write are calls of another kind.
        ahead.add(graph_module)
    return graph_module


def build_backend(compile_as: Callable[[str], Callable[..., Any]], numerics: str | None) -> Callable[..., Any]:
    """Return a backend for torch.compile of what compiles a graph of each kind: forward, backward, inference."""
    after: Callable[..., Any] = aot_autograd(
        fw_compiler=compile_as("forward"),
        bw_compiler=compile_as("backward"),
        inference_compiler=compile_as("inference"),
        partition_fn=split_passes,
        # Buffers are written to in the graph.
        keep_inference_input_mutations=True,
    )

    def backend(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        drop_idle_masks(graph_module, is_strict=(numerics or config.numerics) == "strict")
        return after(graph_module, example_inputs)

    return backend


def fuser_backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Backend for torch.compile, registered under the name "fuser" by an entry point.

    Args:
        graph_module: what Dynamo traced.
        example_inputs: one per placeholder.
        mode: as torch.compile takes it: "default"; "reduce-overhead", which is ``cuda_graphs``; "max-autotune", which
            is ``autotune`` too; "max-autotune-no-cudagraphs".
        options: ``{"cuda_graphs": bool}``: record what a pass launches as a CUDA graph, and replay it;
            ``{"numerics": "strict" or "fast"}``, ``{"autotune": bool}``: in place of the settings;
            ``{"fuel": int}``: fuse no more groups than that in each graph of Dynamo's, forward and backward together.

    What was compiled is kept by AOTAutograd's cache, as Inductor's is (``torch.compiler.config``), but with CUDA
    graphs, ``autotune`` or ``fuel``, where floats differ from call to call, and where kernels are logged or dumped. The
    backward pass is compiled with the forward pass.

    Raises:
        ArgumentError: an unknown mode or option.
    """
    assert library.LIBRARY is not None, "torch.ops.fuser exists"
    chosen = read_options(mode, options)
    graphs = CudaGraphs() if chosen["cuda_graphs"] else None
    fuel = None if chosen["fuel"] is None else Fuel(chosen["fuel"])

    # A search for the fastest tuning needs the tensors of a call.
    is_tuned = config.autotune if chosen["autotune"] is None else chosen["autotune"]
    ahead = Ahead()

    def compile_flat(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        run = compile_graph(graph, chosen["numerics"], fuel, None if is_tuned else ahead)
        return run if chosen["autotune"] is None else _first_under(run, autotune=chosen["autotune"])

    def compile_as(kind: str) -> Callable[..., Any]:
        def compile_pass(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            if kind == "backward":
                _keep_saved()
            if graphs is None or not any(isinstance(item, torch.Tensor) and item.is_cuda for item in inputs):
                run = compile_flat(graph)
                follow_graph(run, inputs)
            else:
                run = graphs.wrap(graph, inputs, compile_flat, kind)
            if kind != "forward":
                # The last one: what is kept now has its plans.
                ahead.wait()
            return run

        return compile_pass if not is_kept else SerializableAOTDispatchCompiler(FlatGraph, compile_pass)  # type: ignore[arg-type]

    # What is recorded, or depends on what was compiled before, is nothing that another process could use.
    is_kept = all(chosen[name] == OPTIONS[name][0] for name in OPTIONS if name != "numerics") and config.fuel is None
    # What is looked at is made here: a graph from the cache has its kernels, and none of their texts.
    is_looked_at = config.dump is not None or any(map(log.wants, ("node", "spec", "source", "compile")))
    is_kept = is_kept and not is_looked_at and not _takes_floats(graph_module)
    backend = build_backend(compile_as, chosen["numerics"])
    # Both passes are one entry of the cache.
    with (
        ahead,
        patch.object(codecache.CacheBase, "get_system", _describe_system),
        patch.object(codecache, "torch_key", _describe_torch),
        patch.multiple(codecache, create=True, **NO_GENERATORS),
        # What runs is another function, and the code of graph modules is written for those who ask.
        _use_lazy_graph_module(True),
        functorch_config.patch(bundled_autograd_cache=is_kept, force_non_lazy_backward_lowering=True),
        compiler_config.patch(cache_key_tag=_cache_tag(chosen["numerics"], example_inputs)),  # type: ignore[attr-defined]
    ):
        compiled: Callable[..., Any] = backend(graph_module, example_inputs)
    return compiled


def _takes_floats(graph_module: fx.GraphModule) -> bool:
    # Whether there are symbols for Python's floats. AOTAutograd writes the value of one into its graph where no tensor
    # can stand for it, and tells Dynamo to compile anew for others; a graph from its cache would be taken for all.
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    items = [node for graph in graphs for node in graph.find_nodes(op="call_method", target="item")]
    return any(isinstance(node.meta.get("example_value"), torch.SymFloat) for node in items)


def _keep_saved() -> None:
    """Let the backward pass run again (``retain_graph=True``): it writes to nothing that the forward pass saved."""
    found = TracingContext.try_get()
    given = found and found.fw_metadata and found.fw_metadata.bw_donated_idxs
    if given:
        # The list that the autograd function asks, too.
        given.clear()


def _first_under(run: Callable[[list[Any]], Any], **settings: Any) -> Callable[[list[Any]], Any]:
    """Return a function whose first call runs under other settings."""
    is_first = True

    def run_first(arguments: list[Any]) -> Any:
        nonlocal is_first
        if not is_first:
            return run(arguments)
        is_first = False
        with config.patch(**settings):
            return run(arguments)

    run_first._boxed_call = True  # type: ignore[attr-defined]
    return run_first


def _cache_tag(numerics: str | None, inputs: Sequence[Any] = ()) -> str:
    """Return what a graph depends on beside what AOTAutograd's key has: settings, aliases, ranks, and fuser itself."""
    # Where fusion is off, plans are to run in eager torch, and are kept beside the graph.
    key = *config.code_key(numerics=numerics or config.numerics), can_fuse("cpu"), can_fuse("cuda")
    known = f"{compiler_config.cache_key_tag} fuser {__version__} {_fingerprint()} {key} {latest()} {describe_choice()}"
    return f"{known} {_find_aliases(inputs)} {_describe_rank()}"


def _find_aliases(inputs: Sequence[Any]) -> list[list[tuple[int, Any]]]:
    # Which inputs lie in one memory, and where: what is written to one of them is written to others.
    found: dict[int, list[tuple[int, Any]]] = {}
    for slot, item in enumerate(inputs):
        if isinstance(item, torch.Tensor) and torch._C._has_storage(item):
            found.setdefault(item.untyped_storage()._cdata, []).append((slot, item.storage_offset()))
    return [shared for shared in found.values() if len(shared) > 1]


def _describe_rank() -> tuple[Any, ...]:
    # Which rank this is, and what the groups that its graphs name are. AOTAutograd's key has a DTensor's mesh, which is
    # the same on all ranks; each takes other shards of what is whole everywhere, and they share what is kept.
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    world = dist.distributed_c10d._world
    groups = sorted((name, sorted(world.pg_group_ranks[group].items())) for group, name in world.pg_names.items())
    return dist.get_rank(), groups


def _describe_system() -> dict[str, Any]:
    # Inductor's key has also which Triton there is: half a second to hash what nothing here depends on.
    has_device = torch.cuda.is_available()
    name = torch.cuda.get_device_name(torch.cuda.current_device()) if has_device else None
    # Machines may share a folder: kernels have the instructions of one processor, and were compared with torch's, which
    # have others on another one.
    host = f"{backend_for('cpu').target(None)} {torch.backends.cpu.get_cpu_capability()}"
    return {"hash": f"{name} {torch.version.cuda} {host}"}


@functools.cache
def _describe_torch() -> bytes:
    # torch's own reads all of its sources, which takes as long as all else that is done here for a graph that is kept.
    # An edited file has another time.
    found = hashlib.sha256(torch.__version__.encode())
    folders = [str(Path(torch.__file__).parent)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir(follow_symlinks=False):
                    folders += [] if entry.name in OTHER_FOLDERS else [entry.path]
                elif entry.name.endswith(".py"):
                    state = entry.stat()
                    found.update(f"{entry.path} {state.st_size} {state.st_mtime_ns}".encode())
    return found.digest()


@functools.cache
def _fingerprint() -> str:
    # Nothing where there are no sources: in an archive, or compiled ones alone.
    files = sorted(Path(library.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


# Of torch's, those without sources in Python that it runs.
OTHER_FOLDERS = frozenset({"__pycache__", "bin", "include", "lib", "share", "test"})
# Inductor's key has also what its code generators do. Nothing here is made by them, and to import them takes as long as
# all else of a first step that finds its graphs.
NO_GENERATORS: dict[str, Any] = {
    "init_backend_registration": lambda: None,
    "custom_backend_passes": {},
    "custom_backend_codegen_configs": {},
}
MODES: dict[str | None, dict[str, Any]] = {
    None: {},
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"cuda_graphs": True, "autotune": True},
    "max-autotune-no-cudagraphs": {"autotune": True},
}
# Of each option its default, and what it may be; a range stands for all its integers.
OPTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cuda_graphs": (False, (False, True)),
    "numerics": (None, ("strict", "fast", None)),
    "autotune": (None, (False, True, None)),
    "fuel": (None, (range(sys.maxsize), None)),
}


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the value of every option.

    Raises:
        ArgumentError: an unknown mode, option or value.
    """
    if mode not in MODES:
        raise ArgumentError(f"mode={mode!r}: backend 'fuser' has {', '.join(repr(name) for name in MODES if name)}")
    given = {**MODES[mode], **(options or {})}
    for name, value in given.items():
        if name not in OPTIONS:
            raise ArgumentError(f"option {name!r}: backend 'fuser' has {', '.join(OPTIONS)}")
        allowed = OPTIONS[name][1]
        if not any(_is_one_of(value, item) for item in allowed):
            choices = ", ".join("integers from 0" if isinstance(item, range) else repr(item) for item in allowed)
            raise ArgumentError(f"option {name!r} is {value!r}: must be one of {choices}")
    return {name: default for name, (default, _) in OPTIONS.items()} | given


def _is_one_of(value: Any, allowed: Any) -> bool:
    # A bool is no integer.
    if isinstance(allowed, range):
        return type(value) is int and value in allowed
    return type(value) is type(allowed) and bool(value == allowed)


def split_passes(joint: fx.GraphModule, inputs: Any, **settings: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward: what is cheap to compute again is not kept for the backward pass.

    torch's own partitioner (``min_cut_rematerialization_partition``), which learns here that functors are as cheap as
    torch's pointwise ops, but for those with loops. In an activation checkpoint its policy decides.
    """
    load_compilers(joint)
    drop_unread(joint)
    narrow_places(joint)
    drop_idle_copies(joint.graph)
    run = torch.ops.fuser.run.default
    for node in joint.graph.nodes:
        if node.target is run and _is_costly(registered(node.args[0]).group):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    # No reductions of theirs.
    are_parted = part_norms(joint)
    known = partitioners.get_default_op_list()
    # A log-sigmoid keeps something for its derivative on the CPU, which fuser's does not read.
    cheap = {run.overloadpacket, torch.ops.aten.log_sigmoid_forward, *(view.overloadpacket for view in UNSAFE_VIEWS)}
    if are_parted:
        # With what comes after a norm its results are computed again: torch's list is of what Inductor makes of it.
        cheap |= {torch.ops.aten.batch_norm_elemt, *POINTWISE}
    ops = replace(known, recomputable_ops=known.recomputable_ops | cheap, fusible_ops=known.fusible_ops | cheap)
    if functorch_config.cse:
        merge_equal(joint.graph)
    with patch.object(partitioners, "get_default_op_list", lambda: ops), functorch_config.patch(cse=False):
        passes: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(joint, inputs, **settings)
    join_norms(passes[0])
    mark_own(*passes, settings["num_fwd_outputs"])
    return passes


def _is_costly(group: FusionGroup) -> bool:
    functors = [functor for item in group.applications for functor in item.function.functors]
    return group.has_reduction or any(not functor.words.isdisjoint({"for", "while", "do"}) for functor in functors)
