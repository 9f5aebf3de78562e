"""What each thread reads, computes and writes of a row whose neighbouring elements threads take side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from fuser.access import Tuning
from fuser.cuda.row_text import RowText, in_turns
from fuser.kernel_source import Operand, indent
from fuser.row_access import LONG_SHARE
from fuser.row_pass import RowPart, RowPass

__all__ = ["WARP", "AlongElements"]

WARP = 32


class AlongElements(RowText):
    """Writes the elements of such a kernel: U vectors of V elements of each of T threads."""

    @property
    def tuning(self) -> Tuning:
        """How the work is divided."""
        return self.loop.tuning

    @property
    def teams(self) -> int:
        """Rows that a block has at a time."""
        return self.tuning.block // self.tuning.team

    @property
    def chunk(self) -> int:
        """Elements of a row that its team has at a time."""
        return self.tuning.unroll * self.tuning.team * self.loop.vector

    @property
    def lanes(self) -> int:
        """Threads that combine by shuffles."""
        return min(self.tuning.team, WARP)

    @property
    def span(self) -> int:
        """Elements that those have at a time."""
        return self.lanes * self.tuning.unroll * self.loop.vector

    @property
    def _has_whole_vectors(self) -> bool:
        return bool(self.tuning.multiple)

    @property
    def _has_whole_chunks(self) -> bool:
        return self.tuning.multiple == self.chunk * self.tuning.sharers

    def _each_row(self, body: list[str]) -> list[str]:
        # A block's teams have neighbouring rows.
        return [
            f"for (fuser_index first = static_cast<fuser_index>(blockIdx.x) * {self.teams}; first < rows;",
            f"     first += static_cast<fuser_index>(gridDim.x) * {self.teams}) {{",
            *indent(body),
            "}",
        ]

    def _keeps(self, item: Operand) -> bool:
        # Whether what a thread has read of an operand stays in registers for later passes.
        return self.tuning.is_resident and not self._is_late(item)

    def _is_late(self, item: Operand) -> bool:
        # Whether each vector is read where it is needed: what only the last pass reads, and all rows have in common, is
        # near, and not worth the registers.
        *before, last = self.loop.passes
        is_lasts = item.access.is_shared and item not in self._read_by(before) and item in self._read_by([last])
        return bool(before) and self.tuning.is_resident and is_lasts and not self._is_anywhere(item)

    def _read_by(self, steps: Iterable[RowPass]) -> list[Operand]:
        # What some passes read of the elements.
        read = [item for step in steps if step.element for item in self.loop.full(step.element)]
        return list(dict.fromkeys(item for item in read if not (item.is_output or item.is_counter)))

    def _kept_vectors(self) -> list[str]:
        # What a thread reads once and several passes use.
        found = [item for item in self._read_by(self.loop.passes) if self._keeps(item)]
        kept = [f"fuser_vector<{self._kept_type(name)}, V> {name}[U];" for name in self.loop.kept]
        return [*(f"{self._vector(item)} {item.name}[U];" for item in found), *kept]

    def _kept_type(self, name: str) -> str:
        # A thread that keeps few values keeps them as it computes with them.
        has_few = self.tuning.unroll * self.loop.vector <= LONG_SHARE
        return (self.loop.types if has_few else self.loop.kept_types)[name]

    def _new_inputs(self, level: int) -> list[Operand]:
        # What a pass reads.
        known = {item for item in self._read_by(self.loop.passes[:level]) if self._keeps(item)}
        return [item for item in self._read_by(self.loop.passes[level : level + 1]) if item not in known]

    def _load(self, level: int) -> list[str]:
        inputs = [item for item in self._new_inputs(level) if not self._is_late(item)]
        if not inputs:
            return self._forget(level)
        lines = [f"{self._vector(item)} {item.name}[U];" for item in inputs if not self._keeps(item)]
        again = [item for item in inputs if item in self.loop.held and not self._reads_first(item, level)]
        own = f"({self._held_from} + lead) / V + u * W"
        held = [f"{item.name}[u] = held_{item.name}[{own}];" for item in again]
        return [*lines, *self._reads([item for item in inputs if item not in again], also=held), *self._forget(level)]

    @property
    def _held_from(self) -> str:
        # Where a team's elements begin in shared memory.
        return "(begin - first)" if self.tuning.stretch else "begin"

    def _forget(self, level: int) -> list[str]:
        # A compiler would keep what an earlier pass made of the elements, too.
        known = self._read_by(self.loop.passes[:level])
        again = [item for item in self._read_by(self.loop.passes[level : level + 1]) if item in known]
        again = [item for item in again if self._keeps(item) and self._forgets(item)]
        forget = [f"for (int u = 0; u < U; ++u) fuser_forget({item.name}[u]);" for item in again]
        return [line for text in forget for line in ("#pragma unroll", text)]

    def _forgets(self, item: Operand) -> bool:
        # Narrow ones take half the registers, which are few in clusters, and where there are several operands.
        has_few = self.tuning.cluster > 1 or len(self._read_by(self.loop.passes)) > 1
        return has_few and item.info.dtype.itemsize < 4 and self.tuning.unroll * self.loop.vector > LONG_SHARE

    def _reads(self, items: list[Operand], row: str = "row", to: str = "", also: Sequence[str] = ()) -> list[str]:
        # What a thread reads of a row: variables whose names begin with ``to``, and what else it does for each vector.
        anywhere = [item for item in items if self._is_anywhere(item)]
        direct = [item for item in items if item not in anywhere]
        lines = [
            f"fuser_load_anywhere({to}{item.name}, {row}.{item.name} + (begin + lead), {self._left()}, "
            "begin + lead == 0);"
            for item in anywhere
        ]
        loads = [f"{to}{item.name}[u] = {self._read(item, row)};" for item in direct]
        loads = [*self._place(direct, reads=True), *loads, *also]
        return [*lines, "#pragma unroll", "for (int u = 0; u < U; ++u) {", *indent(loads), "}"]

    def _place(self, items: list[Operand], *, reads: bool = False, is_whole: bool = False) -> list[str]:
        # Where the thread's u-th vector is, and how many elements there are from there on: V if all are whole.
        own, left = "begin + lead + u * (W * V)", f"const {self.signed} left = static_cast<{self.signed}>(length - n);"
        is_whole = is_whole or self._has_whole_chunks
        if is_whole or (reads and self._has_whole_vectors):
            left = "constexpr int left = V;"
        elif self._has_whole_vectors:
            left = "const int left = n < length ? V : 0;"
        if reads and not is_whole:
            # What is missing is read elsewhere: all vectors are computed side by side, without a branch for each.
            lines = [f"const fuser_index own = {own}, n = own < length ? own : 0;", left]
        else:
            lines = [f"const fuser_index n = {own};", left]
        if not items:
            return lines
        return [*lines, *self.place("n", "begin" if self.tuning.is_straight else "")]

    def _address(self, item: Operand, row: str = "row", *, is_whole: bool = False) -> str:
        if (is_whole or self._has_whole_chunks) and len(self.reduced) == 1 and item.inner == 1 and not item.is_counter:
            # Numbers of 32 bits may wrap, pointers don't: what all vectors of a thread have in common is added once.
            return f"{row}.{item.name} + (begin + lead) + u * (W * V)"
        if self.tuning.is_straight and item.inner == 1 and not item.is_counter:
            return f"{self._straight_to(item, row)} + lead + u * (W * V)"
        return self.address(f"{row}.{item.name}", item, self.reduced)

    def _straight_to(self, item: Operand, row: str = "row") -> str:
        # Where the team's elements begin, which lie along the innermost dimension.
        return self.address(f"{row}.{item.name} + (begin - q0 * {self.size(0)})", item, self.reduced[1:])

    def _vector(self, item: Operand) -> str:
        return f"fuser_vector<{item.info.storage}, {'V' if item.inner else '1'}>"

    def _read(self, item: Operand, row: str = "row") -> str:
        place = self._address(item, row)
        if item.inner == 2:
            return f"fuser_gather<V>({place}, {self.stride(item, 0)}, left)"
        return f"fuser_load<{'V' if item.inner else '1'}, {item.access.width if item.inner else 1}>({place}, left)"

    def _left(self) -> str:
        # Elements from a thread's first one on.
        return f"static_cast<{self.signed}>(length - (begin + lead))"

    def _is_anywhere(self, item: Operand) -> bool:
        # Whether a vector would take four accesses or more, and a warp's are neighbours in memory.
        is_row = self.tuning.team >= WARP and len(self.reduced) == 1 and not item.is_counter
        is_word = self.loop.vector * item.info.dtype.itemsize % 4 == 0
        return item.inner == 1 and is_row and is_word and 4 * item.access.width <= self.loop.vector

    def _divisors(self, step: RowPass) -> list[str]:
        # What a row's elements are divided by.
        if step.quick is None or step.element is None:
            return []
        known = self.row_values(step.element)
        divisors = [name for name in step.quick.reads if name[0] == "d"]
        return [f"const fuser_divisor {name}(fuser_cast<float>({known[f'v{name[1:]}']}));" for name in divisors]

    def _quickly(self, step: RowPass, element: RowPart, write: Callable[[RowPart], list[str]]) -> list[str]:
        # What is done in less time first, and again where that fails.
        if step.quick is None:
            return write(element)
        return ["{", *indent(["bool is_exact = true;", *write(step.quick), *self._exactly(element, write)]), "}"]

    def _exactly(self, element: RowPart, write: Callable[[RowPart], list[str]]) -> list[str]:
        return ["if (!is_exact) {", *indent([*self._exact_divisors(element), *write(element)]), "}"]

    def _exact_divisors(self, element: RowPart) -> list[str]:
        return [f"const fuser_exact_divisor {name}(d{name[1:]});" for name in element.reads if name[0] == "e"]

    def _compute(self, level: int, step: RowPass, element: RowPart) -> list[str]:
        if self._has_pairs(step):
            each = [
                "#pragma unroll",
                "for (int u = 0; u < U; ++u) {",
                *indent([*self._place([]), "if (left > 0) {}"]),
                "}",
            ]
            part = f"fuser_pass{level}::part parts[1];"
            names = [f"parts[0].m{item.name}" for item in step.accumulators]
            found = [part, *self._find_extreme(step, each), f"{names[0]} = highest.value();"]
            return [*found, *self._add_powers(step, each, *names)] if step.adds_powers else found
        outputs = [item for item in self.loop.full(element) if item.is_output and self._is_anywhere(item)]
        parts, _, missing = self._parts(level)
        head = [parts] if step.accumulators else []
        head += [f"{self._vector(item)} made_{item.name}[U];" for item in outputs]
        head += self._divisors(step)
        each = self._vectors(level, step, element, is_whole=self._has_whole_chunks)
        if self._has_whole_chunks:
            each = self._ask_once(level, step, element, each)
        none = ["#pragma unroll", f"for (int u = 0; u < U; ++u) {missing}"]
        none = indent(none * bool(step.accumulators))
        if not self._has_whole_chunks and self.tuning.team > WARP:
            # Most warps have all of their vectors, and ask no question for each.
            whole = self._vectors(level, step, element, is_whole=True)
            whole = self._ask_once(level, step, element, whole)
            first = "begin + (lead - t % W * V)"
            each = [
                f"if ({first} + U * W * V <= length) {{",
                *indent(whole),
                f"}} else if ({first} < length) {{",
                *indent(each),
                "} else {",
                *none,
                "}",
            ]
        elif not self._has_whole_vectors:
            # Rows of nothing have no element to stand for those that are missing.
            each = ["if (length > 0) {", *indent(each), "} else {", *none, "}"]
        left = f"is_row ? {self._left()} : {self.signed}(0)"
        stores = [
            f"fuser_store_anywhere(row.{item.name} + (begin + lead), made_{item.name}, {left});" for item in outputs
        ]
        return [*head, *each, *stores]

    def _ask_once(self, level: int, step: RowPass, element: RowPart, each: list[str]) -> list[str]:
        # All that a thread divides is no less than the smallest of it, which is found in less time than each is asked.
        kept = f"k{step.divided[1:]}"
        if step.quick is None or kept not in self.loop.kept or kept in element.writes:
            return each
        if self._kept_type(kept) not in ("fuser_bfloat16", "fuser_half"):
            # Of others two are no word.
            return each
        (divisor,) = (name for name in step.quick.reads if name[0] == "d")
        return [
            f"fuser_extreme<{self._kept_type(kept)}, V, false> least;",
            "#pragma unroll",
            f"for (int u = 0; u < U; ++u) least.add({kept}[u]);",
            f"if (least.value() > __uint_as_float({divisor}.lowest)) {{",
            f"  const fuser_whole_divisor whole({divisor});",
            *indent(self._vectors(level, step, element, is_whole=True, asks=False)),
            "} else {",
            *indent(each),
            "}",
        ]

    # --- the largest element -----------------------------------------------------------------------------------------
    def _has_pairs(self, step: RowPass) -> bool:
        # Whether it finds the largest of elements of which two fit in a word.
        return any(map(self._is_narrow if step.adds_powers else self._is_paired, self._compared(step)))

    def _compared(self, step: RowPass) -> list[Operand]:
        # What it finds the largest of, if that is read.
        return [item for item in self._read_by([step]) if item.variable == step.highest]

    def _is_paired(self, item: Operand) -> bool:
        # Whether two of its elements are a word, and vectors have all of theirs.
        return self._is_narrow(item) and self._has_whole_vectors and not self._is_anywhere(item)

    def _is_narrow(self, item: Operand) -> bool:
        return self.loop.vector > 1 and item.inner == 1 and item.info.dtype in (torch.bfloat16, torch.float16)

    def _find_extreme(self, step: RowPass, each: list[str]) -> list[str]:
        # ``each``: the loop over vectors, with a place for what is done with one of them.
        (item,) = self._compared(step)
        # What is missing adds nothing to powers.
        fill = f"if (left < V) fuser_fill({item.name}[u], left); " * (step.adds_powers and not self._is_paired(item))
        add = f"{fill}highest.add({item.name}[u]{', true' * step.is_of_sizes});"
        add = f"{{ {add} }}" if fill else add
        return [
            f"fuser_extreme<{item.info.storage}, V, true{', true' * step.is_of_sizes}> highest;",
            *(line.replace("{}", add) for line in each),
        ]

    def _add_powers(self, step: RowPass, each: list[str], top: str, total: str) -> list[str]:
        (item,) = self._compared(step)
        add = f"{total} += fuser_powers({item.name}[u], {top});"
        return [
            # All of it may be infinitely little.
            f"{top} = fmaxf({top}, {-torch.finfo(torch.float32).max}f);",
            f"{total} = 0;",
            *(line.replace("{}", add) for line in each),
        ]

    def _parts(self, level: int) -> tuple[str, str, str]:
        # What declares the parts of a pass, what makes a vector's of its elements' own, and of one that is missing.
        none = f"parts[u] = pass{level}.identity();"
        take = f"parts[u] = fuser_tree<V>({self._whole_pass(level)}, own);"
        return f"fuser_pass{level}::part parts[U];", take, none

    def _whole_pass(self, level: int) -> str:
        # A pass, for parts of the whole chunk.
        is_alike = self._has_whole_chunks and any(item.is_count for item in self.loop.passes[level].accumulators)
        return f"fuser_alike<fuser_pass{level}>{{pass{level}}}" if is_alike else f"pass{level}"

    def _vectors(self, level: int, step: RowPass, element: RowPart, *, is_whole: bool, asks: bool = True) -> list[str]:
        # The loop over a thread's vectors; whether all elements of its warp's are there, and whether each division asks
        # if it may be done in less time.
        known = self.row_values(element)
        placed = [item for item in self.loop.full(element) if item.is_output or item.is_counter]
        outputs = [item for item in placed if item.is_output]
        lines, (_, take, missing) = self._place(placed, is_whole=is_whole), self._parts(level)
        if not is_whole and self.tuning.team > WARP and not self._has_whole_vectors:
            # A warp that has nothing there goes on: it takes long to ask for each element.
            none = missing if step.accumulators else ""
            lines.append(f"if (n - t % W * V >= length) {{ {none} continue; }}")
        late = [item for item in self.loop.full(element) if not item.is_output and self._is_late(item)]
        first = [item for item in self.loop.held if self._reads_first(item, level)]
        place = f"({self._held_from} + lead) / V + u * W" if self.tuning.stretch else "n / V"
        lines += [f"held_{item.name}[{place}] = {item.name}[u];" for item in first]
        for item in self.loop.full(element):
            if item.is_output:
                lines.append(f"{item.info.storage} {item.name}[V];")
                known[item.variable] = f"{item.name}[k]"
            elif item.is_counter:
                lines.append(f"const auto {item.name} = {self._read(item)};")
                known[item.variable] = f"{item.name}[{'k' if item.inner else '0'}]"
            else:
                vector = f"{item.name}[u{' % L' if item in late else ''}]"
                known[item.variable] = f"fuser_to_compute({vector}[{'k' if item.inner else '0'}])"
        known |= {f"m{item.name}": f"own[k].m{item.name}" for item in step.accumulators}
        known |= {f"m{item.name}": f"added[k].m{item.name}" for item in step.columns}
        if step.accumulators:
            lines.append(f"fuser_pass{level}::part own[V];")
        if step.columns:
            lines.append(f"fuser_columns{level}::part added[V];")
        kept = [name for name in element.writes if name[0] == "k"]
        known |= {f"v{name[1:]}": f"fuser_to_compute({name}[u][k])" for name in self.loop.kept if name not in kept}
        known |= {name: f"kept_{name}[k]" for name in kept}
        lines += [f"{self.loop.types[name]} kept_{name}[V];" for name in kept]
        lines += self.look_up(element, known)
        if not asks:
            assert step.quick is not None, "it divides"
            known |= {name: "whole" for name in step.quick.reads if name[0] == "d"}
        # A functor's own divisions ask in any case.
        lines += self._quickly(step, element, lambda part: _each_element(part.call(known)))
        if step.columns:
            add = f"column{level}[u][k] = columns{level}.combine(column{level}[u][k], added[k]);"
            lines += _each_element(f"if (is_row) {add}" if self.teams > 1 else add)
        for name in kept:
            value = f"fuser_exactly<{self._kept_type(name)}>(kept_{name}[k])"
            lines += [*_each_element(f"{name}[u].set(k, {value});"), f"{name}[u].pack();"]
        if step.accumulators:
            if not is_whole and not self._has_whole_vectors:
                lines += _each_element(f"if (k >= left) own[k] = pass{level}.identity();")
            lines.append(take)
            if not is_whole and self._has_whole_vectors:
                lines.append(f"if (left == 0) {missing}")
        for item in outputs:
            if self._is_anywhere(item):
                lines += _each_element(f"made_{item.name}[u].set(k, {item.name}[k]);")
            else:
                lines.append(self._write(item, is_whole=is_whole))
        if late:
            loads = [f"{item.name}[u % L] = {self._read(item)};" for item in late]
            loads = [*self._place(late, reads=True, is_whole=is_whole), *loads]
            return in_turns([f"{self._vector(item)} {item.name}[L];" for item in late], loads, lines)
        return ["#pragma unroll", "for (int u = 0; u < U; ++u) {", *indent(lines), "}"]

    def _reads_first(self, item: Operand, level: int) -> bool:
        readers = [
            number
            for number, step in enumerate(self.loop.passes)
            if step.element and item.variable in step.element.reads
        ]
        return readers[0] == level

    def _write(self, item: Operand, *, is_whole: bool) -> str:
        place = self._address(item, is_whole=is_whole)
        left = f"is_row ? left : {self.signed}(0)"
        if item.inner == 2:
            return f"fuser_scatter<V>({place}, {self.stride(item, 0)}, {item.name}, {left});"
        return f"fuser_store<V, {item.access.width}>({place}, {item.name}, {left});"


def _each_element(line: str) -> list[str]:
    return ["#pragma unroll", f"for (int k = 0; k < V; ++k) {line}"]
