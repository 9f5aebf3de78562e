"""Row loops in CUDA that keep the order of torch's own kernels: see fuser.orders.Schedule.

Each slot of the schedule is a thread, which has its accumulators in registers and adds to them as torch's thread does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fuser.codegen import Operand, RowLoop
from fuser.cuda.row_text import indent
from fuser.cuda.rows_along import AlongText
from fuser.orders import RowOrder
from fuser.row_parts import RowPart, RowPass

__all__ = ["MAX_REGISTERS", "PROCESSOR_REGISTERS", "REGISTERS", "OrderedAlongText"]

# Of a processor, of a thread at most, and of one beside what it keeps of a row.
PROCESSOR_REGISTERS, MAX_REGISTERS, REGISTERS = 65536, 255, 40
# Vectors that are read together where only a later pass needs them.
LATE_UNROLL = 4


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


_HEAD = _Site("_head", "1", "1", "slot - shift", "shift > 0 && t % F == 0 && slot >= shift && slot < V * F", "0")
_TAIL = _Site("_tail", "1", "1", "end + slot", "t % F == 0 && n < length", "0")


class OrderedAlongText(AlongText):
    """Writes a kernel whose threads take neighbouring elements of a row side by side."""

    def __init__(self, loop: RowLoop) -> None:
        super().__init__(loop)
        assert loop.rows.order is not None, "it is a kernel in torch's order"
        self.order: RowOrder = loop.rows.order
        begin, end = ("head + begin", "end") if self.order.has_edges else ("begin", "length")
        # Whether a thread has what neighbours among torch's threads have, one element of each at a time.
        self.is_wide = self.order.schedule.vector < loop.vector
        vector = self.order.schedule.vector > 1 or self.is_wide
        first = f"{begin} + (u * S * F + block * T + t) * V" if loop.tuning.piece else f"{begin} + (u * T + t) * V"
        accumulator = "k % A" if vector else "u % A"
        # Of how many of torch's threads, a part of a warp apart, a thread does the work.
        self.threads = 1 if self.is_wide else max(self.order.schedule.x * self.order.schedule.y // loop.tuning.team, 1)
        if self.threads > 1:
            first = "(u / Q * S + t / (X / Q) * X + u % Q * (X / Q) + t % (X / Q)) * V"
            accumulator = "u % Q"
        self._main = _Site("", "V", "U", first, f"n < {end}", accumulator)
        self._sites = (_HEAD, self._main, _TAIL) if self.order.has_edges else (self._main,)

    def kernel(self) -> list[str]:
        """Write the kernel: the rows of a block, all passes of each."""
        if self.order.schedule.blocks > 1:
            return self._shared_kernel()
        body = [
            f"const fuser_index number = first + threadIdx.x / {self.tuning.team};",
            "const bool is_row = number < rows;",
            "// Threads without a row go along: others wait for them.",
            "const fuser_index at = is_row ? number : rows - 1;",
            "const fuser_row row = fuser_find(a, at);",
            *self._row_variables(),
            *self._edges(),
            *self._kept_in_registers(),
        ]
        for level, step in enumerate(self.loop.passes):
            body += [f"// Pass {level}.", *self._row_part(step)]
            if step.element is not None:
                body += self._pass(level, step, step.element)
        return [
            *self._head(),
            "  const int t = threadIdx.x % T, slot = t / F;",
            f"  const fuser_index length = {self.length}, rows = {self.product(self.kept)};",
            *indent(self._waiting()),
            f"  for (fuser_index first = static_cast<fuser_index>(blockIdx.x) * {self.teams}; first < rows;",
            f"       first += static_cast<fuser_index>(gridDim.x) * {self.teams}) {{",
            *indent(body, 2),
            "  }",
            "}",
        ]

    def _shared_kernel(self) -> list[str]:
        # Blocks share a row: the last one to come to its part combines them.
        step, last = self.loop.passes
        assert step.element is not None, "it reduces something"
        kind = "fuser_pass0::part"
        return [
            *self._head(),
            f"  const fuser_index length = {self.length}, at = blockIdx.x / B;",
            "  const int t = threadIdx.x, block = blockIdx.x % B, slot = block * T + t;",
            "  constexpr bool is_row = true;",
            *indent(self._waiting()),
            "  const fuser_row row = fuser_find(a, at);",
            *indent([*self._row_variables(), *self._edges(), *self._row_part(step, "block == 0 && t == 0")]),
            *indent(self._pass(0, step, step.element)),
            f"  const fuser_workspace<{kind}> space(a.workspace, at, B, 1);",
            "  if (t == 0) space.piece(1).put(block, total0);",
            "  if (!fuser_is_last(space.head, B)) return;",
            "  total0 = pass0.identity();",
            "  for (int i = t; i < B; i += T) total0 = pass0.combine(total0, space.piece(1).get(i));",
            f"  total0 = fuser_halve_blocks<X, Y>(pass0, total0, reinterpret_cast<{kind}*>(shared[0]));",
            *indent(self._row_part(last)),
            "}",
        ]

    def _head(self) -> list[str]:
        # As many blocks of a processor as have registers for what their threads keep.
        block, schedule = self.tuning.block, self.order.schedule
        if self.tuning.is_resident:
            items = self._resident()
        else:
            items = [item for step in self.loop.passes if step.element for item in self._inputs(step.element)]
        each = sum(item.info.dtype.itemsize for item in dict.fromkeys(items)) + 4 * len(self.loop.kept)
        own = self.loop.vector if self.is_wide else max(schedule.accumulators, self.threads)
        accumulators = own * max(len(step.accumulators) for step in self.loop.passes)
        registers = REGISTERS + accumulators + self.tuning.unroll * self.loop.vector * each // 4
        blocks = max(PROCESSOR_REGISTERS // (block * min(registers, MAX_REGISTERS)), 1)
        head = super()._head()
        # Several threads may share a vector of torch's thread, and its accumulators.
        split = max(schedule.vector // self.loop.vector, 1)
        slots = "T" if self.is_wide else "X * Y * B"
        head += [
            f"  constexpr int X = {schedule.x}, Y = {schedule.y}, B = {schedule.blocks}, S = {slots};",
            f"  constexpr int F = {split}, A = {max(own // split, 1)}, Q = {self.threads};",
        ]
        return [f'extern "C" __global__ void __launch_bounds__({block}, {blocks})', *head[1:]]

    def _waiting(self) -> list[str]:
        # A place in shared memory for each thread, where those of a row are of several warps.
        if (self.tuning.team <= 32 and not self.tuning.piece) or not self.combining:
            return []
        most = f"sizeof(fuser_pass{self.combining[0]}::part)"
        for level in self.combining[1:]:
            most = f"fuser_most({most}, sizeof(fuser_pass{level}::part))"
        return [f"alignas(16) __shared__ unsigned char shared[{self.teams}][T * {most}];"]

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
            "const fuser_index head = shift > 0 ? V * F - shift : 0, end = head + (length - head) / (V * F) * (V * F);",
        ]

    def _kept_in_registers(self) -> list[str]:
        # What a thread reads once and several passes use.
        if not self.tuning.is_resident:
            return []
        lines = []
        for site in self._sites:
            lines += [self._declare(item, site) for item in self._resident()]
            kinds = [(name, self.loop.kept_types[name]) for name in self.loop.kept]
            lines += [
                f"fuser_vector<{kind}, {site.vector}> {name}{site.suffix}[{site.unroll}];" for name, kind in kinds
            ]
        return lines

    def _resident(self) -> list[Operand]:
        # The inputs that the first pass reads.
        element = self.loop.passes[0].element
        return self._inputs(element) if element and self.tuning.is_resident else []

    # --- a pass ------------------------------------------------------------------------------------------------------
    def _pass(self, level: int, step: RowPass, element: RowPart) -> list[str]:
        kind = f"fuser_pass{level}"
        lines = []
        if step.accumulators:
            lines += [
                f"const {kind} pass{level}{{a}};",
                f"{kind}::part total{level};",
                "{",
                f"  {kind}::part own[A];",
                "#pragma unroll",
                f"  for (int i = 0; i < A; ++i) own[i] = pass{level}.identity();",
            ]
        late = [item for item in self._inputs(element) if item not in self._resident()]
        inside = ["constexpr fuser_index begin = 0;"] if self.tuning.is_resident else []
        if level == 0 and self.tuning.is_resident:
            inside += [line for site in self._sites for line in self._load_at(self._resident(), site)]
        for site in self._sites:
            own = [*self._load_at(late, site, declares=True), *self._compute_at(step, element, site)]
            if site is not self._main:
                own = ["{", *indent(own), "}"]
            elif not self.tuning.is_resident:
                stop = "end - head" if self.order.has_edges else "length"
                own = [f"for (fuser_index begin = 0; begin < {stop}; begin += S * F * U * V) {{", *indent(own), "}"]
            elif late:
                own = self._in_turns(step, element, late)
            inside += own
        lines += ["  {", *indent(inside, 2), "  }"]
        if step.accumulators:
            shared = "nullptr"
            if self.tuning.team > 32:
                shared = f"reinterpret_cast<{kind}::part*>(shared[threadIdx.x / T])"
            if self.is_wide:
                lines.append(f"  total{level} = fuser_halve_wide<X, Y, V>(pass{level}, own, {shared});")
            else:
                join = (
                    f"fuser_halve_own<Q>(pass{level}, own)" if self.threads > 1 else f"fuser_join<F>(pass{level}, own)"
                )
                lines.append(f"  own[0] = {join};")
                lines.append(f"  total{level} = fuser_halve_team<X / Q, Y, F>(pass{level}, own[0], {shared});")
            lines.append("}")
        return lines

    def _in_turns(self, step: RowPass, element: RowPart, late: list[Operand]) -> list[str]:
        # What stays in registers beside what does not: a few vectors at a time.
        site = self._main
        own = [f"{self._declare(item, site, 'W')}" for item in late]
        loads = [f"{item.name}[u % W] = {self._read_at(item, site)};" for item in late]
        turn = "for (int u = base; u < base + W && u < U; ++u) {"
        known = {item: f"{item.name}[u % W]" for item in late}
        return [
            f"constexpr int W = U < {LATE_UNROLL} ? U : {LATE_UNROLL};",
            "#pragma unroll",
            "for (int base = 0; base < U; base += W) {",
            *indent([*own, "#pragma unroll", turn]),
            *indent([*self._find(site), *self._coordinates(site), *loads], 2),
            *indent(["}", "#pragma unroll", turn]),
            *indent(self._compute_one(step, element, site, known), 2),
            "  }",
            "}",
        ]

    def _inputs(self, element: RowPart) -> list[Operand]:
        return [item for item in self.full(element) if not (item.is_output or item.is_counter)]

    def _declare(self, item: Operand, site: _Site, count: str = "") -> str:
        vector = site.vector if item.inner else "1"
        return f"fuser_vector<{item.info.storage}, {vector}> {item.name}{site.suffix}[{count or site.unroll}];"

    def _find(self, site: _Site) -> list[str]:
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

    @property
    def _is_ragged(self) -> bool:
        return self.order.is_ragged or (self.is_wide and not self.tuning.multiple)

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
        place = self.address(f"row.{item.name}", item, self.reduced)
        if item.inner == 2:
            return f"fuser_gather<{vector}>({place}, {self.stride(item, 0)}, left)"
        return f"fuser_load<{vector}, {item.access.width if vector == 'V' else 1}>({place}, left)"

    def _compute_at(self, step: RowPass, element: RowPart, site: _Site) -> list[str]:
        return _unrolled(self._compute_one(step, element, site, {}), site)

    def _compute_one(self, step: RowPass, element: RowPart, site: _Site, late: Mapping[Operand, str]) -> list[str]:
        # The u-th vector; ``late`` says where some inputs are.
        known = self.row_values(element)
        outside, inside, stores = [], [], []
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
        kept = [name for name in element.writes if name[0] == "k"]
        names = {f"v{name[1:]}": f"{name}{site.suffix}[u][k]" for name in self.loop.kept if name not in kept}
        known |= {name: f"fuser_to_compute({text})" for name, text in names.items()}
        known |= {name: f"kept_{name}" for name in kept}
        inside += [f"{self.loop.types[name]} kept_{name};" for name in kept]
        inside.append(element.call(known))
        for name in kept:
            value = f"fuser_from_compute<{self.loop.kept_types[name]}>(kept_{name})"
            inside.append(f"{name}{site.suffix}[u].set(k, {value});")
        lines = [
            *outside,
            "#pragma unroll",
            f"for (int k = 0; k < {site.vector}; ++k) {{",
            *(["  if (k >= left) break;"] if self._is_ragged else []),
            *indent(inside),
            "}",
            *stores,
        ]
        if outside:
            lines = [*self._coordinates(site), *lines]
        return [*self._find(site), "if (left > 0) {", *indent(lines), "}"]

    def _write_at(self, item: Operand, site: _Site) -> str:
        if self._is_scattered(site):
            return f"fuser_put_down(row.{item.name}, {self._lookup(item)}, n, {item.name}, is_row ? left : 0);"
        place = self.address(f"row.{item.name}", item, self.reduced)
        if item.inner == 2:
            return f"fuser_scatter<{site.vector}>({place}, {self.stride(item, 0)}, {item.name}, is_row ? left : 0);"
        width = item.access.width if site.vector == "V" else 1
        return f"fuser_store<{site.vector}, {width}>({place}, {item.name}, is_row ? left : 0);"


def _unrolled(lines: list[str], site: _Site) -> list[str]:
    return ["#pragma unroll", f"for (int u = 0; u < {site.unroll}; ++u) {{", *indent(lines), "}"]
