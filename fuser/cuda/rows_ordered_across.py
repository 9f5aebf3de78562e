"""The same for rows of neighbours: each thread has some of them, and the accumulators of torch's thread for each."""

from __future__ import annotations

from fuser.cuda.rows_across import AcrossText
from fuser.cuda.rows_ordered import MAX_REGISTERS, PROCESSOR_REGISTERS, REGISTERS
from fuser.kernel_source import KERNEL_NAME, RowLoop, indent
from fuser.row_pass import RowPart, RowPass

__all__ = ["OrderedAcrossText"]

# What a thread has in flight of what blocks came to, which it combines one after another.
AHEAD_BYTES = 127
# Of a thread that only adds, beside its accumulators and what it has in flight.
PLAIN_REGISTERS = 16


class OrderedAcrossText(AcrossText):
    """Writes a kernel whose threads take neighbouring rows side by side."""

    def __init__(self, loop: RowLoop) -> None:
        super().__init__(loop)
        assert loop.rows.order is not None, "it is a kernel in torch's order"
        self.schedule = loop.rows.order.schedule

    def kernel(self) -> list[str]:
        """Write the kernel: the rows of a block, all passes of each."""
        if not self.loop.tuning.piece:
            return super().kernel()
        # Blocks share rows: the last one to come to its part combines them.
        step, last = self.loop.passes
        assert step.element is not None, "it reduces something"
        tuning, kind = self.loop.tuning, "fuser_pass0::part"
        part = "space.piece(X * V)"
        body = [
            "const int x = threadIdx.x % X, y = threadIdx.x / X, block = blockIdx.x % B;",
            f"const fuser_index length = {self.length}, rows = {self.product(self.kept)}, tile = blockIdx.x / B;",
            *self._shared(),
            *self._find_rows(tuning.team * self.loop.vector),
            *(f"const auto {item.name} = {self._read(item, f'row.{item.name}')};" for item in self.row_inputs()),
            *(f"{self.loop.types[name]} {name}[V];" for name in self.loop.row_values),
            *self._row_part(step, "block == 0 && y == 0"),
            *self._pass(0, step, step.element),
            f"const fuser_workspace<{kind}> space(a.workspace, tile, B, X * V);",
            "#pragma unroll",
            "for (int k = 0; k < V; ++k) {",
            f"  if (y == 0) {part}.put((static_cast<size_t>(block) * V + k) * X + x, total0[k]);",
            "  total0[k] = pass0.identity();",
            "}",
            "if (!fuser_is_last(space.head, B)) return;",
            *self._combine_blocks(part, kind),
            f"fuser_share<X, Y>(total0, reinterpret_cast<{kind}*>(shared));",
            *self._row_part(last),
        ]
        return [
            f'extern "C" __global__ void __launch_bounds__({self._bounds()})',
            f"{KERNEL_NAME}(const __grid_constant__ fuser_args a) {{",
            f"  constexpr int V = {self.loop.vector}, X = {tuning.team}, Y = {tuning.block // tuning.team}, "
            f"U = {tuning.unroll}, B = {max(self.schedule.blocks, tuning.piece)};",
            *indent(body),
            "}",
        ]

    def _combine_blocks(self, part: str, kind: str) -> list[str]:
        # Neighbouring threads have neighbouring slots.
        get = f"{part}.get((static_cast<size_t>(i) * V + k) * X + x)"
        if self._splits:
            # Of torch's one block: what they come to are the last halves.
            return [
                "#pragma unroll",
                "for (int k = 0; k < V && y == 0; ++k) {",
                f"  {kind} items[B];",
                "#pragma unroll",
                f"  for (int i = 0; i < B; ++i) items[i] = {get};",
                "#pragma unroll",
                "  for (int half = B / 2; half > 0; half /= 2) {",
                "#pragma unroll",
                "    for (int i = 0; i < half; ++i) items[i] = pass0.combine(items[i], items[i + half]);",
                "  }",
                "  total0[k] = items[0];",
                "}",
            ]
        return [
            f"constexpr int AHEAD = {AHEAD_BYTES} / sizeof({kind}[V]) + 1;",
            "for (int begin = y; begin < B; begin += AHEAD * Y) {",
            f"  {kind} items[AHEAD][V];",
            "#pragma unroll",
            "  for (int n = 0; n < AHEAD; ++n) {",
            "    const int i = begin + n * Y;",
            "#pragma unroll",
            f"    for (int k = 0; k < V; ++k) items[n][k] = i < B ? {get} : pass0.identity();",
            "  }",
            "#pragma unroll",
            "  for (int n = 0; n < AHEAD; ++n) {",
            "    if (begin + n * Y >= B) continue;",
            "#pragma unroll",
            "    for (int k = 0; k < V; ++k) total0[k] = pass0.combine(total0[k], items[n][k]);",
            "  }",
            "}",
            f"fuser_halve_stack<X, Y>(pass0, total0, reinterpret_cast<{kind}*>(shared));",
        ]

    def _bounds(self) -> str:
        # As many blocks of a processor as have registers for what their threads have in flight: a compiler that is not
        # told would rather save registers, and wait for each element.
        block, most = self.loop.tuning.block, 0
        full = [item for step in self.loop.passes if step.element for item in self.loop.full(step.element)]
        items = [item for item in full if not item.is_output]
        # Many blocks that add up what lies in whole vectors are to run at once: their addresses are near each other.
        is_plain = self.loop.tuning.piece > 0 and self.schedule.vector == 1
        is_plain = is_plain and 1 in (len(full), len(self.loop.passes[0].accumulators))
        is_plain = is_plain and all(item.access.width == self.loop.vector for item in items)
        for step in self.loop.passes:
            inputs = [item for item in self.loop.full(step.element) if not item.is_output] if step.element else []
            each = sum(item.info.dtype.itemsize * (self.loop.vector if item.inner else 1) for item in inputs)
            # An address has eight bytes.
            each += 0 if is_plain else 8 * len(inputs)
            # Neighbours have one count.
            own = sum(not item.is_count for item in step.accumulators)
            held = self.schedule.accumulators * own * self.loop.vector
            most = max(most, held + self.loop.tuning.unroll * each // 4)
        registers = min((PLAIN_REGISTERS if is_plain and len(full) == 1 else REGISTERS) + most, MAX_REGISTERS)
        return f"{block}, {max(PROCESSOR_REGISTERS // (block * registers), 1)}"

    def _pass(self, level: int, step: RowPass, element: RowPart) -> list[str]:
        slot = "y * B + block" if self._splits else "block * Y + y" if self.loop.tuning.piece else "y"
        first = slot if self.schedule.vector == 1 else f"({slot}) * {self.schedule.vector}"
        loop = [
            f"for (fuser_index begin = {first}; begin < length && left > 0; begin += {self._step} * U) {{",
            f"  if ({self._number('(U - 1)')} < length) {{",
            *indent(self._elements(step, element, is_whole=True), 2),
            "  } else {",
            *indent(self._elements(step, element, is_whole=False), 2),
            "  }",
            "}",
        ]
        if not step.accumulators:
            return loop
        kind, count = f"fuser_pass{level}::part", self.schedule.accumulators
        inside = [
            f"{kind} parts[V][{count}];",
            "#pragma unroll",
            f"for (int i = 0; i < {count} * V; ++i) parts[i / {count}][i % {count}] = pass{level}.identity();",
            *(f"{item.type} counted{item.name}[{count}] = {{}};" for item in step.accumulators if item.is_count),
            *loop,
            "#pragma unroll",
            "for (int k = 0; k < V; ++k) {",
            f"  total{level}[k] = parts[k][0];",
            "#pragma unroll",
            f"  for (int i = 1; i < {count}; ++i) total{level}[k] = pass{level}.combine(total{level}[k], parts[k][i]);",
            "}",
            f"fuser_halve_stack<X, Y>(pass{level}, total{level}, reinterpret_cast<{kind}*>(shared));",
            f"fuser_share<X, Y>(total{level}, reinterpret_cast<{kind}*>(shared));",
        ]
        return [f"const fuser_pass{level} pass{level}{{a}};", f"{kind} total{level}[V];", "{", *indent(inside), "}"]

    def _elements(self, step: RowPass, element: RowPart, *, is_whole: bool) -> list[str]:
        # All that a thread has in flight, ``is_whole``: none of it is missing.
        count = self.schedule.accumulators
        outputs = [item for item in self.loop.full(element) if item.is_output]
        counters = [item for item in self.loop.full(element) if item.is_counter]
        inputs = [item for item in self.loop.full(element) if not (item.is_output or item.is_counter)]
        known = self._known(element)
        for item in self.loop.full(element):
            text = f"{item.name}{'[u]' if item in inputs else ''}[{'k' if item.inner or item.is_output else '0'}]"
            known[item.variable] = f"fuser_to_compute({text})" if item in inputs else text
        for name in [item.name for item in step.accumulators]:
            known |= {f"{side}{name}": f"parts[k][u % {count}].m{name}" for side in "lm"}
        counted = [item for item in step.accumulators if item.is_count]
        known |= {f"l{item.name}": f"counted{item.name}[u % {count}]" for item in counted}
        each = ["#pragma unroll", "for (int u = 0; u < U; ++u) {"]
        some = [] if is_whole else [f"  if ({self._number('u')} >= length) break;"]
        loads = [f"{item.name}[u] = {self._read(item, self._place_of(item))};" for item in inputs]
        compute = [
            *(f"const auto {item.name} = {self._read(item, self._place_of(item))};" for item in counters),
            *(f"{item.info.storage} {item.name}[V];" for item in outputs),
            *self.look_up(element, known),
            "#pragma unroll",
            f"for (int k = 0; k < V; ++k) {element.call(known)}",
            *(f"counted{item.name}[u % {count}] += 1;" for item in counted),
            *(self._write(item, self._place_of(item)) for item in outputs),
        ]
        if counters or outputs:
            compute = [*self._place(), *compute]
        lines = [f"fuser_vector<{item.info.storage}, {'V' if item.inner else '1'}> {item.name}[U];" for item in inputs]
        if loads:
            # The last one is read again, rather than that each waits for a question about it.
            last = "" if is_whole else f"{self._number('u')} < length ? {self._number('u')} : length - 1"
            lines += [*each, *indent([*self._place(last), *loads]), "}"]
        return [*lines, *each, *some, *indent(compute), "}"]

    def _place(self, number: str = "") -> list[str]:
        return self.place(number or self._number("u"))

    def _number(self, u: str) -> str:
        # Of a thread's u-th element from ``begin`` on: vectors are so many neighbours.
        vector = self.schedule.vector
        if vector == 1:
            return f"begin + {u} * {self._step}"
        return f"begin + ({u} / {vector} * {self._step} * {vector} + {u} % {vector})"

    @property
    def _splits(self) -> bool:
        # Whether several blocks do what one of torch's does.
        return self.loop.tuning.piece > 0 and self.schedule.blocks == 1

    @property
    def _step(self) -> str:
        # Elements from one of a thread's to its next.
        return "(B * Y)" if self.loop.tuning.piece else "Y"
