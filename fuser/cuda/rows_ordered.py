"""Row loops in CUDA that keep the order of torch's own kernels: see fuser.orders.Schedule.

Each slot of the schedule is a thread, which has its accumulators in registers and adds to them as torch's thread does.
"""

from __future__ import annotations

from dataclasses import replace

from fuser.cuda.ordered_elements import OrderedElements, unrolled
from fuser.cuda.row_text import most_of
from fuser.kernel_source import Operand, indent
from fuser.row_pass import RowPart, RowPass

__all__ = ["MAX_REGISTERS", "PROCESSOR_REGISTERS", "REGISTERS", "OrderedAlongText"]

# Of a processor, of a thread at most, and of one beside what it keeps of a row.
PROCESSOR_REGISTERS, MAX_REGISTERS, REGISTERS = 65536, 255, 40
# The same where a thread keeps values instead of elements of so many bytes, and more where some wait in shared memory,
# or where all are read one by one. Measured on an H200.
NARROW, FEW_REGISTERS, SPARING, SINGLE = 2, 18, 24, 4
# Threads of a block that are few warps.
FEW_THREADS = 128
# Threads of a processor that read rows again.
THREADS = 1024


class OrderedAlongText(OrderedElements):
    """Writes a kernel whose threads take neighbouring elements of a row side by side."""

    def kernel(self) -> list[str]:
        """Write the kernel: the rows of a block, all passes of each."""
        if self.order.schedule.blocks > 1:
            return self._shared_kernel()
        if self.tuning.cluster > 1:
            return self._cluster_kernel()
        body = [
            f"const fuser_index number = first + threadIdx.x / {self.tuning.team};",
            "const bool is_row = number < rows;",
            "// Threads without a row go along: others wait for them.",
            "const fuser_index at = is_row ? number : rows - 1;",
            "const fuser_row row = fuser_find(a, at);",
            *self._all_passes("is_row && t == 0"),
        ]
        if self._spreads and self._shares and len(self.loop.combining) % 2:
            body.append("__syncthreads();")
        return [
            *self._head(),
            "  const int t = threadIdx.x % T, slot = t / F;",
            f"  const fuser_index length = {self.length}, rows = {self.product(self.kept)};",
            *indent(self._waiting()),
            *indent(self._each_row(body)),
            "}",
        ]

    def _cluster_kernel(self) -> list[str]:
        # Neighbouring blocks, which read and write each other's shared memory, have the slots of a row.
        return [
            *self._head(),
            f"  const unsigned int rank = blockIdx.x % {self.tuning.cluster};",
            "  const int t = threadIdx.x, slot = rank * T + t;",
            f"  const fuser_index length = {self.length}, at = blockIdx.x / {self.tuning.cluster};",
            "  constexpr bool is_row = true;",
            *indent(self._waiting()),
            f"  __shared__ unsigned long long boxes[{len(self.loop.combining)}];",
            "  if (t == 0) {",
            *(
                f"    fuser_expect(boxes + {number}, {parts} * {self._part_bytes(level)});"
                for number, level in enumerate(self.loop.combining)
                for parts in [f"(N / {self._side})" if self.loop.passes[level].is_free else "Y"]
            ),
            "  }",
            "  fuser_arrive();",
            "  const fuser_row row = fuser_find(a, at);",
            *indent(self._all_passes("rank == 0 && t == 0")),
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
        elements = [step.element for step in self.loop.passes if step.element]
        read = [self._inputs(element) for element in elements]
        resident = self._resident()
        # What is kept takes the place of what no later pass reads.
        late = [item for item in resident if item in read[-1]]
        held = [sum(item.info.dtype.itemsize for item in items) for items in ([resident, late] if resident else read)]
        # Some of the last waits in shared memory.
        spared = 4 * self.tuning.spare // self.tuning.unroll if self.loop.kept else 0
        held[-1] += 4 * len(self.loop.kept) - spared
        each = max(held)
        own = self.loop.vector if self.is_wide else max(schedule.accumulators, min(self.threads, self.tuning.unroll))
        # Twice, and what it divides by, where a thread may add again.
        twice = any(step.quick and step.accumulators for step in self.loop.passes)
        accumulators = 16 * twice + own * (1 + twice) * max(len(step.accumulators) for step in self.loop.passes)
        registers = REGISTERS + accumulators + self.tuning.unroll * self.loop.vector * each // 4
        # Of a vector that a slot may not have, whether it is there.
        registers += self.tuning.unroll * (self._spreads and self.order.has_edges)
        threads = block * min(registers, MAX_REGISTERS)
        blocks = max((2 * PROCESSOR_REGISTERS + threads) // (2 * threads), 1)
        each_input = sum(item.info.dtype.itemsize for item in resident)
        if self._spreads and not resident:
            # What is read again is worth more threads.
            blocks = max(blocks, THREADS // block)
        elif self._spreads and schedule.y > 1 and self.loop.kept and each_input == NARROW:
            # What is kept of narrow elements takes the place of what they are unpacked to.
            few = FEW_REGISTERS + (SPARING if self.tuning.spare else SINGLE if self.loop.vector == 1 else 0)
            blocks = max(PROCESSOR_REGISTERS // (block * (registers - REGISTERS + few)), 1)
        blocks = self.tuning.resident or blocks
        head = super()._head()
        # Several threads may share a vector of torch's thread, and its accumulators; or one stands for several.
        split, count, cluster = max(schedule.vector // self.loop.vector, 1), self.tuning.cluster, ""
        own = self._own_slots if self._spreads else max(self.threads, own // split)
        slots = "T" if self.is_wide and not self._spreads else "X * Y * B"
        head += [
            f"  constexpr int X = {schedule.x}, Y = {schedule.y}, B = {schedule.blocks}, S = {slots};",
            f"  constexpr int F = {split}, A = {own}, Q = {self.threads}, E = {self._own_slots}, N = T * {count};",
            f"  constexpr int M = {self.warps}, G = T / M;",
        ]
        if schedule.pitch:
            size = f"({self._plane()} + {schedule.pitch - 1}) / {schedule.pitch}"
            head.append(f"  const fuser_index pitch = {size} * {schedule.pitch};")
        if count > 1:
            cluster = f"__cluster_dims__({count}, 1, 1) "
        if self.order.has_edges:
            # Elements before the first vector, and the first one's shift, come to H; R of them are a round of vectors.
            head.append(
                f"  constexpr int H = {'S' if schedule.is_even else 'V * F'}, R = {'S * ' * schedule.is_even}V * F;"
            )
        return [f'extern "C" __global__ void {cluster}__launch_bounds__({block}, {blocks})', *head[1:]]

    @property
    def _shares(self) -> bool:
        # Whether what threads have comes to one by way of shared memory.
        return self.tuning.team > 32 or self.tuning.piece > 0 or (self._spreads and self.order.schedule.y > 1)

    def _waiting(self) -> list[str]:
        # A place in shared memory for each thread, where those of a row are of several warps.
        if not self._shares or not self.loop.combining:
            return []
        buffers, places = ("[2]", "Y") if self._spreads else ("", "T")
        if self.order.schedule.is_serial:
            places = "A * T + Y"
        most = most_of(f"sizeof(fuser_pass{level}::part)" for level in self.loop.combining)
        return [f"alignas(16) __shared__ unsigned char shared{buffers}[{self.teams}][({places}) * {most}];"]

    def _edges(self) -> list[str]:
        if not self.order.has_edges:
            return []
        shift = "at % (V * F) * (length % (V * F)) % (V * F)"
        if self.order.source >= 0:
            name = next(item.name for item in self.loop.operands if item.variable == f"v{self.order.source}")
            shift = f"reinterpret_cast<size_t>(row.{name}) / sizeof(*row.{name}) % (V * F)"
        return [
            "// Vectors begin where memory is aligned.",
            f"const int shift = {0 if self.tuning.is_level else f'static_cast<int>({shift})'};",
            "const fuser_index head = shift > 0 ? H - shift : 0, end = head + (length - head) / R * R;",
            "// Single elements of a thread behind them.",
            "const int tail = end + slot < length ? (length - end - slot + (N - 1)) / N : 0;",
        ]

    def _kept_vectors(self) -> list[str]:
        # Where vectors begin, and what a thread reads once and several passes use.
        lines = self._edges()
        if not self.tuning.is_resident:
            return lines
        for site in self._sites:
            lines += [self._declare(item, site) for item in self._resident()]
            for name in self.loop.kept:
                spare = self.tuning.spare if self._spares(name, site) else 0
                kind, count = self._kept(name, site), f"{site.unroll} - {spare}" if spare else site.unroll
                lines.append(f"{kind} {name}{site.suffix}[{count}];")
                if spare:
                    size = f"{spare * self.tuning.block} * sizeof({kind})"
                    lines.append(f"alignas(16) __shared__ unsigned char shared_{name}[{size}];")
                    place = f"reinterpret_cast<uint4*>(shared_{name}) + threadIdx.x"
                    lines.append(f"uint4* const spare_{name} = {place};")
        return lines

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
                *(f"  {item.type} counted{item.name} = 0;" for item in self._counted(step)),
            ]
        late = [item for item in self._inputs(element) if item not in self._resident()]
        lines += self._divisors(step)
        inside = ["constexpr fuser_index begin = 0;"] if self.tuning.is_resident else []
        inside += ["constexpr fuser_index plane = 0;"] if inside and self.tuning.planes else []
        if level == 0 and self.tuning.is_resident:
            for site in self._sites:
                load = self._load_at(self._resident(), site)
                # Few warps have nothing else to do while they wait for what lies around the vectors.
                inside += load if self.tuning.team <= FEW_THREADS else site.guarded(load)
        for site in self._sites:
            own = [*self._load_at(late, site, declares=True), *self._compute_at(step, element, site)]
            if site is self._main and self.tuning.is_resident and self._has_pairs(step) and not step.is_of_sizes:
                own = self._find_largest(step)
            if site is not self._main:
                own = site.guarded(own)
            elif not self.tuning.is_resident:
                own = self._in_rounds(step, element, late, own)
            elif late:
                own = self._in_turns(step, element, late)
            inside += own
        lines += ["  {", *indent(inside, 2), "  }"]
        if step.accumulators:
            lines += [*self._combine(level, step), "}"]
        return lines

    def _in_rounds(self, step: RowPass, element: RowPart, late: list[Operand], own: list[str]) -> list[str]:
        # ``own``: what a thread does with its vectors where some of them may not be there.
        site = self._main
        if self.tuning.planes:
            return self._from_plane_to_plane(own)
        stop = "end - head" if self.order.has_edges else "length"
        chunk = f"{'S * F' if self.tuning.piece else 'N'} * U * V"
        whole = replace(site, is_there="")
        if self._has_whole_chunks:
            own = [*self._load_at(late, whole, declares=True), *self._compute_at(step, element, whole)]
        elif not self.order.schedule.pitch:
            own = [
                f"if ({stop} - begin >= {chunk}) {{",
                *indent([*self._load_at(late, whole, declares=True), *self._compute_at(step, element, whole)]),
                "} else {",
                # The last elements of a row are few.
                *indent([*self._load_at(late, site, declares=True), *self._all_exactly(step, element, site)]),
                "}",
            ]
        return [f"for (fuser_index begin = 0; begin < {stop}; begin += {chunk}) {{", *indent(own), "}"]

    def _from_plane_to_plane(self, own: list[str]) -> list[str]:
        chunk = f"{self.tuning.unroll // self.tuning.planes} * T * V"
        step = f"{self.tuning.planes} * (T * V / {self.order.schedule.pitch})"
        lap = "constexpr fuser_index begin = 0;"
        if self.tuning.laps > 1:
            lap = f"for (fuser_index begin = 0; begin < {self.tuning.laps} * {chunk}; begin += {chunk}) {{"
            own = [*indent(own), "}"]
        return [
            f"for (fuser_index plane = 0; plane < {self.size(1)}; plane += {step}) {{", *indent([lap, *own]), "}"
        ]  # fmt: skip

    def _combine(self, level: int, step: RowPass) -> list[str]:
        # What the threads of a row have of a pass becomes one.
        kind, shared = f"fuser_pass{level}", "nullptr"
        if self._shares:
            buffer = f"[{self.loop.combining.index(level) % 2}]" if self._spreads else ""
            shared = f"reinterpret_cast<{kind}::part*>(shared{buffer}[threadIdx.x / T])"
        if self._spreads:
            return self._unite(level, step, shared)
        if self.is_wide:
            how = "rise" if self.order.schedule.rises else "halve"
            return [f"  total{level} = fuser_{how}_wide<X, Y, V>(pass{level}, own, {shared});"]
        if self.threads > 1:
            # Where all threads have as many elements, those are constants.
            is_alike = self._is_full and any(item.is_count for item in step.accumulators)
            lanes = f"fuser_alike<{kind}>{{pass{level}}}" if is_alike else f"pass{level}"
            return [f"  total{level} = fuser_halve_apart<X, Y, G, M, U>(pass{level}, {lanes}, own);"]
        return [
            f"  own[0] = fuser_join<F>(pass{level}, own);",
            f"  total{level} = fuser_halve_team<X, Y, F>(pass{level}, own[0], {shared});",
        ]

    def _find_largest(self, step: RowPass) -> list[str]:
        name = f"own[0].m{step.accumulators[0].name}"
        return [
            *self._find_extreme(step, unrolled([*self._find(self._main), "if (left > 0) {}"], self._main)),
            f"{name} = fmax({name}, highest.value());",
        ]

    def _unite(self, level: int, step: RowPass, shared: str) -> list[str]:
        # What threads have of their slots becomes one, in all blocks that share a row.
        count, part = self.tuning.cluster, f"fuser_pass{level}::part"
        is_serial, beside = str(self.order.schedule.is_serial).lower(), "V" if self.is_wide else "1"
        how, own, lines = f"X, Y, {count}, {is_serial}, {beside}", "own", list[str]()
        if count > 1 and level == self.loop.combining[0]:
            # Until the other blocks have begun.
            lines.append("  fuser_wait();")
        if step.is_free:
            how, own = f"{self._side}, N / {self._side}, {count}, false, 1", "all"
            lines.append(f"  {part} all[1] = {{fuser_join<1>(pass{level}, own)}};")
        told = f"boxes + {self.loop.combining.index(level)}, rank" if count > 1 else "nullptr, 0"
        return [*lines, f"  total{level} = fuser_unite<{how}>(pass{level}, {own}, {shared}, {told});"]

    @property
    def _side(self) -> int:
        # Threads whose parts come to one by lanes.
        return min(self.tuning.team, 32)
