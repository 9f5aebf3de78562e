"""What each thread reads, computes and writes of a row whose elements are combined in torch's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fuser.cuda.row_text import in_turns
from fuser.cuda.rows_along import AlongText
from fuser.kernel_source import Operand, RowLoop, indent
from fuser.ordered_access import step_of, warps_beside
from fuser.orders import RowOrder
from fuser.row_pass import Accumulator, RowPart, RowPass

__all__ = ["OrderedElements", "Site", "unrolled"]


@dataclass(frozen=True, slots=True)
class Site:
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
    offset: str = ""

    def guarded(self, lines: list[str]) -> list[str]:
        """Return lines that run where there is any."""
        return [f"if ({self.is_any}) {{", *indent(lines), "}"] if self.is_any else lines


_HEAD = Site(
    "_head", "1", "E", "u * N + slot - shift", "t % F == 0 && u * N + slot >= shift && u * N + slot < H", "u % E",
    "shift > 0",
)  # fmt: skip
_TAIL = Site(
    "_tail", "1", "((R - 1) / S + 1) * E", "end + u * N + slot", "t % F == 0 && u < tail", "u % E",
    "end + slot < length", "(end + slot) + u * N",
)  # fmt: skip


class OrderedElements(AlongText):
    """Writes the elements of such a kernel."""

    def __init__(self, loop: RowLoop) -> None:
        super().__init__(loop)
        assert loop.rows.order is not None, "it is a kernel in torch's order"
        self.order: RowOrder = loop.rows.order
        begin, end = ("head + begin", "end") if self.order.has_edges else ("begin", "length")
        # Whether a thread has what neighbours among torch's threads have, one element of each at a time.
        self.is_wide = self.order.schedule.vector < loop.vector or self.order.schedule.rises
        # Of how many of torch's threads, some lanes or some warps apart, a thread does the work.
        self.threads = 1 if self.is_wide else max(self.order.schedule.x * self.order.schedule.y // loop.tuning.team, 1)
        self.warps = warps_beside(loop.tuning.team, self.order.schedule)
        first = f"{begin} + (u * S * F + block * T + t) * V" if loop.tuning.piece else f"{begin} + (u * T + t) * V"
        # Where a thread's first vector is in a row that is read at once, or along a dimension, and the u-th from there.
        is_one = loop.tuning.is_resident or loop.tuning.is_straight
        is_one = is_one and not (self.order.has_edges or loop.tuning.piece)
        own, further = ("t * V", "u * (T * V)") if is_one else ("", "")
        accumulator, is_there = "k % A" if self.order.schedule.vector > 1 or self.is_wide else "u % A", ""
        if loop.tuning.is_resident:
            # All but the last vectors of a thread are there; of each slot, one less where rows have edges.
            whole = step_of(loop.tuning.unroll, loop.vector if self._spreads else 2)
            whole += self.order.has_edges * self._own_slots
            if self.threads > 1 and not self._spreads:
                # Of the last warps.
                whole = self.order.schedule.x * self.warps // loop.tuning.team if self.warps > 1 else 1
            is_there = f"u < U - {whole} || "
        if self._spreads:
            first, self.threads = f"{begin} + (u * N + slot) * V", 1
            own, further = f"{begin} + slot * V", "u * (N * V)"
            accumulator = "(u * V + k) % A" if self.is_wide else "u % A"
        elif self.threads > 1:
            own = "(t / G * X + t % G) * V"
            further = "(u / Q * S + u % Q / (X / G) * (M * X) + u % (X / G) * G) * V"
            first, accumulator = f"{own} + {further}", "u % Q"
        offset = f"static_cast<fuser_index>({own}) + {further}" if own else ""
        self._main = Site("", "V", "U", first, f"{is_there}n < {end}", accumulator, offset=offset)
        self._sites: tuple[Site, ...] = (_HEAD, self._main, _TAIL) if self.order.has_edges else (self._main,)
        if self.tuning.is_level:
            # Nothing lies before vectors.
            self._sites = self._sites[-2:]

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
        return self.tuning.is_resident and is_whole

    @property
    def _is_ragged(self) -> bool:
        return self.order.is_ragged or (self.is_wide and not self.tuning.multiple)

    def _is_scattered(self, site: Site) -> bool:
        # Whether a vector may go on along another dimension.
        may_go_on = len(self.reduced) > 1 and not self.tuning.multiple
        return may_go_on and site.vector == "V" and self.loop.vector > 1

    def _has_several(self, item: Operand, site: Site) -> bool:
        # Whether the elements of a vector are no single one: what is constant along rows differs where a row ends.
        return item.inner != 0 or self._is_scattered(site)

    def size(self, dim: int) -> str:
        """Elements along a dimension; of planes that threads count as larger ones, those."""
        return "pitch" if dim == 0 and self.order.schedule.pitch else super().size(dim)

    def _plane(self) -> str:
        # The elements that planes have themselves.
        return super().size(0)

    def _inputs(self, element: RowPart) -> list[Operand]:
        return [item for item in self.loop.full(element) if not (item.is_output or item.is_counter)]

    def _resident(self) -> list[Operand]:
        # The inputs that are read before all passes.
        if not self.tuning.is_resident:
            return []
        elements = [step.element for step in self.loop.passes]
        first = self._inputs(elements[0]) if elements[0] else []
        rest = [item for element in elements[1:] if element for item in self._inputs(element)]
        return list(dict.fromkeys([*first, *(item for item in rest if item.access.is_early)]))

    def _declare(self, item: Operand, site: Site, count: str = "") -> str:
        vector = site.vector if self._has_several(item, site) else "1"
        return f"fuser_vector<{item.info.storage}, {vector}> {item.name}{site.suffix}[{count or site.unroll}];"

    def _kept(self, name: str, site: Site) -> str:
        return f"fuser_vector<{self.loop.kept_types[name]}, {site.vector}>"

    def _spares(self, name: str, site: Site) -> bool:
        # Whether some vectors of what passes keep wait in shared memory, which has room for one value of each element.
        return self.tuning.spare > 0 and site is self._main and name == self.loop.kept[-1]

    def _find(self, site: Site) -> list[str]:
        if self.tuning.planes:
            return self._find_in_plane()
        if self.order.schedule.pitch:
            return [
                f"const fuser_index n = {site.first};",
                "fuser_index rest = n;",
                *self.split(self.reduced),
                f"const int left = n < length && i0 < {self._plane()} ? V : 0;",
            ]
        if self._is_full or self._has_whole_chunks or not site.is_there:
            return [f"const fuser_index n = {site.first};", "constexpr int left = V;"]
        left = "(length - n < V ? static_cast<int>(length - n) : V)" if self._is_ragged else site.vector
        return [f"const fuser_index n = {site.first};", f"const int left = {site.is_there} ? {left} : 0;"]

    def _find_in_plane(self) -> list[str]:
        # All but the last vectors of each plane are there, and of the planes that a thread has the first.
        unit, laps, planes = self.order.schedule.pitch, self.tuning.laps, self.tuning.planes
        groups, is_lone = self.tuning.unroll // planes, self.tuning.team * self.loop.vector == unit
        is_there = f"i0 < {self._plane()}"
        is_there = f"(u % {groups} < {groups - laps} || {is_there})" if groups > laps else is_there
        if not self.tuning.has_all_planes:
            is_plane = f"i1 < {self.size(1)}"
            is_there += f" && (u < {groups} || {is_plane})" if is_lone else f" && {is_plane}"
        return [
            f"const fuser_index i0 = begin + u % {groups} * (T * V) + t * V % {unit};",
            f"const fuser_index i1 = plane + u / {groups} * (T * V / {unit}) + t * V / {unit};",
            f"const int left = {is_there} ? V : 0;",
        ]

    def _in_plane(self, item: Operand) -> str:
        # What all vectors of a thread have in common is added once, and what those of a plane have.
        unit, groups, stride = self.order.schedule.pitch, self.tuning.unroll // self.tuning.planes, self.stride(item, 1)
        first = f"row.{item.name} + (plane + t * V / {unit}) * {stride} + (begin + t * V % {unit})"
        return f"{first} + u / {groups} * (T * V / {unit}) * {stride} + u % {groups} * (T * V)"

    def _coordinates(self, site: Site) -> list[str]:
        if self._is_scattered(site) or self.order.schedule.pitch:
            return []
        # Chunks that are whole lie along the innermost dimension.
        return self.place("n", "begin" if self.tuning.is_straight else "")

    def _load_at(self, inputs: list[Operand], site: Site, *, declares: bool = False) -> list[str]:
        if not inputs:
            return []
        declared = [self._declare(item, site) for item in inputs] if declares else []
        own = [f"{item.name}{site.suffix}[u] = {self._read_at(item, site)};" for item in inputs]
        return [*declared, *unrolled([*self._find(site), *self._coordinates(site), *own], site)]

    def _in_turns(self, step: RowPass, element: RowPart, late: list[Operand]) -> list[str]:
        # What stays in registers beside what does not: a few vectors at a time.
        site = self._main
        loads = [f"{item.name}[u % L] = {self._read_at(item, site)};" for item in late]
        known = {item: f"{item.name}[u % L]" for item in late}
        return in_turns(
            [self._declare(item, site, "L") for item in late],
            [*self._find(site), *self._coordinates(site), *loads],
            self._quickly(
                step,
                element,
                lambda part: self._compute_one(step, part, site, known),
                [f"fuser_forget({known.get(item, f'{item.name}[u]')});" for item in self._several(element)],
            ),
        )

    def _place_of(self, item: Operand, site: Site) -> str:
        if self.tuning.planes and item.inner == 1 and not item.is_counter:
            return self._in_plane(item)
        if site.offset and item.inner == 1 and not item.is_counter:
            # As for rows in the canonical order: what all vectors of a thread have in common is added once.
            if len(self.reduced) == 1:
                return f"row.{item.name} + {site.offset}"
            if self.tuning.is_straight:
                return f"{self._straight_to(item)} + {site.offset}"
        return self.address(f"row.{item.name}", item, self.reduced)

    def _lookup(self, item: Operand) -> str:
        # Where the elements of a scattered vector are.
        strides = ", ".join(self.stride(item, dim) for dim in self.reduced)
        sizes = ", ".join(self.size(dim) for dim in self.reduced)
        return f"fuser_scattered<{len(self.reduced)}>{{{{{sizes}}}, {{{strides}}}}}"

    def _read_at(self, item: Operand, site: Site) -> str:
        vector = site.vector if self._has_several(item, site) else "1"
        if self._is_scattered(site):
            return f"fuser_pick_up<{vector}>(row.{item.name}, {self._lookup(item)}, n, left)"
        place = self._place_of(item, site)
        if item.inner == 2:
            return f"fuser_gather<{vector}>({place}, {self.stride(item, 0)}, left)"
        if item.inner and not item.is_counter and site is self._main and not (self.order.has_edges or self._is_ragged):
            # What is missing is read elsewhere: vectors are on their way side by side, without a branch for each.
            return f"fuser_load<V, {item.access.width}>(left > 0 ? {place} : row.{item.name}, V)"
        return f"fuser_load<{vector}, {item.access.width if vector == 'V' else 1}>({place}, left)"

    def _is_paired(self, item: Operand) -> bool:
        is_whole = self.loop.vector > 1 and not self._is_ragged
        return is_whole and item.inner == 1 and item.info.dtype in (torch.bfloat16, torch.float16)

    def _compute_at(self, step: RowPass, element: RowPart, site: Site) -> list[str]:
        # All vectors in one way: decisions take time.
        def write(part: RowPart, how: str = "") -> list[str]:
            return self._compute_all(step, part, site, how)

        shares = [item for item in self.loop.full(element) if item.variable == step.shares and self._is_paired(item)]
        if not shares or site is not self._main or shares[0].info.dtype is not torch.bfloat16:
            read = [f"fuser_forget({item.name}{site.suffix}[u]);" for item in self._several(element)]
            return self._quickly(step, element, write, unrolled(read, site) if read else [])
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

    def _compute_all(self, step: RowPass, element: RowPart, site: Site, how: str = "") -> list[str]:
        return unrolled(self._compute_one(step, element, site, {}, how), site)

    def _all_exactly(self, step: RowPass, element: RowPart, site: Site) -> list[str]:
        # Without trying what is done in less time.
        exact = self._exact_divisors(element)
        return ["bool is_exact = true;"] * bool(exact) + exact + self._compute_all(step, element, site)

    def _several(self, element: RowPart) -> list[Operand]:
        # The inputs of which a thread has vectors.
        return [item for item in self._inputs(element) if self._has_several(item, self._main)]

    def _quickly(
        self, step: RowPass, element: RowPart, write: Callable[[RowPart], list[str]], forget: Sequence[str] = ()
    ) -> list[str]:
        # ``forget``: lest a compiler keeps what it made of the elements, too.
        if step.quick is None or not step.accumulators:
            return super()._quickly(step, element, write)
        if step.is_rough:
            return write(step.quick)
        # What is added again is added to what a thread had before.
        counted = [f"counted{item.name}" for item in self._counted(step)]
        level = self.loop.passes.index(step)
        each = ["#pragma unroll", "for (int i = 0; i < A; ++i)"]
        return [
            "{",
            "  bool is_exact = true;",
            f"  fuser_pass{level}::part before[A];",
            *indent([*each, "  before[i] = own[i];"]),
            *(f"  const auto before_{name} = {name};" for name in counted),
            *indent(write(step.quick)),
            "  if (!is_exact) {",
            *indent([*each, "  own[i] = before[i];"], 2),
            *(f"    {name} = before_{name};" for name in counted),
            *indent([*forget, *write(element)], 2),
            "  }",
            "}",
        ]

    def _compute_one(
        self, step: RowPass, element: RowPart, site: Site, late: Mapping[Operand, str], how: str = ""
    ) -> list[str]:
        # The u-th vector. ``late`` says where some inputs are, ``how`` whether nobody asks if each quotient is exact
        # ("whole"), or nothing else is done ("asks").
        known = self.row_values(element)
        known |= {name: "whole" for name in element.reads if name[0] == "d" and how == "whole"}
        outside, inside, stores = list[str](), list[str](), list[str]()
        for item in self.loop.full(element):
            if item.is_output:
                outside.append(f"{item.info.storage} {item.name}[{site.vector}];")
                known[item.variable] = f"{item.name}[k]"
                stores.append(self._write_at(item, site))
            elif item.is_counter:
                outside.append(f"const auto {item.name} = {self._read_at(item, site)};")
                known[item.variable] = f"{item.name}[{'k' if self._has_several(item, site) else '0'}]"
            else:
                vector = late.get(item, f"{item.name}{site.suffix}[u]")
                element_of = "k" if self._has_several(item, site) else "0"
                known[item.variable] = f"fuser_to_compute({vector}[{element_of}])"
        known |= self._parts_before(step, site)
        if element is step.quick:
            kind = "fuser_rough_count({})" if step.is_rough else "fuser_quick_count({}, is_exact)"
            known |= {name: kind.format(known[name]) for name in step.quick_counts}
        # A branch for each element would take longer than what some of them make in vain.
        chooses = site is not self._main and not stores and step.quick is None
        if chooses:
            for own in step.accumulators:
                inside.append(f"{own.type} made_{own.name} = {known[f'm{own.name}']};")
                known |= {f"{side}{own.name}": f"made_{own.name}" for side in "lm"}
        kept = [name for name in element.writes if name[0] == "k"]
        for name in self.loop.kept:
            vector, before, after = self._vector_kept(step, element, site, name)
            outside += before
            stores += after
            if name not in kept:
                known[f"v{name[1:]}"] = f"fuser_to_compute({vector}[k])"
        known |= {name: f"kept_{name}" for name in kept}
        looked = self.look_up(element, known, site.vector)
        inside += [f"{self.loop.types[name]} kept_{name};" for name in kept]
        inside.append(element.call(known))
        if chooses:
            made = [(f"own[{site.accumulator}].m{own.name}", f"made_{own.name}") for own in step.accumulators]
            inside += [f"if (left > 0) {own} = {value};" for own, value in made]
        for name in kept:
            value = f"fuser_exactly<{self.loop.kept_types[name]}>(kept_{name})"
            vector = f"own_{name}" if self._spares(name, site) or step.quick is not None else f"{name}{site.suffix}[u]"
            inside.append(f"{vector}.set(k, {value});")
        if how == "whole":
            stores.insert(0, f"lowest.add({step.shares});")
        elif how == "asks":
            stores = []
        lines = [
            *outside,
            *looked,
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

    def _vector_kept(self, step: RowPass, element: RowPart, site: Site, name: str) -> tuple[str, list[str], list[str]]:
        # A vector that stays from pass to pass, and what is to be done before its elements are computed, and after.
        vector, own, is_written = f"{name}{site.suffix}[u]", f"own_{name}", name in element.writes
        if self._spares(name, site):
            at = f"<U - {self.tuning.spare}, {self.tuning.block}>"
            if is_written:
                put = f"fuser_put_aside{at}({name}, spare_{name}, u, {own});"
                return own, [f"{self._kept(name, site)} {own};"], [put]
            is_read = f"v{name[1:]}" in element.reads
            take = f"const auto {own} = fuser_take_back{at}({name}, spare_{name}, u);"
            return own, [take] if is_read else [], []
        if is_written and step.quick is not None:
            # An element of a vector is set once, and here it may be computed again.
            return vector, [f"{self._kept(name, site)} {own};"], [f"{vector} = {own};"]
        return vector, [], []

    def _parts_before(self, step: RowPass, site: Site) -> dict[str, str]:
        # What the accumulators of a thread, which an element is added to, have so far.
        known = dict[str, str]()
        for name in [item.name for item in step.accumulators]:
            known |= {f"{side}{name}": f"own[{site.accumulator}].m{name}" for side in "lm"}
        if self.tuning.is_resident and not (self.order.has_edges or self.order.schedule.pitch):
            # A constant, once the loops are unrolled: what is divided by it is not divided then.
            number = "u / Q * V + k" if self.threads > 1 else "(u * V + k) / A"
            known |= {f"l{item.name}": f"{item.type}({number})" for item in step.accumulators if item.is_count}
        return known | {f"l{item.name}": f"counted{item.name}" for item in self._counted(step)}

    def _counted(self, step: RowPass) -> list[Accumulator]:
        # The count of elements, where that of all accumulators of a thread is the same.
        if self.tuning.is_resident or not self.is_wide or self._is_ragged:
            return []
        return [item for item in step.accumulators if item.is_count]

    def _write_at(self, item: Operand, site: Site) -> str:
        if self._is_scattered(site):
            return f"fuser_put_down(row.{item.name}, {self._lookup(item)}, n, {item.name}, is_row ? left : 0);"
        place = self._place_of(item, site)
        if item.inner == 2:
            return f"fuser_scatter<{site.vector}>({place}, {self.stride(item, 0)}, {item.name}, is_row ? left : 0);"
        width = item.access.width if site.vector == "V" else 1
        return f"fuser_store<{site.vector}, {width}>({place}, {item.name}, is_row ? left : 0);"


def unrolled(lines: list[str], site: Site) -> list[str]:
    """Write a loop over the vectors that a thread has of a site."""
    return ["#pragma unroll", f"for (int u = 0; u < {site.unroll}; ++u) {{", *indent(lines), "}"]
