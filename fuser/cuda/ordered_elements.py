"""What each thread reads, computes and writes of a row whose order is that of one of torch's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fuser.codegen import Operand, RowLoop
from fuser.cuda.row_text import in_turns, indent
from fuser.cuda.rows_along import AlongText
from fuser.orders import RowOrder
from fuser.row_parts import Accumulator, RowPart, RowPass

__all__ = ["OrderedElements"]


@dataclass(frozen=True, slots=True)
class _Site:
    """Elements that a thread computes: those of its vectors, or the one that lies before or after them."""

    # At the end of variables.
    suffix: str
    # Elements of a vector, and vectors.
    vector: str
    unroll: str
    # Which element the u-th vector begins with, and whether there is one.
    first: str
    is_there: str
    # Which accumulator the k-th element of it goes to.
    accumulator: str
    # Whether there is any.
    is_any: str = ""
    # Where the u-th vector lies, as what all of a thread's have in common and a constant; "" where that is not so.
    place: str = ""

    def guarded(self, lines: list[str]) -> list[str]:
        """Return lines that run where there is any."""
        return [f"if ({self.is_any}) {{", *indent(lines), "}"] if self.is_any else lines


_HEAD = _Site(
    "_head", "1", "E", "u * N + slot - shift", "t % F == 0 && u * N + slot >= shift && u * N + slot < H", "u % E",
    "shift > 0",
)  # fmt: skip
_TAIL = _Site(
    "_tail", "1", "((R - 1) / S + 1) * E", "end + u * N + slot", "t % F == 0 && n < length", "u % E",
    "end + slot < length", "(end + slot) + u * N",
)  # fmt: skip


class OrderedElements(AlongText):
    """Writes the elements of such a kernel: those of vectors, and what lies before and after them."""

    def __init__(self, loop: RowLoop) -> None:
        super().__init__(loop)
        assert loop.rows.order is not None, "it is a kernel in torch's order"
        self.order: RowOrder = loop.rows.order
        begin, end = ("head + begin", "end") if self.order.has_edges else ("begin", "length")
        # Whether a thread has what neighbours among torch's threads have, one element of each at a time.
        self.is_wide = self.order.schedule.vector < loop.vector or self.order.schedule.rises
        # Of how many of torch's threads, a part of a warp apart, a thread does the work.
        self.threads = 1 if self.is_wide else max(self.order.schedule.x * self.order.schedule.y // loop.tuning.team, 1)
        first = f"{begin} + (u * S * F + block * T + t) * V" if loop.tuning.piece else f"{begin} + (u * T + t) * V"
        accumulator, is_there = "k % A" if self.order.schedule.vector > 1 or self.is_wide else "u % A", ""
        if loop.tuning.is_resident:
            # All but the last vectors of a thread are there; of each slot, one less where rows have edges.
            threads = 1 if self._spreads else self.threads
            whole = _last_vectors(loop.tuning.unroll // threads) + self.order.has_edges * self._own_slots
            is_there = f"u < U - {whole * threads} || "
        place = "" if loop.tuning.piece or self.threads > 1 else f"({begin} + t * V) + u * (T * V)"
        if self._spreads:
            first, self.threads = f"{begin} + (u * N + slot) * V", 1
            place = f"({begin} + slot * V) + u * (N * V)"
            accumulator = "k % A" if self.is_wide else "u % A"
        elif self.threads > 1:
            first = "(u / Q * S + t / (X / Q) * X + u % Q * (X / Q) + t % (X / Q)) * V"
            accumulator = "u % Q"
        self._main = _Site("", "V", "U", first, f"{is_there}n < {end}", accumulator, place=place)
        self._sites = (_HEAD, self._main, _TAIL) if self.order.has_edges else (self._main,)

    @property
    def _spreads(self) -> bool:
        # Whether each of torch's threads is one accumulator, of which a thread may have several.
        return self.order.spreads

    @property
    def _own_slots(self) -> int:
        # How many of them a thread has.
        threads = self.tuning.team * self.tuning.cluster
        return self.order.schedule.slots // threads if self._spreads else 1

    @property
    def _is_full(self) -> bool:
        # Whether all vectors of all threads are there.
        threads = self.tuning.team * self.tuning.cluster
        is_whole = self.tuning.multiple == self.tuning.unroll * threads * self.loop.vector
        return self._spreads and self.tuning.is_resident and is_whole

    @property
    def _is_ragged(self) -> bool:
        return self.order.is_ragged or (self.is_wide and not self.tuning.multiple)

    def _edges(self) -> list[str]:
        if not self.order.has_edges:
            return []
        shift = "at % (V * F) * (length % (V * F)) % (V * F)"
        if self.order.source >= 0:
            name = next(item.name for item in self.loop.operands if item.variable == f"v{self.order.source}")
            shift = f"reinterpret_cast<size_t>(row.{name}) / sizeof(*row.{name}) % (V * F)"
        return [
            "// Vectors begin where memory is aligned.",
            f"const int shift = static_cast<int>({shift});",
            "const fuser_index head = shift > 0 ? H - shift : 0, end = head + (length - head) / R * R;",
        ]

    def _resident(self) -> list[Operand]:
        # The inputs that are read before all passes.
        if not self.tuning.is_resident:
            return []
        elements = [step.element for step in self.loop.passes]
        first = self._inputs(elements[0]) if elements[0] else []
        rest = [item for element in elements[1:] if element for item in self._inputs(element)]
        return list(dict.fromkeys([*first, *(item for item in rest if item.access.is_early)]))

    def _inputs(self, element: RowPart) -> list[Operand]:
        return [item for item in self.full(element) if not (item.is_output or item.is_counter)]

    def _kept_vectors(self) -> list[str]:
        # Where vectors begin, and what a thread reads once and several passes use.
        lines = self._edges()
        if not self.tuning.is_resident:
            return lines
        for site in self._sites:
            lines += [self._declare(item, site) for item in self._resident()]
            spare = self.tuning.spare if site is self._main else 0
            for name in self.loop.kept:
                kind, count = self._kept(name, site), f"{site.unroll} - {spare}" if spare else site.unroll
                lines.append(f"{kind} {name}{site.suffix}[{count}];")
                if spare:
                    size = f"{spare * self.tuning.block} * sizeof({kind})"
                    lines.append(f"alignas(16) __shared__ unsigned char shared_{name}[{size}];")
                    place = f"reinterpret_cast<uint4*>(shared_{name}) + threadIdx.x"
                    lines.append(f"uint4* const spare_{name} = {place};")
        return lines

    def _kept(self, name: str, site: _Site) -> str:
        return f"fuser_vector<{self.loop.kept_types[name]}, {site.vector}>"

    def _has_pairs(self, step: RowPass) -> bool:
        # Whether it finds the largest of elements of which two fit in a word.
        return any(item.variable == step.highest and self._is_paired(item) for item in self._resident())

    def _is_paired(self, item: Operand) -> bool:
        # Whether two of its elements are a word, and vectors have all of theirs.
        is_whole = self.loop.vector > 1 and not self._is_ragged
        return is_whole and item.inner == 1 and item.info.dtype.itemsize == 2

    def _find_highest(self, step: RowPass) -> list[str]:
        (item,) = (item for item in self._resident() if item.variable == step.highest)
        name = f"own[0].m{step.accumulators[0].name}"
        return [
            f"fuser_extreme<{item.info.storage}, V, true> highest;",
            *_unrolled([*self._find(self._main), f"if (left > 0) highest.add({item.name}[u]);"], self._main),
            f"{name} = fmax({name}, highest.value());",
        ]

    def _in_turns(self, step: RowPass, element: RowPart, late: list[Operand]) -> list[str]:
        # What stays in registers beside what does not: a few vectors at a time.
        site = self._main
        loads = [f"{item.name}[u % L] = {self._read_at(item, site)};" for item in late]
        known = {item: f"{item.name}[u % L]" for item in late}
        return in_turns(
            [self._declare(item, site, "L") for item in late],
            [*self._find(site), *self._coordinates(site), *loads],
            self._quickly(step, element, lambda part: self._compute_one(step, part, site, known)),
        )

    def _declare(self, item: Operand, site: _Site, count: str = "") -> str:
        vector = site.vector if item.inner else "1"
        return f"fuser_vector<{item.info.storage}, {vector}> {item.name}{site.suffix}[{count or site.unroll}];"

    def _find(self, site: _Site) -> list[str]:
        if self._is_full or self._has_whole_chunks or not site.is_there:
            return [f"const fuser_index n = {site.first};", "constexpr int left = V;"]
        left = "(length - n < V ? static_cast<int>(length - n) : V)" if self._is_ragged else site.vector
        return [f"const fuser_index n = {site.first};", f"const int left = {site.is_there} ? {left} : 0;"]

    def _load_at(self, inputs: list[Operand], site: _Site, *, declares: bool = False) -> list[str]:
        if not inputs:
            return []
        declared = [self._declare(item, site) for item in inputs] if declares else []
        own = [f"{item.name}{site.suffix}[u] = {self._read_at(item, site)};" for item in inputs]
        return [*declared, *_unrolled([*self._find(site), *self._coordinates(site), *own], site)]

    def _coordinates(self, site: _Site) -> list[str]:
        if self._is_scattered(site):
            return []
        if len(self.reduced) > 1:
            return ["fuser_index rest = n;", *self.split("rest", self.reduced)]
        return ["const fuser_index i0 = n;"]

    def _place_of(self, item: Operand, site: _Site) -> str:
        if site.place and len(self.reduced) == 1 and item.inner == 1 and not item.is_counter:
            # As for rows in the canonical order: what all vectors of a thread have in common is added once.
            return f"row.{item.name} + {site.place}"
        return self.address(f"row.{item.name}", item, self.reduced)

    def _is_scattered(self, site: _Site) -> bool:
        # Whether a vector may go on along another dimension.
        return len(self.reduced) > 1 and site.vector == "V" and self.loop.vector > 1 and not self.tuning.multiple

    def _lookup(self, item: Operand) -> str:
        # Where the elements of a scattered vector are.
        strides = ", ".join(self.stride(item, dim) for dim in self.reduced)
        sizes = ", ".join(self.size(dim) for dim in self.reduced)
        return f"fuser_scattered<{len(self.reduced)}>{{{{{sizes}}}, {{{strides}}}}}"

    def _read_at(self, item: Operand, site: _Site) -> str:
        vector = site.vector if item.inner else "1"
        if self._is_scattered(site):
            return f"fuser_pick_up<{vector}>(row.{item.name}, {self._lookup(item)}, n, left)"
        place = self._place_of(item, site)
        if item.inner == 2:
            return f"fuser_gather<{vector}>({place}, {self.stride(item, 0)}, left)"
        return f"fuser_load<{vector}, {item.access.width if vector == 'V' else 1}>({place}, left)"

    def _compute_at(self, step: RowPass, element: RowPart, site: _Site) -> list[str]:
        # All vectors in one way: decisions take time.
        def write(part: RowPart, how: str = "") -> list[str]:
            return _unrolled(self._compute_one(step, part, site, {}, how), site)

        shares = [item for item in self.full(element) if item.variable == step.shares and self._is_paired(item)]
        if not shares or site is not self._main or shares[0].info.dtype is not torch.bfloat16:
            return self._quickly(step, element, write)
        # One question for all, and only then one for each; quotients of float16 are 0 too often.
        assert step.quick is not None, "it divides"
        (divisor,) = (name for name in step.quick.reads if name[0] == "d")
        return [
            "{",
            f"  const fuser_whole_divisor whole({divisor});",
            f"  fuser_extreme<{shares[0].info.storage}, V, false> lowest;",
            "  bool is_exact = true;",
            *indent(write(step.quick, "whole")),
            "  if (!(lowest.value() > whole.least)) {",
            *indent(write(step.quick, "asks"), 2),
            "  }",
            *indent(self._exactly(element, write)),
            "}",
        ]

    def _compute_one(
        self, step: RowPass, element: RowPart, site: _Site, late: Mapping[Operand, str], how: str = ""
    ) -> list[str]:
        # The u-th vector. ``late`` says where some inputs are, ``how`` whether nobody asks if each quotient is exact
        # ("whole"), or nothing else is done ("asks").
        known = self.row_values(element)
        known |= {name: "whole" for name in element.reads if name[0] == "d" and how == "whole"}
        outside, inside, stores = list[str](), list[str](), list[str]()
        for item in self.full(element):
            if item.is_output:
                outside.append(f"{item.info.storage} {item.name}[{site.vector}];")
                known[item.variable] = f"{item.name}[k]"
                stores.append(self._write_at(item, site))
            elif item.is_counter:
                outside.append(f"const auto {item.name} = {self._read_at(item, site)};")
                known[item.variable] = f"{item.name}[{'k' if item.inner else '0'}]"
            else:
                vector = late.get(item, f"{item.name}{site.suffix}[u]")
                known[item.variable] = f"fuser_to_compute({vector}[{'k' if item.inner else '0'}])"
        for name in [item.name for item in step.accumulators]:
            known |= {f"{side}{name}": f"own[{site.accumulator}].m{name}" for side in "lm"}
        if self.tuning.is_resident and not self.order.has_edges:
            # A constant, once the loops are unrolled: what is divided by it is not divided then.
            number = "u / Q * V + k" if self.threads > 1 else "(u * V + k) / A"
            known |= {f"l{item.name}": f"{item.type}({number})" for item in step.accumulators if item.is_count}
        known |= {f"l{item.name}": f"counted{item.name}" for item in self._counted(step)}
        # A branch for each element would take longer than what some of them make in vain.
        chooses = site is not self._main and not stores and step.quick is None
        if chooses:
            for own in step.accumulators:
                inside.append(f"{own.type} made_{own.name} = {known[f'm{own.name}']};")
                known |= {f"{side}{own.name}": f"made_{own.name}" for side in "lm"}
        kept = [name for name in element.writes if name[0] == "k"]
        has_spare = self.tuning.spare > 0 and site is self._main
        at = f"<U - {self.tuning.spare}, {self.tuning.block}>"
        for name in self.loop.kept:
            vector = f"{name}{site.suffix}[u]"
            if has_spare:
                vector = f"own_{name}"
                if name in kept:
                    outside.append(f"{self._kept(name, site)} {vector};")
                    stores.append(f"fuser_put_aside{at}({name}, spare_{name}, u, {vector});")
                elif f"v{name[1:]}" in element.reads:
                    outside.append(f"const auto {vector} = fuser_take_back{at}({name}, spare_{name}, u);")
            if name not in kept:
                known[f"v{name[1:]}"] = f"fuser_to_compute({vector}[k])"
        known |= {name: f"kept_{name}" for name in kept}
        inside += [f"{self.loop.types[name]} kept_{name};" for name in kept]
        inside.append(element.call(known))
        if chooses:
            made = [(f"own[{site.accumulator}].m{own.name}", f"made_{own.name}") for own in step.accumulators]
            inside += [f"if (left > 0) {own} = {value};" for own, value in made]
        for name in kept:
            value = f"fuser_from_compute<{self.loop.kept_types[name]}>(kept_{name})"
            vector = f"own_{name}" if has_spare else f"{name}{site.suffix}[u]"
            inside.append(f"{vector}.set(k, {value});")
        if how == "whole":
            stores.insert(0, f"lowest.add({step.shares});")
        elif how == "asks":
            stores = []
        lines = [
            *outside,
            "#pragma unroll",
            f"for (int k = 0; k < {site.vector}; ++k) {{",
            *(["  if (k >= left) break;"] if self._is_ragged else []),
            *indent(inside),
            "}",
            *(f"counted{item.name} += 1;" for item in self._counted(step)),
            *stores,
        ]
        if outside:
            lines = [*self._coordinates(site), *lines]
        if chooses:
            return [*self._find(site), *lines]
        return [*self._find(site), "if (left > 0) {", *indent(lines), "}"]

    def _counted(self, step: RowPass) -> list[Accumulator]:
        # The count of elements, where that of all accumulators of a thread is the same.
        if self.tuning.is_resident or not self.is_wide or self._is_ragged:
            return []
        return [item for item in step.accumulators if item.is_count]

    def _write_at(self, item: Operand, site: _Site) -> str:
        if self._is_scattered(site):
            return f"fuser_put_down(row.{item.name}, {self._lookup(item)}, n, {item.name}, is_row ? left : 0);"
        place = self._place_of(item, site)
        if item.inner == 2:
            return f"fuser_scatter<{site.vector}>({place}, {self.stride(item, 0)}, {item.name}, is_row ? left : 0);"
        width = item.access.width if site.vector == "V" else 1
        return f"fuser_store<{site.vector}, {width}>({place}, {item.name}, is_row ? left : 0);"


def _unrolled(lines: list[str], site: _Site) -> list[str]:
    return ["#pragma unroll", f"for (int u = 0; u < {site.unroll}; ++u) {{", *indent(lines), "}"]


def _last_vectors(unroll: int) -> int:
    # Vectors of a thread's that may not be there: counts go in eight sizes to a power of two.
    return max((1 << max(unroll - 1, 0).bit_length()) // 8, 1)
