"""Kernel text of a group with reductions: what is computed per element and per row, for a dialect's loops.

What a pass over a row needs per element it computes from the inputs again: functors are pure, and memory is slower.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch

from fuser.combining import Reduction
from fuser.cxx.brief import returns_exp
from fuser.cxx.functor import Functor
from fuser.dtypes import dtype_info
from fuser.element import ElementWriter, number_expression, output_type
from fuser.graph import FusionGroup
from fuser.kernel_spec import RowSpec
from fuser.lookups import find_lookups
from fuser.orders import ANY_ORDER
from fuser.plain_texts import (
    chooses,
    counts_elements,
    find_quotient,
    is_costly,
    is_plainly,
    is_sum,
    may_end_in_product,
    takes_decisions,
)
from fuser.row_access import PARTS_BYTES, stacked_bytes
from fuser.row_pass import Accumulator, RowPart, RowPass, Table
from fuser.row_space import reduction_levels

__all__ = ["RowWriter"]


class RowWriter:
    """Writes the functions of a kernel with reductions."""

    def __init__(self, writer: ElementWriter, rows: RowSpec) -> None:
        self.writer = writer
        self.writer.how = "fuser_plainly"
        self.group: FusionGroup = writer.group
        self.rows = rows
        self.levels = reduction_levels(self.group)
        self.producers = self.group.producers()
        self.types: dict[str, str] = {}
        self.texts: list[str] = []
        self.accumulators = {
            index: self._accumulators(index)
            for index, item in enumerate(self.group.applications)
            if item.function.reduction and index in writer.live
        }
        # What is looked up, by application.
        self.tables: dict[int, Table] = {}
        # Values per element that a pass keeps for later ones, and that pass.
        self.kept: dict[int, int] = {}
        # C++ type of the least size that holds each exactly, by variable.
        self.kept_types: dict[str, str] = {}

    def write(self) -> tuple[RowPass, ...]:
        """Write all functions to ``texts``; return what the passes call."""
        passes = range(max(self.levels) + 1)
        if self.rows.keeps:
            self._choose_kept(passes)
        if self.writer.args.tuning.looks:
            self._write_tables()
        return tuple(self._pass(level) for level in passes)

    def _choose_kept(self, passes: Iterable[int]) -> None:
        # What is costly, and computed in an earlier pass anyway.
        first: dict[int, int] = {}
        for level in passes:
            stored, reductions = self._stored_in(level), self._reductions_in(level)
            closure = self._element_closure(self._wanted(stored, reductions), level)
            for index in closure:
                own = self.group.applications[index].function.functors
                if any(is_costly(item) for item in self.writer.functors if item in own):
                    earlier = first.setdefault(index, level)
                    if earlier < level:
                        self.kept |= dict.fromkeys(self.writer.values(index), earlier)

    def _write_tables(self) -> None:
        writer, typing = self.writer, self.writer.typing
        looked = find_lookups(self.group, typing.values, self.rows.is_row, self._stacked_bytes())
        for index, lookup in looked.items():
            item, value = self.group.applications[index], writer.values(index)[0]
            operand, x, result = item.tensors[lookup.operand], f"x{value}", f"l{value}"
            self.types |= {x: "float", result: "float"}
            chosen = self._element_closure([operand], 0)
            made, writer.storing = self._made(chosen), []
            lines = [line for each in chosen for line in writer.application(each)]
            read = [f"v{each}" for each in self._read(chosen) if each not in made] if chosen else [f"v{operand}"]
            # Rounded as torch rounds it, in fast numerics, too.
            rounded = f"fuser_round<{dtype_info(typing.values[operand]).storage}>(v{operand})"
            lines.append(f"{x} = {f'v{operand}' if writer.is_strict or not chosen else rounded};")
            part = self._function(f"fuser_operand{value}", read, [x], chosen, lines)
            taken = ["1.0f" if slot == lookup.factor else writer.isolate(x) for slot in range(len(item.tensors))]
            call = writer.call(index, item.function.functor, taken, [], ["float"])[0]
            if writer.is_strict and lookup.factor < 0:
                call = f"fuser_round<{dtype_info(typing.values[value]).storage}>({call})"
            compute = self._function(f"fuser_compute{value}", [x], [result], [index], [f"{result} = {call};"])
            self.tables[index] = Table(part, compute)
        # What one of them is a function of is not looked up.
        writer.looked = {index: (looked[index].factor, table.result) for index, table in self.tables.items()}

    def _stacked_bytes(self) -> int:
        # Of shared memory where columns come together, beside what rows come to.
        made = zip(self.group.applications, self.group.value_offsets(), strict=True)
        reductions = [(item.function.reduction, slot) for item, slot in made if item.function.reduction]
        sizes = [self.writer.typing.values[slot].itemsize for reduction, slot in reductions if reduction.pieces]
        args = self.writer.args
        return stacked_bytes(args.tuning, args.vector, sizes) + PARTS_BYTES * (len(sizes) < len(reductions))

    def _pass(self, level: int) -> RowPass:
        picks = self._picks_in(level)
        every = [index for index in self._reductions_in(level) if index not in picks]
        columns = [index for index in every if self._reduction(index).pieces]
        reductions = [index for index in every if index not in columns]
        row = self._row_part(level)
        quotients, counts = self._row_quotients(level, every), self._quick_counts(every)
        is_rough = not (self.writer.is_strict or quotients)
        element, quick = self._element_parts(level, every, quotients, counts, is_rough=is_rough)
        is_of_one = element is not None and len(element.reads) == 1 + self.rows.adds
        is_alone = is_of_one and len(every) == 1 and not self._stored_in(level)
        highest, is_of_sizes = self._highest(every[0]) if is_alone else ("", False)
        shares, divided = self._shared_quotients(level, quotients)
        combined = [self._reduction(index) for index in reductions]
        is_any = all(item.order in ANY_ORDER for item in combined)
        return RowPass(
            row=row,
            element=element,
            quick=quick,
            pick=self._pick_part(level, picks) if picks else None,
            picks=self._accumulators_of(picks),
            which=f"v{self._number_of(picks[0])}" if picks else "",
            combine=self._combine_part(f"fuser_combine{level}", reductions) if reductions else None,
            accumulators=self._accumulators_of(reductions),
            commutes=is_any or all(is_sum(item.combine) for item in combined),
            is_free=all(item.is_free(is_strict=self.writer.is_strict) for item in combined),
            is_associative=is_any or all(chooses(item.combine, item.identity) for item in combined),
            decides=any(takes_decisions(item.combine) for item in combined),
            columns=self._accumulators_of(columns),
            merge=self._combine_part(f"fuser_merge{level}", columns) if columns else None,
            highest=highest,
            is_of_sizes=is_of_sizes,
            adds_powers=bool(highest) and self._reduction(every[0]).order == "powers",
            shares=shares,
            divided=divided,
            is_rough=is_rough,
            quick_counts=tuple(counts),
        )

    def _accumulators_of(self, indices: Iterable[int]) -> tuple[Accumulator, ...]:
        return tuple(item for index in indices for item in self.accumulators[index])

    def _element_parts(
        self,
        level: int,
        reductions: Sequence[int],
        quotients: dict[int, tuple[int, str, str]],
        counts: Sequence[str],
        *,
        is_rough: bool,
    ) -> tuple[RowPart | None, RowPart | None]:
        # What computes an element, and what does so in less time, if anything does.
        writer = self.writer
        if writer.is_strict:
            writer.quotients = {index: (slot, f"e{by[1:]}.quotient") for index, (slot, by, _) in quotients.items()}
        element = self._element_part(level, reductions)
        writer.quotients = {index: (slot, f"{by}.{how}") for index, (slot, by, how) in quotients.items()}
        exact = {name: self.types[name] for name in counts}
        self.types |= dict.fromkeys(counts, "fuser_rough_count&" if is_rough else "fuser_quick_count&")
        divides = self._divides(level, reductions)
        writer.how = "fuser_quickly" if divides else "fuser_plainly"
        quick = self._element_part(level, reductions, "quick") if quotients or counts or divides else None
        writer.how = "fuser_plainly"
        self.types |= exact
        writer.quotients = {}
        return element, quick

    def _shared_quotients(self, level: int, quotients: dict[int, tuple[int, str, str]]) -> tuple[str, str]:
        # As RowPass has them: ``shares`` and ``divided``.
        if len(quotients) != 1:
            return "", ""
        ((index, (slot, _, how)),) = quotients.items()
        stored = {self.producers[self.group.outputs[at]]: f"out{at}" for at in self._stored_in(level)}
        divided = f"v{self.group.applications[index].tensors[slot]}" if "share" in how else ""
        return stored.get(index, "") if how == "share" else "", divided

    def _highest(self, index: int) -> tuple[str, bool]:
        # Which input a reduction finds the largest element of, and whether it is that of magnitudes.
        item, combine = self.group.applications[index], self._reduction(index).combine
        value, mapped = item.tensors[0], item.function.functor
        if self._reduction(index).order == "powers":
            return (f"v{value}", False) if self.producers[value] < 0 else ("", False)
        is_of_sizes = is_plainly(mapped, "abs({0})")
        source = self.producers[value]
        if source >= 0 and self.group.applications[source].function.op == "abs" and is_plainly(mapped, "{0}"):
            value, is_of_sizes = self.group.applications[source].tensors[0], True
        if self.producers[value] >= 0 or not (is_of_sizes or is_plainly(mapped, "{0}")):
            return "", False
        # Of magnitudes, the first one of equals is the second one.
        wanted = "{0} != {0} || {0} > {1} ? {0} : {1}" if is_of_sizes else "fmax({0}, {1})"
        return (f"v{value}", is_of_sizes) if is_plainly(combine, wanted) else ("", False)

    def _picks_in(self, level: int) -> list[int]:
        # The reductions that take one element of a row, of the same number: nobody walks for them.
        if self.writer.args.device_type != "cuda" or self.rows.is_across or self.writer.args.tuning.piece:
            return []
        found = [index for index in self._reductions_in(level) if self._reduction(index).order == "pick"]
        return [index for index in found if self._number_of(index) == self._number_of(found[0])]

    def _number_of(self, index: int) -> int:
        return self.group.applications[index].tensors[1]

    def _level_of(self, index: int) -> int:
        # In which pass an application is computed first.
        return max(self.levels[value] for value in self.group.applications[index].tensors)

    # --- per row -----------------------------------------------------------------------------------------------------
    def _row_part(self, level: int) -> RowPart | None:
        reductions = [self._reduction(index) for index in self._reductions_in(level - 1)]
        finished = [
            index
            for index, reduction in zip(self._reductions_in(level - 1), reductions, strict=True)
            if not (reduction.pieces or reduction.scans)
        ]
        own = [
            index
            for index in self.writer.live
            if not self.group.applications[index].function.reduction
            and self._is_row(index)
            and self._level_of(index) == level
        ]
        # Of what nobody reads as a row's, elements make their own.
        chosen = sorted([*finished, *own])
        if not chosen:
            return None
        made = self._made(chosen)
        later = {value for index in self.writer.live if index not in chosen for value in self._taken(index)}
        values = {value for index in chosen for value in self.writer.values(index)}
        stored = [slot for slot, value in enumerate(self.group.outputs) if value in values]
        lines: list[str] = []
        self.writer.storing = stored
        for index in chosen:
            lines += self._finish(index) if index in finished else self.writer.application(index)
        totals = [f"t{item.name}" for index in finished for item in self.accumulators[index]]
        kept = [value for value in made if value in later]
        read = [f"v{value}" for value in self._read(own) if value not in made]
        lines += [f"w{value} = v{value};" for value in kept]
        for value in kept:
            self.types[f"w{value}"] = self.types[f"v{value}"] = self.writer.types[value]
        writes = [*(f"w{value}" for value in kept), *self._outputs(stored)]
        return self._function(f"fuser_row{level}", [*totals, *read], writes, chosen, lines)

    def _finish(self, index: int) -> list[str]:
        reduction = self._reduction(index)
        totals = [f"t{item.name}" for item in self.accumulators[index]]
        values = self.writer.values(index)
        lines = [self.writer.describe(index)]
        results = totals
        if reduction.finish is not None:
            info = dtype_info(self.writer.typing.common[index])
            names = [f"r{value}" for value in values]
            others = [dtype_info(self.writer.typing.values[value]).compute for value in values]
            counts = self._counts()[: len(reduction.finish.tensors) - len(totals)]
            arguments = self._arguments(reduction.finish, [*totals, *counts], info.compute)
            call, results, declarations = self.writer.call(index, reduction.finish, arguments, names, others)
            lines += [*declarations, *([f"{call};"] if results else [])]
            results = results or [call]
        for value, text in zip(values, results, strict=True):
            lines += self.writer.result(value, text, is_apart=True)
        return lines

    def _counts(self) -> list[str]:
        # Elements of a row; rows, for who rounds by them as torch does.
        sizes = [f"a.size[{dim}]" for dim in range(self.writer.args.rank)]
        kept = ["int64_t(1)", *sizes[self.rows.reduced :]] if self.rows.adds else ["int64_t(0)"]
        return [" * ".join(sizes[: self.rows.reduced]), " * ".join(kept)]

    # --- per element -------------------------------------------------------------------------------------------------
    def _row_quotients(self, level: int, reductions: Sequence[int]) -> dict[int, tuple[int, str, str]]:
        # What a thread adds to what it has cannot be done again.
        adds = self.rows.adds and reductions
        if self.writer.args.device_type != "cuda" or self.rows.is_across or adds:
            return {}
        chosen = self._element_closure(self._wanted(self._stored_in(level), reductions), level)
        return {index: found for index in chosen if (found := self._row_quotient(index))}

    def _row_quotient(self, index: int) -> tuple[int, str, str] | None:
        # Which tensor an application divides by what its row has, what divides, and how. In float: the prelude has no
        # other.
        item = self.group.applications[index]
        slots = find_quotient(item.function.functor)
        if slots is None or dtype_info(self.writer.typing.common[index]).compute != "float":
            return None
        divisor = item.tensors[slots[1]]
        if not self.rows.is_row[divisor] or divisor in self._numbers():
            return None
        # Quotients of bfloat16 lie so far from the middle of two of them that their last bits do not matter.
        dtypes = {self.writer.typing.values[value] for value in (*item.tensors, *self.writer.values(index))}
        is_strict = self.writer.is_strict
        is_rough = not is_strict or dtypes == {torch.bfloat16}
        # A division of fast numerics takes no longer than to ask for zeros.
        kind = "share" if is_strict and self._is_power_of(item.tensors[slots[0]], divisor) else "quotient"
        return slots[0], f"d{divisor}", f"{'rough_' * is_rough}{kind}"

    def _is_power_of(self, value: int, total: int) -> bool:
        # Whether a value is an exponential, and the total is what all of a row's add up to.
        source, total_source = self.producers[value], self.producers[total]
        if source < 0 or total_source < 0 or not returns_exp(self.group.applications[source].function.functor):
            return False
        item = self.group.applications[total_source]
        reduction = item.function.reduction
        if reduction is None or reduction.finish or item.tensors != (value,):
            return False
        return is_plainly(item.function.functor, "{0}") and is_sum(reduction.combine)

    def _divides(self, level: int, reductions: Sequence[int]) -> bool:
        # Whether functors of elements divide floats, and may do so in less time.
        chosen = self._element_closure(self._wanted(self._stored_in(level), reductions), level)
        others = self.writer.quotients.keys() | self.writer.looked.keys() | self.accumulators.keys()
        own = [index for index in chosen if index not in others]
        return any(
            dtype_info(self.writer.typing.common[index]).compute == "float" and self.writer.is_quick(index)
            for index in own
        )

    def _quick_counts(self, reductions: Iterable[int]) -> list[str]:
        # The counts that a thread may divide by in less time: those of texts that take any type for them.
        if self.writer.args.device_type != "cuda" or self.rows.is_across or not self.rows.adds:
            return []
        found = []
        for index in reductions:
            add = self._reduction(index).accumulate
            kinds = add.template_parameters[1:] if add else ()
            for item, parameter in zip(self.accumulators[index], add.tensors if add else (), strict=False):
                found += [f"l{item.name}"] * (parameter.type in kinds and item.type == "float")
        return found

    def _pick_part(self, level: int, picks: Sequence[int]) -> RowPart:
        # From the row's tensors, whatever passes keep.
        chosen = self._element_closure(self._wanted((), picks), 0)
        self.writer.storing = []
        lines = [line for index in chosen for line in self.writer.application(index)]
        lines += [line for index in picks for line in self._map(index)]
        made = self._made(chosen)
        read = [f"v{value}" for value in self._read([*chosen, *picks]) if value not in made]
        writes = [f"m{item.name}" for index in picks for item in self.accumulators[index]]
        return self._function(f"fuser_pick{level}", read, writes, [*chosen, *picks], lines)

    def _element_part(self, level: int, reductions: Sequence[int], name: str = "element") -> RowPart | None:
        stored = self._stored_in(level)
        if not stored and not reductions:
            return None
        chosen = self._element_closure(self._wanted(stored, reductions), level)
        lines: list[str] = []
        self.writer.storing = stored
        scans = [index for index in chosen if index in self.accumulators]
        for index in chosen:
            lines += self._running(index) if index in scans else self.writer.application(index)
        for index in reductions:
            lines += self._add(index) if self.rows.adds else self._map(index)
        made = self._made(chosen)
        own = [index for index in (*chosen, *reductions) if index not in scans]
        read = [f"v{value}" for value in self._read(own) if value not in made]
        read += [f"p{item.name}" for index in scans for item in self.accumulators[index]]
        read += [table.result for index, table in self.tables.items() if index in chosen]
        kept = [value for value, earlier in self.kept.items() if earlier == level and value in made]
        lines += [f"k{value} = v{value};" for value in kept]
        self.types |= {f"k{value}": self.writer.types[value] for value in kept}
        for value in kept:
            info = dtype_info(self.writer.typing.values[value])
            is_rounded = self.writer.is_strict and info.is_narrow
            self.kept_types[f"k{value}"] = info.storage if is_rounded else self.writer.types[value]
        accumulators = self._accumulators_of(reductions)
        read += [f"l{item.name}" for item in accumulators if self.rows.adds]
        writes = [f"m{item.name}" for item in accumulators]
        writes += [f"k{value}" for value in kept]
        writes += self._outputs(stored)
        divisors = [*dict.fromkeys(name.partition(".")[0] for _, name in self.writer.quotients.values())]
        self.types |= dict.fromkeys(divisors, "D&") | {"is_exact": "bool"}
        read += divisors
        if self.writer.how == "fuser_quickly":
            lines.append("is_exact &= how.is_exact;")
        if divisors or self.writer.how == "fuser_quickly":
            writes.append("is_exact")
        return self._function(f"fuser_{name}{level}", read, writes, [*chosen, *reductions], lines)

    def _stored_in(self, level: int) -> list[int]:
        # Outputs per element.
        return [
            slot
            for slot, value in enumerate(self.group.outputs)
            if not self.rows.is_row[value] and self.levels[value] == level and not self._is_piece(value)
        ]

    def _is_piece(self, value: int) -> bool:
        index = self.producers[value]
        return index in self.accumulators and self._reduction(index).pieces > 0

    def _reductions_in(self, level: int) -> list[int]:
        return [index for index in self.accumulators if self._level_of(index) == level]

    def _wanted(self, stored: Iterable[int], reductions: Iterable[int]) -> list[int]:
        read = [value for index in reductions for value in self.group.applications[index].tensors]
        return [self.group.outputs[slot] for slot in stored] + read

    def _element_closure(self, wanted: Iterable[int], level: int) -> list[int]:
        # The applications that make some values from inputs, what there is per row, and what was kept.
        found: set[int] = set()
        stack = list(wanted)
        while stack:
            value = stack.pop()
            index = self.producers[value]
            if index < 0 or index in found or self.rows.is_row[value] or self.kept.get(value, level) < level:
                continue
            found.add(index)
            # What an element's running total comes to, the loop knows.
            stack += self._taken(index) if index not in self.accumulators else ()
        return sorted(found)

    def _map(self, index: int) -> list[str]:
        functor = self._functor(index)
        accumulators = self.accumulators[index]
        names = [f"r{item.name}" for item in accumulators]
        reduction = self._reduction(index)
        # A factor of 1 that the compiler sees is none, and then it may contract the product that is left.
        hides = may_end_in_product(reduction.combine)
        lines = self._assign(index, functor, self.writer.operands(index), names, hides=hides)
        return [self.writer.describe(index), *lines]

    def _running(self, index: int) -> list[str]:
        # What an element and those before it come to.
        lines = [self.writer.describe(index)]
        for value, item in zip(self.writer.values(index), self.accumulators[index], strict=True):
            total = f"fuser_to_compute(p{item.name})" if self._rounds(index) else f"p{item.name}"
            lines += self.writer.result(value, total, is_apart=True)
        return lines

    def _add(self, index: int) -> list[str]:
        # What a thread has of a row, with one element more.
        reduction = self.group.applications[index].function.reduction
        assert reduction is not None, "it is one"
        accumulators = self.accumulators[index]
        before, names = [f"l{item.name}" for item in accumulators], [f"r{item.name}" for item in accumulators]
        if reduction.accumulate is not None:
            held = [
                text if item.is_count else self.writer.isolate(text)
                for item, text in zip(accumulators, before, strict=True)
            ]
            taken = [*held, *self.writer.operands(index)]
            return [self.writer.describe(index), *self._assign(index, reduction.accumulate, taken, names)]
        lines = self._map(index)
        lines += [f"const {item.type} e{item.name} = m{item.name};" for item in accumulators]
        after = [f"e{item.name}" for item in accumulators]
        return lines + self._assign(
            index, reduction.combine, [*before, *after], [f"r_{item.name}" for item in accumulators]
        )

    def _assign(
        self,
        index: int,
        functor: Functor,
        operands: Sequence[str],
        names: Sequence[str],
        *,
        hides: bool = False,
        compute: str = "",
    ) -> list[str]:
        # What a functor makes of its operands becomes the accumulators of an application; ``names`` are variables,
        # ``compute`` what its T is, if not the application's.
        accumulators = self.accumulators[index]
        others = [item.type for item in accumulators]
        call, results, declarations = self.writer.call(index, functor, operands, names, others, compute)
        lines = [*declarations, *([f"{call};"] if results else [])]
        for slot, (item, text) in enumerate(zip(accumulators, results or [call], strict=True)):
            own = f"fuser_{'from_compute' if self._rounds(index) else 'cast'}<{item.type}>({text})"
            if self._reduction(index).order not in ANY_ORDER and item.type in ("float", "double"):
                # What ends in a product must not be contracted with what adds to it.
                if item.is_count:
                    # Nothing hides that it is the same for all parts of so many elements, so that what is made of it is
                    # computed once. A one that the compiler sees would change what it contracts.
                    own = self.writer.cross(own) if functor is self._functor(index) else own
                elif may_end_in_product(functor, slot):
                    own = self.writer.isolate(self.writer.cross(own))
                elif hides:
                    own = self.writer.isolate(own)
            lines.append(f"m{item.name} = {own};")
        return lines

    # --- combining ---------------------------------------------------------------------------------------------------
    def _combine_part(self, name: str, reductions: Sequence[int]) -> RowPart:
        lines: list[str] = []
        for index in reductions:
            reduction = self._reduction(index)
            combine, accumulators = reduction.combine, self.accumulators[index]
            parts = [f"{side}{item.name}" for side in "lr" for item in accumulators]
            names = [f"r_{item.name}" for item in accumulators]
            if self._rounds(index):
                lines += [f"m{item.name} = fuser_sum(l{item.name}, r{item.name});" for item in accumulators]
            else:
                compute = accumulators[0].type if reduction.scans else ""
                lines += self._assign(index, combine, parts, names, compute=compute)
        names = [item.name for index in reductions for item in self.accumulators[index]]
        reads = [f"{side}{name}" for side in "lr" for name in names]
        return self._function(name, reads, [f"m{name}" for name in names], reductions, lines)

    def _accumulators(self, index: int) -> tuple[Accumulator, ...]:
        reduction = self._reduction(index)
        info = dtype_info(self.writer.typing.common[index])
        compute, identity = info.compute, reduction.initial(info.compute_dtype)
        first = self.writer.values(index)[0]
        found = []
        for slot, (number, parameter) in enumerate(zip(identity, reduction.combine.tensors, strict=False)):
            kind = output_type(reduction.combine, parameter.type, compute, compute)
            zero = identity_expression(number, kind)
            if self._rounds(index):
                kind, zero = info.storage, f"fuser_from_compute<{info.storage}>(0.0f)"
            elif reduction.scans and self.writer.args.device_type == "cpu" and info.dtype is torch.float32:
                # As ATen's running totals.
                kind = "double"
            output = f"out{self.group.outputs.index(first + slot)}" if reduction.pieces else ""
            taken = reduction.accumulate.tensors[slot].name if reduction.accumulate else ""
            is_own = not reduction.order and counts_elements(self._functor(index), reduction.combine, slot)
            is_count = taken == "count" or is_own
            item = Accumulator(f"{first}_{slot}", kind, zero, output, is_count=is_count)
            found.append(item)
            self.types |= {f"{side}{item.name}": kind for side in "mtlrp"}
        return tuple(found)

    def _rounds(self, index: int) -> bool:
        # ATen's running totals on CUDA have the dtype of their elements.
        is_narrow = self.writer.is_strict and dtype_info(self.writer.typing.common[index]).is_narrow
        return is_narrow and self._reduction(index).scans and self.writer.args.device_type == "cuda"

    def _arguments(self, functor: Functor, totals: Sequence[str], compute: str) -> list[str]:
        # Accumulators as the finishing functor declares them.
        kinds = [output_type(functor, parameter.type, compute, "") for parameter in functor.tensors]
        casts = [f"fuser_cast<{kind}>({text})" if kind else text for kind, text in zip(kinds, totals, strict=True)]
        return [self.writer.isolate(text) for text in casts]

    def _functor(self, index: int) -> Functor:
        return self.group.applications[index].function.functor

    def _reduction(self, index: int) -> Reduction:
        reduction = self.group.applications[index].function.reduction
        assert reduction is not None, "it is one"
        return reduction

    # --- functions ---------------------------------------------------------------------------------------------------
    def _is_row(self, index: int) -> bool:
        return all(self.rows.is_row[value] for value in self.writer.values(index))

    def _taken(self, index: int) -> Sequence[int]:
        # The values that an application reads: an index is given by the loop, and so its own operand.
        application = self.group.applications[index]
        return self.writer.values(index) if application.function.is_index else application.tensors

    def _made(self, chosen: Iterable[int]) -> list[int]:
        # The values that some applications give variables.
        own = [index for index in chosen if not self.group.applications[index].function.is_index]
        return [value for index in own for value in self.writer.values(index)]

    def _read(self, chosen: Collection[int]) -> list[int]:
        # Values that some applications read through variables, in order.
        return sorted({value for index in chosen for value in self._taken(index)} - self._numbers())

    def _numbers(self) -> set[int]:
        return {index for index, item in enumerate(self.writer.args.inputs) if item and item.number}

    def _outputs(self, slots: Iterable[int]) -> list[str]:
        names = []
        for slot in slots:
            names.append(f"out{slot}")
            self.types[f"out{slot}"] = dtype_info(self.writer.typing.values[self.group.outputs[slot]]).storage
        return names

    def _function(
        self, name: str, reads: Sequence[str], writes: Sequence[str], chosen: Iterable[int], lines: Sequence[str]
    ) -> RowPart:
        for variable in reads:
            if variable[0] == "v":
                self.types[variable] = self.writer.types[int(variable[1:])]
        used = {
            value
            for index in chosen
            for value in (*self.group.applications[index].tensors, *self.group.applications[index].scalars)
        }
        head = [
            f"const {self.writer.types[value]} v{value} = {number_expression(value, kind)};"
            for value in sorted(used & self._numbers())
            if (item := self.writer.args.inputs[value]) and (kind := item.number)
        ]
        if any("zero)" in line for line in lines):
            head.append("const int64_t zero = a.zero;")
        if any(f"<{self.writer.how}, " in line for line in lines):
            head.append(f"{self.writer.how} how;")
        parameters = ["const fuser_args& a", *(f"const {self.types[item]} {item}" for item in reads)]
        parameters += [f"{self.types[item]}& {item}" for item in writes]
        body = "\n".join(f"  {line}" for line in (*head, *lines))
        template = "template <typename D> " * any(self.types[item] == "D&" for item in reads)
        self.texts.append(f"\n{template}FUSER_INLINE void {name}({', '.join(parameters)}) {{\n{body}\n}}\n")
        return RowPart(name, tuple(reads), tuple(writes))


def identity_expression(number: bool | int | float | complex, kind: str) -> str:
    """Return a number as an expression of a C++ type; infinities are an integer type's ends."""
    if isinstance(number, complex):
        return f"fuser_cast<{kind}>(std::complex<double>({_literal(number.real)}, {_literal(number.imag)}))"
    if isinstance(number, float) and math.isinf(number):
        return f"fuser_end<{kind}>({'true' if number > 0 else 'false'})"
    return f"fuser_cast<{kind}>({_literal(number)})"


def _literal(number: bool | int | float) -> str:
    if isinstance(number, bool):
        return str(number).lower()
    if isinstance(number, int):
        # The smallest one has no literal of its own.
        return f"({number + 1}LL - 1)" if number < 0 else f"{number}{'ULL' if number >= 2**63 else 'LL'}"
    if math.isnan(number):
        return "double(NAN)"
    return number.hex() if math.isfinite(number) else f"double({'-' * (number < 0)}INFINITY)"
