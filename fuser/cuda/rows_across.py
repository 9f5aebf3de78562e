"""Row loops in CUDA whose threads take neighbouring rows side by side.

A thread has V rows; X threads stand beside each other along the rows, Y threads share a batch of their elements: each
takes a stretch of it, U elements of a tree at a time, and merges what they come to as a binary counter does.
"""

from __future__ import annotations

from fuser.combining import BATCH
from fuser.cuda.row_text import RowText, most_of
from fuser.kernel_source import KERNEL_NAME, Operand, indent
from fuser.row_pass import RowPart, RowPass

__all__ = ["AcrossText"]


class AcrossText(RowText):
    """Writes such a kernel."""

    def kernel(self) -> list[str]:
        """Write the kernel: the rows of a block, all passes of each."""
        tuning = self.loop.tuning
        size = tuning.team * self.loop.vector
        vectors = [f"const auto {item.name} = {self._read(item, f'row.{item.name}')};" for item in self.row_inputs()]
        body = [
            *self._find_rows(size),
            *vectors,
            *(f"{self.loop.types[name]} {name}[V];" for name in self.loop.row_values),
        ]
        pieces = "1"
        if tuning.piece:
            pieces = f"((length + {tuning.piece - 1}) / {tuning.piece})"
            body = [
                f"const unsigned int pieces = {pieces}, piece = at % pieces;",
                "const fuser_index tile = at / pieces;",
                *body,
                *self._shared_passes(),
            ]
        else:
            for level, step in enumerate(self.loop.passes):
                body += [f"// Pass {level}.", *self._row_part(step)]
                if step.element is not None:
                    body += self._pass(level, step, step.element)
        name = "at" if tuning.piece else "tile"
        return [
            f'extern "C" __global__ void __launch_bounds__({self._bounds()})',
            f"{KERNEL_NAME}(const __grid_constant__ fuser_args a) {{",
            f"  constexpr int V = {self.loop.vector}, X = {tuning.team}, Y = {tuning.block // tuning.team}, "
            f"U = {tuning.unroll};",
            "  const int x = threadIdx.x % X, y = threadIdx.x / X;",
            f"  const fuser_index length = {self.length}, rows = {self.product(self.kept)};",
            f"  const fuser_index tiles = (rows + {size - 1}) / {size} * {pieces};",
            *indent(self._shared()),
            f"  for (fuser_index {name} = blockIdx.x; {name} < tiles; {name} += gridDim.x) {{",
            *indent(body, 2),
            "  }",
            "}",
        ]

    def _find_rows(self, size: int) -> list[str]:
        # A thread's rows: those of a tile are one after another, whatever their dimensions, and vectors are whole.
        return [
            f"const fuser_index number = tile * {size} + x * V;",
            "const int left = number < rows ? V : 0;",
            "// Threads without a row go along: others wait for them.",
            "const fuser_row row = fuser_find(a, left > 0 ? number : 0);",
        ]

    def _bounds(self) -> str:
        # Threads of a block, and blocks of a processor.
        return str(self.loop.tuning.block)

    def _shared(self) -> list[str]:
        fill = self.fill_tables()
        if not self.loop.combining:
            return fill
        most = most_of(f"sizeof(fuser_pass{level}::part)" for level in self.loop.combining)
        return [f"alignas(16) __shared__ unsigned char shared[X * Y * V * {most}];", *fill]

    def _read(self, item: Operand, pointer: str) -> str:
        # Who has no row reads another one's: rows come in whole vectors.
        if item.inner == 2:
            return f"fuser_gather<V>({pointer}, {self.stride(item, self.kept[0])}, V)"
        return f"fuser_load<{'V' if item.inner else '1'}, {item.access.width if item.inner else 1}>({pointer}, V)"

    def _write(self, item: Operand, pointer: str, left: str = "left") -> str:
        if item.inner == 2:
            return f"fuser_scatter<V>({pointer}, {self.stride(item, self.kept[0])}, {item.name}, {left});"
        return f"fuser_store<V, {item.access.width}>({pointer}, {item.name}, {left});"

    def _known(self, part: RowPart) -> dict[str, str]:
        # What a part reads of the k-th row of a thread.
        inputs = {
            item.variable: f"fuser_to_compute({item.name}[{'k' if item.inner else '0'}])" for item in self.row_inputs()
        }
        return self.row_values(part, "[k]") | {name: text for name, text in inputs.items() if name in part.reads}

    # --- per row -----------------------------------------------------------------------------------------------------
    def _row_part(self, step: RowPass, writes: str = "y == 0") -> list[str]:
        if step.row is None:
            return []
        outputs = self.row_outputs(step)
        known = self._known(step.row) | {item.variable: f"{item.name}[k]" for item in outputs}
        known |= {name: f"{name}[k]" for name in step.row.writes if name[0] == "w"}
        lines = [f"{item.info.storage} {item.name}[V];" for item in outputs]
        lines += ["#pragma unroll", f"for (int k = 0; k < V; ++k) {step.row.call(known)}"]
        left = f"{writes} ? left : 0"
        lines += [self._write(item, f"row.{item.name}", left) for item in outputs]
        return ["{", *indent(lines), "}"]

    # --- a pass ------------------------------------------------------------------------------------------------------
    def _shared_passes(self) -> list[str]:
        # Blocks share a tile: each has a piece of the only pass.
        step, last = self.loop.passes
        assert step.element is not None, "it reduces something"
        kind, piece = "fuser_pass0::part", self.loop.tuning.piece
        place = "(static_cast<size_t>(piece) * X + x) * V + k"
        return [
            *self._row_part(step, "piece == 0 && y == 0"),
            "const fuser_pass0 pass0{a};",
            f"const auto parts_shared = reinterpret_cast<{kind}*>(shared);",
            f"const fuser_workspace<{kind}> space(a.workspace, tile, pieces, X * V);",
            f"const fuser_index batch = static_cast<fuser_index>(piece) * {piece};",
            "{",
            *indent(_unrolled(self._batch(0, step, step.element, piece))),
            "  if (y == 0) {",
            "#pragma unroll",
            f"    for (int k = 0; k < V; ++k) space.piece(X * V).put({place}, own[k]);",
            "  }",
            "}",
            "space.finish(piece, [&](unsigned int begin, unsigned int end, bool is_last) {",
            f"  {kind} total0[V];",
            "#pragma unroll",
            "  for (int k = 0; k < V; ++k)",
            "    total0[k] = begin == 0 ? pass0.identity() : space.total().get(x * V + k);",
            "  const auto first = space.piece(X * V);",
            f"  fuser_fold_pieces<X, Y, {BATCH // piece}>(pass0, total0, first, begin, end, parts_shared);",
            "  if (!is_last) {",
            "    if (y == 0) {",
            "#pragma unroll",
            "      for (int k = 0; k < V; ++k) space.total().put(x * V + k, total0[k]);",
            "    }",
            "    return;",
            "  }",
            "  fuser_share<X, Y>(total0, parts_shared);",
            *indent(self._row_part(last)),
            "});",
        ]

    def _pass(self, level: int, step: RowPass, element: RowPart) -> list[str]:
        kind, is_combining = f"fuser_pass{level}", bool(step.accumulators)
        before = [
            f"const {kind} pass{level}{{a}};",
            f"{kind}::part total{level}[V];",
            f"for (int k = 0; k < V; ++k) total{level}[k] = pass{level}.identity();",
        ]
        combine = f"total{level}[k] = pass{level}.combine(total{level}[k], own[k]);"
        batch = self._batch(level, step, element, BATCH)
        batch += [f"for (int k = 0; k < V; ++k) {combine}"] * is_combining
        after = [f"fuser_share<X, Y>(total{level}, reinterpret_cast<{kind}::part*>(shared));"]
        return [
            *(before if is_combining else []),
            f"for (fuser_index batch = 0; batch < length; batch += {BATCH}) {{",
            *indent(_unrolled(batch)),
            "}",
            *(after if is_combining else []),
        ]

    def _batch(self, level: int, step: RowPass, element: RowPart, size: int) -> list[str]:
        # The elements from ``batch`` on; what they come to is ``own`` of the first of the threads that share them.
        kind, tuning = f"fuser_pass{level}::part", self.loop.tuning
        most = max(size * tuning.team // (tuning.block * tuning.unroll), 1)
        lines = [
            f"const int count = static_cast<int>(length - batch < {size} ? length - batch : {size});",
            "int share = 1;",
            "while (share * Y < count) share *= 2;",
            "const int begin = y * share, end = begin + share < count ? begin + share : count;",
            *([f"{kind} waiting[{most.bit_length()}][V], own[V];"] if step.accumulators else []),
            "int at = begin, number = 0;",
            "for (; at + U <= end; at += U, ++number) {",
            *indent(self._group(level, step, element, is_whole=True)),
            "}",
            "for (; at < end; at += U, ++number) {",
            *indent(self._group(level, step, element, is_whole=False)),
            "}",
        ]
        if step.accumulators:
            lines += [
                f"fuser_settle(pass{level}, waiting, number, own);",
                f"fuser_stack<X, Y>(pass{level}, own, reinterpret_cast<{kind}*>(shared));",
            ]
        return lines

    def _group(self, level: int, step: RowPass, element: RowPart, *, is_whole: bool) -> list[str]:
        # U elements of each of a thread's rows; fewer if they are not whole.
        inputs = [item for item in self.loop.full(element) if not (item.is_output or item.is_counter)]
        counters = [item for item in self.loop.full(element) if item.is_counter]
        outputs = [item for item in self.loop.full(element) if item.is_output]
        known = self._known(element)
        loads = [f"{item.name}[u] = {self._read(item, self._place_of(item))};" for item in inputs]
        lines = [
            *(f"fuser_vector<{item.info.storage}, {'V' if item.inner else '1'}> {item.name}[U];" for item in inputs),
            *([f"fuser_pass{level}::part parts[V][U];"] if step.accumulators else []),
        ]
        if loads:
            # The last one is read again, rather than that each waits for a question about it.
            number = "(at + u)" if is_whole else "(at + u < end ? at + u : end - 1)"
            lines += ["for (int u = 0; u < U; ++u) {", *indent([*self._place(number), *loads]), "}"]
        for item in inputs:
            known[item.variable] = f"fuser_to_compute({item.name}[u][{'k' if item.inner else '0'}])"
        known |= {item.variable: f"{item.name}[{'k' if item.inner else '0'}]" for item in counters}
        known |= {item.variable: f"{item.name}[k]" for item in outputs}
        known |= {f"m{item.name}": f"parts[k][u].m{item.name}" for item in step.accumulators}
        compute = [
            *(self._place() if outputs or counters else []),
            *(f"const auto {item.name} = {self._read(item, self._place_of(item))};" for item in counters),
            *(f"{item.info.storage} {item.name}[V];" for item in outputs),
            f"for (int k = 0; k < V; ++k) {element.call(known)}",
            *(self._write(item, self._place_of(item)) for item in outputs),
        ]
        missing = f"for (int k = 0; k < V; ++k) parts[k][u] = pass{level}.identity();"
        if not is_whole:
            rest = ["} else {", f"  {missing}"] if step.accumulators else []
            compute = ["if (at + u < end) {", *indent(compute), *rest, "}"]
        lines += ["for (int u = 0; u < U; ++u) {", *indent(compute), "}"]
        if step.accumulators:
            lines.append(f"for (int k = 0; k < V; ++k) own[k] = fuser_tree<U>(pass{level}, parts[k]);")
            lines.append(f"fuser_push(pass{level}, waiting, number, own);")
        return lines

    def _place(self, number: str = "(at + u)") -> list[str]:
        return self.place(f"batch + {number}")

    def _place_of(self, item: Operand) -> str:
        return self.address(f"row.{item.name}", item, self.reduced)


def _unrolled(lines: list[str]) -> list[str]:
    # Loops over what each thread has.
    done = []
    for line in lines:
        if line.lstrip().startswith(("for (int k = 0;", "for (int u = 0;")):
            done.append("#pragma unroll")
        done.append(line)
    return done
