"""Row loops in CUDA whose threads take neighbouring elements of a row side by side.

A *team* of T threads takes a row, U vectors of V elements of each thread at a time. Those of a warp's W lanes lie side
by side, number ``((w * U + u) * W + lane) * V + k`` of a *chunk* of U * T * V elements. So a vector comes to one part
in its thread, those of a warp to one by shuffles, and those of a batch to one by way of shared memory, as the tree has
it.
"""

from __future__ import annotations

from fuser.combining import BATCH
from fuser.cuda.along_elements import WARP, AlongElements
from fuser.cuda.row_text import most_of
from fuser.kernel_source import KERNEL_NAME, indent
from fuser.row_access import LONG_SHARE, persistent_blocks
from fuser.row_pass import RowPart, RowPass

__all__ = ["AlongText"]

# Threads of a multiprocessor that a kernel leaves registers for: where rows stay in registers, by whether there are
# several accumulators and whether a thread has much (many elements, or bytes of an operand, take registers); and
# elsewhere, or in clusters. Twice as many where blocks share a row.
RESIDENT_THREADS = {(False, False): 1280, (False, True): 768, (True, False): 1024, (True, True): 512}
FEW_BYTES = 64
THREADS = 1024


class AlongText(AlongElements):
    """Writes such a kernel."""

    def kernel(self) -> list[str]:
        """Write the kernel: the rows of a block, all passes of each."""
        tuning = self.tuning
        rows = self.product(self.kept)
        if tuning.piece:
            return self._shared_kernel()
        if tuning.cluster > 1:
            return self._cluster_kernel()
        body = [
            f"const fuser_index number = first + threadIdx.x / {tuning.team};",
            "const bool is_row = number < rows;",
            "// Threads without a row go along: others wait for them.",
            "const fuser_row row = fuser_find(a, is_row ? number : rows - 1);",
            *self._all_passes("is_row && t == 0"),
        ]
        if self._shares and (len(self.loop.combining) % 2 or not self._is_one_batch):
            body.append("__syncthreads();")
        return [
            *self._head(),
            *self._own_vectors("threadIdx.x % T"),
            f"  const fuser_index length = {self.length}, rows = {rows};",
            *indent(self._shared()),
            *indent(self._held()),
            *indent(self._each_row(body)),
            "}",
        ]

    def _all_passes(self, writes: str) -> list[str]:
        # Of one row, whose parts one thread writes.
        # Elements that nobody walks for are read before all else, if the row's tensors say which they are.
        given = {item.variable for item in self.row_inputs()}
        early = [level for level, step in enumerate(self.loop.passes) if step.which in given]
        lines = [*self._row_variables(), *(line for level in early for line in self._find_pick(level))]
        lines += self._kept_vectors()
        for level, step in enumerate(self.loop.passes):
            lines += [f"// Pass {level}.", *self._row_part(step, writes)]
            if step.pick is not None:
                lines += [*([] if level in early else self._find_pick(level)), *self._pick(level)]
            if step.element is not None:
                lines += self._pass(level, step, step.element)
        return lines

    # --- elements that nobody walks for ------------------------------------------------------------------------------
    def _find_pick(self, level: int) -> list[str]:
        # What the one element that a pass picks reads; none where the row has no such element.
        step = self.loop.passes[level]
        assert step.pick is not None, "it picks one"
        which = self.row_values(step.pick)[step.which]
        there = f"is_there{level}"
        lines = [f"const bool {there} = {which} >= 0 && {which} < static_cast<int64_t>(length);"]
        at = [f"fuser_index rest = {there} ? {which} : 0;", *self.split(self.reduced)]
        for item in self.loop.full(step.pick):
            read = f"return fuser_load<1, 1>({self.address(f'row.{item.name}', item, self.reduced)}, int({there}));"
            lines += [f"const auto picked{level}_{item.name} = [&] {{", *indent([*at, read]), "}();"]
        return lines

    def _pick(self, level: int) -> list[str]:
        step = self.loop.passes[level]
        assert step.pick is not None, "it picks one"
        known = self.row_values(step.pick)
        known |= {
            item.variable: f"fuser_to_compute(picked{level}_{item.name}[0])" for item in self.loop.full(step.pick)
        }
        made = [f"{item.type} m{item.name} = {item.identity};" for item in step.picks]
        return [*made, f"if (is_there{level}) {step.pick.call(known)}"]

    def _cluster_kernel(self) -> list[str]:
        # Neighbouring blocks, which read and write each other's shared memory, have a chunk each of a row, or several.
        has_chunks = self.tuning.stretch > 0
        part, begin = (self.tuning.stretch, "first") if has_chunks else (self.chunk, "begin")
        return [
            *self._head(),
            f"  constexpr unsigned int C = {self.tuning.cluster};",
            *self._own_vectors("threadIdx.x"),
            "  const unsigned int rank = blockIdx.x % C;",
            "  constexpr bool is_row = true;",
            f"  const fuser_index length = {self.length}, {begin} = rank * {part};",
            *([f"  const fuser_index end = length - first < {part} ? length : first + {part};"] * has_chunks),
            *indent(self._shared()),
            *indent(self._held()),
            f"  __shared__ unsigned long long boxes[{len(self.loop.combining)}];",
            "  if (t == 0) {",
            *(
                f"    fuser_expect(boxes + {number}, {1 if self._is_gathered(level) else part // BATCH} * C * "
                f"{self._part_bytes(level)});"
                for number, level in enumerate(self.loop.combining)
            ),
            "  }",
            "  fuser_arrive();",
            "  const fuser_row row = fuser_find(a, blockIdx.x / C);",
            *indent(self._all_passes("rank == 0 && t == 0")),
            "}",
        ]

    def _head(self) -> list[str]:
        block = self.tuning.block
        is_heavy = any(len(step.accumulators) > 1 for step in self.loop.passes)
        full = [item for step in self.loop.passes if step.element for item in self.loop.full(step.element)]
        widest = max((item.info.dtype.itemsize for item in full if not item.is_counter), default=1)
        share = self.tuning.unroll * self.loop.vector
        kept = [item for item in self._read_by(self.loop.passes) if self._keeps(item)]
        has_much = share > LONG_SHARE if is_heavy else share * max(widest, 2 * len(kept)) > FEW_BYTES
        # So do vectors that are put together, and warps that have not all of theirs.
        is_apart, has_gaps = not self._has_whole_vectors, not self._has_whole_chunks and self.tuning.team > WARP
        threads = RESIDENT_THREADS[is_heavy or (has_much and is_apart), has_much or is_apart or has_gaps]
        most = max(len(step.accumulators) for step in self.loop.passes)
        if most < 3 and sum(step.element is not None for step in self.loop.passes) == 1:
            # What is read once, and only combined, takes no others.
            threads = max(threads, THREADS if most == 1 else THREADS * 3 // 4)
        if not is_heavy and any(map(self._is_late, full)):
            # What is read beside them, and computed with.
            threads = threads * 4 // 5
        if self.tuning.cluster > 1 and self.tuning.is_resident and self._has_whole_chunks:
            threads = THREADS * 3 // 4 if is_heavy and has_much else THREADS
        elif not self.tuning.is_resident:
            threads = THREADS if is_heavy or not self.tuning.piece else 2 * THREADS
        blocks = (2 * threads + block) // (2 * block)
        if self.loop.rows.pieces:
            blocks = persistent_blocks(self.tuning)
        blocks = self.tuning.resident or blocks
        cluster = f"__cluster_dims__({self.tuning.cluster}, 1, 1) " if self.tuning.cluster > 1 else ""
        return [
            f'extern "C" __global__ void {cluster}__launch_bounds__({block}, {max(blocks, 1)})',
            f"{KERNEL_NAME}(const __grid_constant__ fuser_args a) {{",
            f"  constexpr int V = {self.loop.vector}, T = {self.tuning.team}, U = {self.tuning.unroll};",
            f"  constexpr int W = {self.lanes};",
            *indent(self.fill_tables()),
        ]

    def _row_variables(self) -> list[str]:
        return [
            *(f"const auto {item.variable} = fuser_to_compute(row.{item.name}[0]);" for item in self.row_inputs()),
            *(f"{self.loop.types[name]} {name};" for name in self.loop.row_values),
        ]

    def _shared_kernel(self) -> list[str]:
        # Blocks share a row: each has a batch of the only pass.
        step, last = self.loop.passes
        assert step.element is not None, "it reduces something"
        kind = "fuser_pass0::part"
        return [
            *self._head(),
            *self._own_vectors("threadIdx.x"),
            "  constexpr bool is_row = true;",
            f"  const fuser_index length = {self.length};",
            f"  const unsigned int pieces = (length + {BATCH - 1}) / {BATCH}, piece = blockIdx.x % pieces;",
            f"  const fuser_index begin = static_cast<fuser_index>(piece) * {BATCH};",
            f"  alignas(16) __shared__ unsigned char shared[{BATCH // self.span} * sizeof({kind})];",
            f"  const auto waiting = reinterpret_cast<{kind}*>(shared);",
            "  const fuser_row row = fuser_find(a, blockIdx.x / pieces);",
            *indent(self._row_variables()),
            *indent(self._row_part(step, "piece == 0 && t == 0")),
            "  const fuser_pass0 pass0{a};",
            *indent([*self._load(0), *self._compute(0, step, step.element)]),
            f"  const auto own = {self._whole_warp(0)};",
            "  if (t % 32 == 0) waiting[t / 32] = own;",
            "  __syncthreads();",
            f"  {kind} total0 = pass0.identity();",
            f"  if (t < 32) total0 = fuser_warp_batch<{self.span}>(pass0, waiting, {BATCH // self.span});",
            f"  const fuser_notes<{kind}> notes(a.workspace, blockIdx.x - piece);",
            "  if (!fuser_follow<T>(pass0, total0, notes, piece, pieces)) return;",
            *indent(self._row_part(last, "t == 0")),
            "}",
        ]

    def _own_vectors(self, number: str) -> list[str]:
        # Which thread of its row it is, and where its vectors begin.
        return [f"  const int t = {number}, lead = (t / W * U * W + t % W) * V;"]

    def _whole_warp(self, level: int) -> str:
        # What a warp's parts come to.
        own = self._whole_pass(level)
        if self._has_pairs(self.loop.passes[level]):
            return f"fuser_lanes<1, W>({own}, parts)"
        if self.loop.passes[level].is_free:
            return f"fuser_butterfly<1, W>({own}, fuser_tree<U>({own}, parts))"
        return f"fuser_butterfly<1, U>({own}, fuser_lanes<U, W>({own}, parts))"

    # --- shared memory -----------------------------------------------------------------------------------------------
    @property
    def _shares(self) -> bool:
        # Whether a row's threads are of several warps.
        return self.tuning.team > WARP and bool(self.loop.combining)

    @property
    def _is_one_batch(self) -> bool:
        return self.tuning.is_resident and self.chunk <= BATCH and self.tuning.cluster == 1

    @property
    def _alternates(self) -> bool:
        # Between passes, where nobody waits for those who read what the pass before came to.
        return self._is_one_batch or self.tuning.cluster > 1

    def _buffer(self, level: int) -> str:
        # Which of them a pass uses.
        return str(self.loop.combining.index(level) % 2 if self._alternates else 0)

    def _shared(self) -> list[str]:
        # Parts of warps; where a row is one batch, those of the pass before may still be read.
        if not self._shares:
            return []
        lines = []
        least = self.tuning.team // WARP
        buffers = 2 if self._alternates else 1
        sizes = [self._part_bytes(level) for level in self.loop.combining]
        for level, size in zip(self.loop.combining, sizes, strict=True):
            count = f"fuser_waiting({least}, {size})" if not self.tuning.is_resident else str(least)
            count = str(self.tuning.stretch // self.span) if self.tuning.stretch else count
            lines.append(f"constexpr int waiting{level} = {count};")
        # The batches of all passes come behind the parts of all, and share no 16 bytes with them: a warp may have parts
        # of the next pass while others read what the batches came to, in vectors.
        per_batch = BATCH // self.span
        parts = [f"waiting{level} * {size}" for level, size in zip(self.loop.combining, sizes, strict=True)]
        batches = [
            f"(waiting{level} + {per_batch - 1}) / {per_batch} * {self.tuning.cluster} * {size}"
            for level, size in zip(self.loop.combining, sizes, strict=True)
        ]
        lines += [
            f"constexpr int parts_bytes = ({most_of(parts)} + 15) / 16 * 16;",
            f"constexpr int shared_bytes = (parts_bytes + {most_of(batches)} + 15) / 16 * 16;",
            f"alignas(16) __shared__ unsigned char shared[{buffers}][{self.teams}][shared_bytes];",
        ]
        return lines

    def _part_bytes(self, level: int) -> str:
        # Blocks of a cluster tell each other words.
        size = f"static_cast<int>(sizeof(fuser_pass{level}::part))"
        return f"(({size} + 3) / 4 * 4)" if self.tuning.cluster > 1 else size

    def _held(self) -> list[str]:
        # One operand behind the other, each in vectors in order.
        if not self.loop.held:
            return []
        whole = f"(length + {self.chunk - 1}) / {self.chunk} * {self.chunk}"
        lines = [
            "extern __shared__ uint4 fuser_held[];",
            f"const size_t held = {self.tuning.stretch or whole};",
            "auto after = reinterpret_cast<unsigned char*>(fuser_held);",
        ]
        for item in self.loop.held:
            lines += [
                f"const auto held_{item.name} = reinterpret_cast<{self._vector(item)}*>(after);",
                f"after += held * {item.info.dtype.itemsize};",
            ]
        return lines

    # --- per row -----------------------------------------------------------------------------------------------------
    def _row_part(self, step: RowPass, writes: str = "is_row && t == 0") -> list[str]:
        if step.row is None:
            return []
        outputs = self.row_outputs(step)
        lines = [f"{item.info.storage} {item.name};" for item in outputs]
        lines.append(step.row.call(self.row_values(step.row)))
        if outputs:
            stores = " ".join(f"*row.{item.name} = {item.name};" for item in outputs)
            lines.append(f"if ({writes}) {{ {stores} }}")
        return ["{", *indent(lines), "}"] if outputs else lines

    # --- a pass ------------------------------------------------------------------------------------------------------
    def _pass(self, level: int, step: RowPass, element: RowPart) -> list[str]:
        own = [*self._load(level), *self._compute(level, step, element)]
        if step.accumulators:
            return self._combining_pass(level, own)
        if self.tuning.is_resident:
            begin = ["  constexpr fuser_index begin = 0;"] * (self.tuning.cluster == 1)
            return ["{", *begin, *indent(own), "}"]
        first, end = ("first", "end") if self.tuning.stretch else ("0", "length")
        # From the end: that is what was read last, and is still in the cache.
        chunks = f"({end} - {first} + {self.chunk - 1}) / {self.chunk}"
        return [
            f"for (fuser_index chunk = {chunks}; chunk > 0; --chunk) {{",
            f"  const fuser_index begin = {first} + (chunk - 1) * {self.chunk};",
            *indent(own),
            "}",
        ]

    def _combining_pass(self, level: int, own: list[str]) -> list[str]:
        kind = f"fuser_pass{level}"
        lines = [f"const {kind} pass{level}{{a}};", f"{kind}::part total{level} = pass{level}.identity();"]
        combine = f"total{level} = pass{level}.combine(total{level}, "
        if not self._shares:
            own = [
                "constexpr fuser_index begin = 0;",
                *own,
                f"{combine}{self._whole_warp(level)});",
            ]
            return [*lines, "{", *indent(own), "}"]
        setup = [
            f"const auto waiting = reinterpret_cast<{kind}::part*>(shared[{self._buffer(level)}][threadIdx.x / T]);"
        ]
        if not self._is_one_batch:
            place = f"shared[{self._buffer(level)}][threadIdx.x / T] + parts_bytes"
            setup.append(f"const auto batches = reinterpret_cast<{kind}::part*>({place});")
        store = [
            f"const auto own = {self._whole_warp(level)};",
            f"if (t % 32 == 0) waiting[(begin - round) / {self.span} + t / 32] = own;",
        ]
        if self._is_one_batch:
            count = self.chunk // self.span
            own = ["constexpr fuser_index begin = 0, round = 0;", *setup, *own, *store, "__syncthreads();"]
            own.append(f"{combine}fuser_warp_batch<{self.span}>(pass{level}, waiting, {count}));")
            return [*lines, "{", *indent(own), "}"]
        if self.tuning.cluster > 1:
            return [*lines, "{", *indent(self._of_blocks(level, setup, own, store)), "}"]
        span = self.span
        fold = [
            f"const fuser_index left = length - round, most = waiting{level} * {span};",
            f"fuser_fold<{span}, T>(pass{level}, total{level}, waiting, batches, "
            f"static_cast<int>(((left < most ? left : most) + {span - 1}) / {span}));",
        ]
        if self.tuning.is_resident:
            own = ["constexpr fuser_index begin = 0, round = 0;", *setup, *own, *store, *fold]
            return [*lines, "{", *indent(own), "}"]
        most = f"waiting{level} * {span}"
        return [
            *lines,
            f"for (fuser_index round = 0; round < length; round += {most}) {{",
            *indent(setup),
            f"  for (fuser_index begin = round; begin < length && begin - round < {most}; begin += {self.chunk}) {{",
            *indent([*own, *store], 2),
            "  }",
            *indent(fold),
            "}",
        ]

    def _of_blocks(self, level: int, setup: list[str], own: list[str], store: list[str]) -> list[str]:
        # A pass of blocks that share a row: each makes parts of its batches, or one part where any order serves.
        stretch, span = self.tuning.stretch, self.span
        batches, length = (stretch or self.chunk) // BATCH, "length"
        if self._is_gathered(level):
            lines = self._gathered(level, own)
            span, batches = BATCH // (self.tuning.team // WARP), 1
            length = f"fuser_index({BATCH} * C)"
        elif stretch:
            lines = ["const fuser_index round = first;", *self._chunks([*own, *store])]
        else:
            lines = ["const fuser_index round = begin;", *own, *store]
            length = "fuser_index(V * T * U * C)" if self._has_whole_chunks else length
        lines += ["fuser_wait();"] * (level == self.loop.combining[0])
        parts = f"waiting, reinterpret_cast<unsigned int*>(batches), boxes + {self.loop.combining.index(level)}"
        fold = f"fuser_fold_blocks<{span}, T, {batches}, C>(pass{level}, total{level}, {parts}, rank, {length});"
        return [*setup, *lines, fold]

    def _gathered(self, level: int, own: list[str]) -> list[str]:
        # A thread adds up what it has of all chunks.
        kind = f"fuser_pass{level}"
        return [
            f"{kind}::part all[U];",
            "#pragma unroll",
            f"for (int u = 0; u < U; ++u) all[u] = pass{level}.identity();",
            *self._chunks(
                [*own, "#pragma unroll", f"for (int u = 0; u < U; ++u) all[u] = pass{level}.combine(all[u], parts[u]);"]
            ),
            f"const auto own = fuser_butterfly<1, W>(pass{level}, fuser_tree<U>(pass{level}, all));",
            "if (t % 32 == 0) waiting[t / 32] = own;",
        ]

    def _chunks(self, lines: list[str]) -> list[str]:
        return [f"for (fuser_index begin = first; begin < end; begin += {self.chunk}) {{", *indent(lines), "}"]

    def _is_gathered(self, level: int) -> bool:
        # Whether any order serves blocks that go over their part of a row.
        step = self.loop.passes[level]
        return bool(self.tuning.stretch) and step.is_free and not self._has_pairs(step)
