"""Random graphs of every overload that the table of ops has, and of operators of lists: arguments as schemas ask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from aten_graphs import ATEN, DTYPES, AtenWriter, overload
from graph_writer import Program
from torch import fx

from fuser.ops.binding import _functions

__all__ = ["TableWriter", "every_op"]

FLOATS = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.bool)
# What reads and writes at places, which have to be there: a GPU's process ends where they are not.
READS = ["embedding", "gather", "index_select", "index.Tensor"]
WRITES = [
    "scatter_add",
    "scatter.src",
    "scatter.value",
    "index_add",
    "index_copy",
    "index_fill.int_Scalar",
    "index_put",
]
# Of two that meet at one place a GPU keeps either.
DISTINCT = {"scatter.src", "index_copy", "index_put"}
LOSSES = ["nll_loss_forward", "nll_loss_backward"]
# Of pairs of elements: what is an integer would be divided by zero, and probabilities are asked for.
TERMS = ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "poisson_nll_loss"]
TERMS += ["hinge_embedding_loss", "margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss"]
TERMS += ["binary_cross_entropy", "binary_cross_entropy_with_logits", "pairwise_distance"]
TERMS += [f"{name}_backward" for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")]
TERMS += ["binary_cross_entropy_backward"]
# Statistics come from the forward pass.
NORMS = ["native_layer_norm", "_fused_rms_norm", "native_group_norm", "_native_batch_norm_legit_functional"]
NORMS += ["_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_no_training", "batch_norm_elemt"]
BACKWARD = ["native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward"]
BACKWARD += ["native_batch_norm_backward"]
FURTHER = [*WRITES, "native_dropout", "rand_like", "bernoulli.p", "cumsum", "flip", "roll", "topk"]


@functools.cache
def every_op() -> list[Any]:
    """Return the overloads that the writer draws."""
    every = torch._C._dispatch_get_all_op_names()
    names = {item.partition("::")[2] for item in every if "aten::_foreach_" in item} - {"_foreach_mm"}
    lists = [item for item in map(overload, names) if not item._schema.is_mutable]
    bound = [target for target in _functions() if isinstance(target, torch._ops.OpOverload)]
    return sorted({*bound, *lists, *map(overload, FURTHER)}, key=str)


class TableWriter(AtenWriter):
    """Writes such a graph, with views, copies and conversions between, as ``AtenWriter`` has them."""

    dtypes = (*DTYPES, torch.float16, torch.int32)

    def choose(self) -> Program:
        """Choose what is called, with what."""
        if self.draw.random() < 0.3:
            return super().choose()
        return self.call(self.draw.choice(every_op()))

    def call(self, target: Any) -> Program:
        """Return a call of an overload."""
        x = self.pick(*self.draw.choice([FLOATS, FLOATS, FLOATS, INTEGERS, ()]))
        choose = self.special.get(_name(target), self.by_schema)
        return choose(x, target, _name(target))

    def by_schema(self, x: fx.Node, target: Any, name: str) -> Program:
        """Choose arguments of the kinds that a schema names; some of those that have defaults are left out."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        is_open, tensors = True, iter([x])
        for argument in target._schema.arguments:
            if argument.has_default_value() and self.draw.random() < 0.4:
                is_open &= argument.kwarg_only
            elif argument.kwarg_only:
                kwargs[argument.name] = self.make(argument.name, str(argument.real_type), x, tensors)
            elif is_open:
                args.append(self.make(argument.name, str(argument.real_type), x, tensors))
        return target, tuple(args), kwargs

    def make(self, name: str, kind: str, x: fx.Node, first: Any) -> Any:
        """Return an argument.

        Args:
            name: of the parameter.
            kind: its type, as the schema writes it.
            x: what comes first.
            first: yields that; afterwards tensors that go with it, or do not.
        """
        draw, value = self.draw, self.values[x]
        if kind.startswith("Optional["):
            return None if draw.random() < 0.5 else self.make(name, kind[9:-1], x, first)
        if kind == "Tensor":
            is_bool = name in {"condition", "mask"}
            others = [self.pick(torch.bool)] if is_bool else [self.same(x), self.same(x)]
            others += [self.pick(value.dtype)] * (name != "output")
            return next(first, None) or draw.choice(others) if not is_bool else others[0]
        if kind == "List[Tensor]":
            count = draw.randint(2, 4)
            return [next(first, None) or self.same(x) for _ in range(count)]
        rank = value.dim()
        dim = draw.randrange(-rank, rank) if rank else 0
        # None of the largest elements of a tensor without dimensions is memory that torch has not written.
        first = int(name == "k" and not rank)
        ends = {"step": (1, 2), "diagonal": (-1, 1)}.get(name, (first, value.shape[dim] if rank else 1))
        makers: dict[str, Callable[[], Any]] = {
            "bool": lambda: draw.random() < 0.5,
            "ScalarType": lambda: value.dtype if name == "input_dtype" else draw.choice([value.dtype, *DTYPES]),
            "Device": lambda: value.device,
            "Layout": lambda: torch.strided,
            "Generator": lambda: None,
            "MemoryFormat": lambda: draw.choice([torch.contiguous_format, torch.preserve_format]),
            "str": lambda: draw.choice({"approximate": ["none", "tanh"]}.get(name, ["trunc", "floor"])),
            "float": lambda: {"eps": 1e-5, "scale": 1.0}.get(name, draw.choice([0.5, -1.5, 2.0])),
            "number": lambda: draw.choice([0, 1, 2, 0.5, -1.5, 3]),
            "int": lambda: dim if "dim" in name else draw.randint(*ends),
            "List[number]": lambda: [draw.choice([1, 0.5, 2]) for _ in range(2)],
        }  # fmt: skip
        if kind != "List[int]":
            return makers[kind]()
        dims = draw.sample(range(rank), rank)
        shapes: list[Any] = [[-1], [2, -1], [*value.shape[:-1], 2, -1], [2, *value.shape], [4, 6]]
        if name == "pad":
            return [0, 0] * draw.randrange(max(rank, 1)) + draw.choice([[1, 2], [0, 3], [2, 0], [-1, 1], [1, 0, 0, 2]])
        return {"dims": dims, "dim": dims[: draw.randint(1, 2)]}.get(name, draw.choice(shapes))

    def of(self, x: fx.Node, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> fx.Node | None:
        """Return a value of a shape and of some dtype, made if there is none; or none at all."""
        dtype = self.draw.choice(dtypes)
        if self.draw.random() < 0.3:
            return None
        fits = [node for node, value in self.values.items() if value.shape == shape and value.dtype is dtype]
        more = {"dtype": dtype, "device": self.values[x].device, "pin_memory": False}
        return self.draw.choice(fits) if fits else self.add(ATEN.full.default, (list(shape), 1.5), more)

    def places(self, x: fx.Node, count: int, length: int, *, are_distinct: bool = False) -> fx.Node | None:
        """Return a value of indices below a count, often a vector of a length; None if there can be none."""
        if not count:
            return None
        step = 1 if are_distinct else 2
        more = {"start": 1, "step": step, "dtype": torch.int64, "device": self.values[x].device, "requires_grad": False}
        made = self.add(torch.ops.prims.iota.default, (length,), more)
        chosen = made if self.draw.random() < 0.5 or are_distinct else self.pick(torch.int64)
        return self.add(ATEN.remainder.Scalar, (chosen, count), {})

    def read(self, x: fx.Node, target: Any, name: str) -> Program:
        """Choose a read, or a write, at places."""
        value, packet = self.values[x], name.partition(".")[0]
        dim = self.draw.randrange(max(value.dim(), 1)) if packet not in {"embedding", "index", "index_put"} else 0
        size = value.shape[dim] if value.dim() else 0
        places = self.places(x, size, size, are_distinct=name in DISTINCT)
        if places is None:
            return ATEN.neg.default, (x,), {}
        source = self.draw.choice([self.same(x), self.pick(value.dtype)])
        arguments: dict[str, tuple[Any, ...]] = {
            "embedding": (x, places), "index": (x, [places]), "gather": (x, dim, places),
            "index_select": (x, dim, places), "scatter.value": (x, dim, places, 2),
            "index_fill.int_Scalar": (x, dim, places, 2), "index_put": (x, [places], source),
        }  # fmt: skip
        return target, arguments.get(packet, arguments.get(name, (x, dim, places, source))), {}

    def loss(self, x: fx.Node, target: Any, name: str) -> Program:
        """Choose a loss of classes, or its gradient."""
        value = self.values[x]
        classes = self.places(x, *(value.shape[::-1] if value.dim() == 2 else (0, 0)))
        if classes is None:
            return ATEN._log_softmax.default, (x, -1, False), {}
        reduction = self.draw.choice([0, 1, 2])
        arguments = (None, reduction, -100)
        made = self.add(ATEN.nll_loss_forward.default, (x, classes, *arguments), {}, share=1)
        if made is None or name == "nll_loss_forward":
            return ATEN.neg.default, (x,), {}
        loss, total = made.users
        return target, (loss, x, classes, *arguments, total), {}

    def terms(self, x: fx.Node, target: Any, name: str) -> Program:
        """Choose a loss of pairs of elements, or its gradient."""
        draw = self.draw
        if not self.values[x].dtype.is_floating_point:
            return ATEN.neg.default, (x,), {}
        is_likely = name.startswith("binary_cross_entropy") and "logits" not in name
        if is_likely:
            # A GPU's process ends where one is no probability, NaN for one.
            x = self.add(ATEN.nan_to_num.default, (x,), {}) or x
            x = self.add(ATEN.sigmoid.default, (x,), {}) or x
        numbers = {"beta": 0.5, "delta": 0.75, "margin": draw.choice([0.5, 0.3]), "p": 2.0, "eps": 1e-6}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in target._schema.arguments:
            kind, item = str(argument.real_type), argument.name
            if kind == "Tensor":
                is_first = item in {"self", "input", "input1", "anchor", "x1"}
                value = x if is_first or (is_likely and item == "target") else draw.choice([self.same(x), x])
                if name == "cosine_embedding_loss" and item == "target":
                    value = self.add(ATEN.sum.dim_IntList, (x, [-1]), {})
            elif kind.startswith("Optional"):
                value = draw.choice([None, None, self.same(x)])
            else:
                value = numbers.get(item, draw.randint(0, 2) if kind == "int" else draw.random() < 0.5)
            if argument.kwarg_only:
                kwargs[item] = value
            else:
                args.append(value)
        return target, tuple(args), kwargs

    def norm(self, x: fx.Node, target: Any, name: str) -> Program:
        """Choose a norm."""
        value = self.values[x]
        of = lambda shape: self.of(x, shape, [value.dtype, value.dtype, torch.float32])  # noqa: E731
        if name in {"native_layer_norm", "_fused_rms_norm"}:
            shape = value.shape[-self.draw.randint(1, max(value.dim(), 1)) :]
            rest = (of(shape), of(shape), 1e-5) if name == "native_layer_norm" else (of(shape), 1e-5)
            return target, (x, list(shape), *rest), {}
        channels = [value.shape[1] if value.dim() > 1 else 1]
        weight, bias, mean, var = (of(channels) for _ in range(4))
        if name == "native_group_norm":
            sizes = (*value.shape[:2], value[0, 0].numel() if value.dim() > 1 and value.numel() else 1)
            return target, (x, weight, bias, *sizes, self.draw.choice([1, 2]), 1e-5), {}
        kept = [item if item is None else self.values[item].dtype for item in (mean, var)]
        if (None in kept or kept[0] != kept[1]) and not name.endswith("no_stats"):
            # Torch takes None for a tensor here, and one dtype for the other: on a GPU it reads what is not there.
            return ATEN.neg.default, (x,), {}
        if var is not None:
            var = self.add(ATEN.abs.default, (var,), {})
        more: dict[str, tuple[Any, ...]] = {
            "_native_batch_norm_legit_functional": (weight, bias, mean, var, True, 0.1, 1e-5),
            "_native_batch_norm_legit.no_stats": (weight, bias, True, 0.1, 1e-5),
            "_native_batch_norm_legit_no_training": (weight, bias, mean, var, 0.1, 1e-5),
            "batch_norm_elemt": (weight, bias, mean, var, 1e-5),
        }
        return target, (x, *more[name]), {}

    def norm_backward(self, x: fx.Node, target: Any, name: str) -> Program:
        """Choose a norm's gradient, with the norm before it."""
        forward = {"native_batch_norm_backward": "_native_batch_norm_legit_functional"}
        own = forward.get(name, name.removesuffix("_backward"))
        _, args, _ = self.norm(x, overload(own), own)
        made = self.add(overload(own), args, {}, share=1)
        if made is None:
            return ATEN.neg.default, (x,), {}
        _, *saved = list(made.users)[:3]
        gradient, mask = self.same(x), [self.draw.random() < 0.7 for _ in range(3)]
        # Torch's CPU kernel for channels_last writes to the first one, wanted or not.
        mask[0] |= name == "native_group_norm_backward"
        more: dict[str, tuple[Any, ...]] = {
            "native_layer_norm_backward": (*args[1:2], *saved, *args[2:4], mask),
            "_fused_rms_norm_backward": (*args[1:2], *saved[:1], args[2], mask[:2]),
            "native_group_norm_backward": (*saved, args[1], *args[3:7], mask),
            "native_batch_norm_backward": (args[1], *args[3:5], *saved, True, 1e-5, mask),
        }
        return target, (gradient, x, *more[name]), {}

    def log_sigmoid(self, x: fx.Node, target: Any, name: str) -> Program:
        """Choose the gradient of what keeps a buffer, on the CPU, that CUDA makes again."""
        made = self.add(ATEN.log_sigmoid_forward.default, (x,), {}, share=1)
        return (ATEN.neg.default, (x,), {}) if made is None else (target, (self.same(x), x, list(made.users)[1]), {})

    def halves(self, x: fx.Node, target: Any, name: str) -> Program:
        """Choose a gate: without a kernel its halves are put together, and ATen's CPU takes another exp by layout."""
        if self.device == "cpu":
            x = self.add(ATEN.clone.default, (x,), {"memory_format": torch.contiguous_format}) or x
        return target, (x, self.draw.randrange(max(self.values[x].dim(), 1))), {}

    def part(self, x: fx.Node, target: Any, name: str) -> Program:
        """Choose a slice's gradient, or a tensor with a part of another one."""
        rank = self.values[x].dim()
        dim = self.draw.randrange(max(rank, 1))
        if name == "select_scatter":
            part = self.add(ATEN.select.int, (self.same(x), dim, 0), {})
            return (ATEN.neg.default, (x,), {}) if part is None else (target, (x, part, dim, -1), {})
        if name == "slice_backward":
            return target, (x, *self.whole(x, dim, self.draw.randint(0, 2))), {}
        shape = list(self.values[x].shape)
        return target, (x, [*shape[:dim], 3, *shape[dim:]], dim, 1), {}

    def lists(self, x: fx.Node, target: Any, name: str) -> Program:
        """Choose an operator of lists, which has tensors of a shape at each position."""
        first = [x, *(self.pick(self.values[x].dtype) for _ in range(self.draw.randint(1, 3)))]
        args: list[Any] = []
        for argument in target._schema.arguments:
            kind = str(argument.real_type)
            if kind == "List[Tensor]":
                args.append(first if not args else [self.same(item) for item in first])
            elif kind == "List[number]":
                args.append([self.draw.choice([1, 0.5, 2]) for _ in first])
            elif argument.name == "scalars":
                args.append(self.add(ATEN.full.default, ([len(first)], 0.5), {"pin_memory": False}))
            elif not argument.has_default_value():
                args.append(self.make(argument.name, kind, x, iter(())))
        return target, tuple(args), {}

    @functools.cached_property
    def special(self) -> dict[str, Callable[..., Program]]:
        """What chooses the arguments of an overload, by its name, where its schema says too little."""
        lists = [name for name in map(_name, every_op()) if name.startswith("_foreach")]
        return {
            **dict.fromkeys([*READS, *WRITES], self.read),
            **dict.fromkeys(LOSSES, self.loss),
            **dict.fromkeys(TERMS, self.terms),
            **dict.fromkeys(NORMS, self.norm),
            **dict.fromkeys(BACKWARD, self.norm_backward),
            **dict.fromkeys(["slice_backward", "select_backward", "select_scatter"], self.part),
            "log_sigmoid_backward": self.log_sigmoid,
            "glu": self.halves,
            **dict.fromkeys(lists, self.lists),
        }


def _name(target: Any) -> str:
    return str(target).removeprefix("aten.").removesuffix(".default")
