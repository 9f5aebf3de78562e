"""The IR: a FusionGroup is an SSA DAG of functor applications.

Values are numbered: the inputs first, then the outputs of each application in order. A group says nothing about
dtypes, shapes or devices; one group serves them all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fuser.application import Application, Input
from fuser.config import config
from fuser.dtypes import plain_number
from fuser.errors import ArgumentError, FuserError, GroupError, describe_type, shows_users_frames
from fuser.fields import check_fields
from fuser.function import READS, Function

if TYPE_CHECKING:
    import networkx

__all__ = [
    "FusionGroup",
    "GroupBuilder",
    "Section",
    "hash_text",
]

JSON_VERSION = 1
# What ``dir()`` shows of a group and of a builder.
PUBLIC = ("applications", "from_json", "inputs", "key", "lint", "numerics", "outputs", "to_json", "to_networkx")
PUBLIC_OF_BUILDER = ("add_input", "apply", "build")
# How many names of applications a short form of a group has.
MAX_NAMES = 5


@dataclass(frozen=True, slots=True, repr=False)
class FusionGroup:
    """A DAG of functor applications that becomes one kernel. Build one with ``GroupBuilder``."""

    inputs: tuple[Input, ...]
    applications: tuple[Application, ...]
    # Values returned, in order.
    outputs: tuple[int, ...]
    # The numerics that it runs with, whatever the settings say; None: those of the settings.
    numerics: str | None = None
    _key: list[int] = field(default_factory=list, compare=False, repr=False)

    @property
    def key(self) -> int:
        """Hash (63 bits): equal for groups that differ only in names, dead code or order of writing."""
        if not self._key:
            self._key.append(hash_text(self.canonical().to_json(indent=None), self.defaults()))
        return self._key[0]

    @property
    def is_strict(self) -> bool:
        """Whether it runs with strict numerics now."""
        return (self.numerics or config.numerics) == "strict"

    def defaults(self) -> tuple[bool | int | float | complex | None, ...]:
        """Return the default of each input, None where there is none."""
        return tuple(item.default for item in self.inputs)

    def fill_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Return one value per input: the given ones, then the defaults of the rest.

        Raises:
            ArgumentError: too many or too few, or a tensor, whose rows would be taken for them.
        """
        given: object = inputs
        if not isinstance(given, Sequence):
            raise ArgumentError(f"the inputs of a group are a list, got {describe_type(given)}")
        rest = self.defaults()[len(inputs) :]
        if len(inputs) > len(self.inputs) or None in rest:
            names = ", ".join(item.name for item in self.inputs)
            raise ArgumentError(f"the group takes {len(self.inputs)} inputs ({names}), got {len(inputs)}")
        return [*inputs, *rest]

    @property
    def has_reduction(self) -> bool:
        """Whether the outputs depend on the elements of a reduction."""
        reduces = {index for index, item in enumerate(self.applications) if item.function.reduces}
        return bool(reduces) and not reduces.isdisjoint(self.live_applications())

    def scalars_of_reductions(self) -> frozenset[int]:
        """Return the inputs that reductions take as scalars."""
        return frozenset(value for item in self.applications if item.function.reduces for value in item.scalars)

    @property
    def has_composite(self) -> bool:
        """Whether an application is an op of several steps."""
        return any(item.function.is_composite for item in self.applications)

    @property
    def arranges(self) -> bool:
        """Whether an application says where elements lie, and computes nothing."""
        return any(item.function.arranges for item in self.applications)

    @property
    def reshapes(self) -> bool:
        """Whether some values have other dimensions than what they are made of."""
        return any(item.function.reshapes for item in self.applications)

    def value_offsets(self) -> tuple[int, ...]:
        """Return the number of each application's first output."""
        offsets, value = [], len(self.inputs)
        for application in self.applications:
            offsets.append(value)
            value += application.function.num_outputs
        return tuple(offsets)

    def producers(self) -> tuple[int, ...]:
        """Return for each value the index of the application that makes it, -1 for inputs."""
        made = [-1] * len(self.inputs)
        for index, application in enumerate(self.applications):
            made += [index] * application.function.num_outputs
        return tuple(made)

    def lint(self) -> None:
        """Check the rules of the IR.

        Raises:
            GroupError: a value is used before it is made, a scalar and a tensor are mixed up, the number of tensors,
                scalars or out_dtypes does not fit the functor, an output is no application's value, or a part of it
                is of a wrong kind.
        """
        for part in (self, *self.inputs):
            check_fields(part)
        if not self.outputs:
            raise GroupError("a group needs an output")
        if self.numerics not in (None, "strict", "fast"):
            raise GroupError(f"numerics={self.numerics!r}: must be one of strict, fast")
        known = len(self.inputs)
        for index, application in enumerate(self.applications):
            check_fields(application, f"application {index}: ")
            where = f"application {index} ({application.function.name})"
            application.lint(where, self.inputs, known)
            known += application.function.num_outputs
        for output in self.outputs:
            if not len(self.inputs) <= output < known:
                raise GroupError(f"output value {output} is made by no application")

    def canonical(self) -> FusionGroup:
        """Return the same computation in one fixed form.

        Applications come depth first from the outputs, equal ones are merged (functors are pure), unused ones are
        gone, names are numbers, and constants are forgotten. Inputs and outputs keep their positions.
        """
        producers, offsets = self.producers(), self.value_offsets()
        builder = GroupBuilder(self.numerics)
        renamed = {
            value: builder.add_input(f"in{value}", is_scalar=item.is_scalar) for value, item in enumerate(self.inputs)
        }
        merged: dict[tuple[Function, tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
        for index in self.applications_from_outputs():
            application = self.applications[index]
            tensors = tuple(renamed[value] for value in application.tensors)
            scalars = tuple(renamed[value] for value in application.scalars)
            signature = (application.function, tensors, scalars)
            if signature not in merged:
                merged[signature] = builder.apply(application.function, tensors, scalars)
            for slot, value in enumerate(merged[signature]):
                renamed[offsets[index] + slot] = value
        assert all(producers[value] >= 0 for value in self.outputs), "lint() holds"
        return builder.build([renamed[value] for value in self.outputs])

    def reads(self, index: int) -> tuple[int, ...]:
        """Return the values that an application reads."""
        return (*self.applications[index].tensors, *self.applications[index].scalars)

    def select_outputs(self, slots: Sequence[int]) -> FusionGroup:
        """Return the canonical group that makes only the outputs at ``slots``; inputs keep their positions."""
        return replace(self, outputs=tuple(self.outputs[slot] for slot in slots), _key=[]).canonical()

    def section(self, indices: Collection[int], wanted: Collection[int] | None = None) -> Section:
        """Return some applications, in order, as a group: it takes what they read and makes what others need.

        Args:
            indices: of the applications.
            wanted: the values that it makes instead, as far as these applications make them.
        """
        inside = [self.applications[index] for index in indices]
        own = [value for value, maker in enumerate(self.producers()) if maker in indices]
        read = sorted({value for item in inside for value in (*item.tensors, *item.scalars)} - {*own})
        others = (item for index, item in enumerate(self.applications) if index not in indices)
        read_later = {value for item in others for value in item.tensors}
        further = (read_later if wanted is None else {*wanted}) - {*self.outputs}
        made = [value for value in self.outputs if value in own and (wanted is None or value in wanted)]
        made += [value for value in own if value in further]
        slot = {value: index for index, value in enumerate([*read, *own])}
        group = FusionGroup(
            tuple(self.inputs[value] if value < len(self.inputs) else Input(f"v{value}") for value in read),
            tuple(
                replace(
                    item,
                    tensors=tuple(slot[value] for value in item.tensors),
                    scalars=tuple(slot[value] for value in item.scalars),
                )
                for item in inside
            ),
            tuple(slot[value] for value in made),
            self.numerics,
        )
        return Section(group, tuple(read), tuple(made), tuple(sorted(indices)))

    def widen(self, ops: Collection[str]) -> FusionGroup:
        """Return the group whose applications of ``ops`` compute half and bfloat16 in float32, as autocast has it."""
        applications = [
            replace(item, function=replace(item.function, promotion=item.function.promotion.wide))
            if item.function.op in ops
            else item
            for item in self.applications
        ]
        return replace(self, applications=tuple(applications), _key=[])

    def needing(self, chosen: Iterable[int]) -> set[int]:
        """Return some applications, and those that need what they make."""
        needing, producers = {*chosen}, self.producers()
        for index, application in enumerate(self.applications):
            if any(producers[value] in needing for value in application.tensors):
                needing.add(index)
        return needing

    def live_applications(self) -> tuple[int, ...]:
        """Return the applications whose elements the outputs depend on, in order: an index needs shapes alone."""
        offsets, needed, live = self.value_offsets(), set(self.outputs), list[int]()
        for index in reversed(range(len(self.applications))):
            item = self.applications[index]
            if not needed.isdisjoint(range(offsets[index], offsets[index] + item.function.num_outputs)):
                live.insert(0, index)
                needed.update(() if item.function.is_index else (*item.tensors, *item.scalars))
        return tuple(live)

    def used_inputs(self) -> tuple[int, ...]:
        """Return the inputs whose elements the outputs depend on, in order."""
        live = [self.applications[index] for index in self.live_applications()]
        used = {value for item in live if not item.function.is_index for value in (*item.tensors, *item.scalars)}
        return tuple(value for value in range(len(self.inputs)) if value in used)

    def tables(self) -> frozenset[int]:
        """Return the inputs whose elements are read at entries that are computed."""
        reads = (item for item in self.applications if item.function.is_read)
        return frozenset(value for item in reads for value in item.tensors[: READS[str(item.function.op)]])

    @property
    def adds_up(self) -> bool:
        """Whether a kernel of it adds up elements of what stays in memory."""
        return any(READS.get(str(item.function.op), 0) > 1 for item in self.applications)

    @property
    def picks(self) -> bool:
        """Whether a kernel of it chooses among parts of what is put together."""
        return any(item.function.op == "pick" for item in self.applications)

    def index_values(self) -> tuple[int, ...]:
        """Return the values that are indices of elements and that the outputs depend on."""
        indices = {index for index, item in enumerate(self.applications) if item.function.is_index}
        live = self.live_applications() if indices else ()
        offsets = self.value_offsets()
        return tuple(offsets[index] for index in live if index in indices)

    def names(self) -> list[str]:
        """Return what the applications are called, for people: an index is part of what takes it."""
        names = [item.function.name for item in self.applications if not item.function.is_index]
        return names or [item.function.name for item in self.applications]

    def to_dict(self) -> dict[str, Any]:
        """Return the group as JSON types."""
        functions: list[dict[str, Any]] = []
        applications = []
        for item in self.applications:
            function = item.function.to_json()
            if function not in functions:
                functions.append(function)
            applications.append(item.to_dict(functions.index(function)))
        return {
            "version": JSON_VERSION,
            "functions": functions,
            "inputs": [item.to_dict() for item in self.inputs],
            "applications": applications,
            "outputs": list(self.outputs),
        } | ({} if self.numerics is None else {"numerics": self.numerics})

    def to_json(self, indent: int | None = 1) -> str:
        """Return the group as a JSON text; None for ``indent`` makes it as short as it can be.

        A Python function that a functor has as its fallback is known to this process alone.
        """
        return json.dumps(self.to_dict(), indent=indent, separators=(",", ":") if indent is None else None)

    @staticmethod
    @shows_users_frames
    def from_json(text: str) -> FusionGroup:
        """Rebuild a group from ``to_json``; raises GroupError for any other text or a group that fails lint."""
        try:
            data = json.loads(text)
            if data["version"] != JSON_VERSION:
                raise GroupError(f"JSON of version {data['version']!r}; this fuser reads version {JSON_VERSION}")
            functions = [Function.from_json(item) for item in data["functions"]]
            group = FusionGroup(
                inputs=tuple(map(Input.from_dict, data["inputs"])),
                applications=tuple(Application.from_dict(item, functions) for item in data["applications"]),
                outputs=tuple(data["outputs"]),
                numerics=data.get("numerics"),
            )
            group.lint()
            # Which an object cannot be where any value may stand.
            hash(group)
        except FuserError:
            raise
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise GroupError(f"this is no JSON of a fusion group: {type(error).__name__}: {error}") from None
        return group

    def to_networkx(self) -> networkx.MultiDiGraph[Any]:
        """Return the DAG as a networkx graph.

        Nodes are ``("input", i)``, ``("application", i)`` and ``("output", i)``; each edge has the ``value`` it
        carries and, into an application, the ``parameter`` it binds.
        """
        import networkx  # noqa: PLC0415 - takes longer to import than the rest of fuser

        view: networkx.MultiDiGraph[Any] = networkx.MultiDiGraph()
        source: list[tuple[str, int]] = []
        for index, item in enumerate(self.inputs):
            view.add_node(("input", index), label=item.name, is_scalar=item.is_scalar)
            source.append(("input", index))
        for index, application in enumerate(self.applications):
            node = ("application", index)
            view.add_node(node, label=application.function.name, application=application)
            tensors = zip(
                application.tensors, application.function.tensor_parameters(len(application.tensors)), strict=True
            )
            for value, parameter in (*tensors, *zip(application.scalars, application.function.scalars, strict=True)):
                view.add_edge(source[value], node, value=value, parameter=parameter.name)
            source += [node] * application.function.num_outputs
        for index, value in enumerate(self.outputs):
            view.add_node(("output", index), label=f"out{index}")
            view.add_edge(source[value], ("output", index), value=value)
        return view

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the key, which other processes may make of something else.
        return FusionGroup, (self.inputs, self.applications, self.outputs, self.numerics)

    def __dir__(self) -> list[str]:
        # What is for users: the rest serves other stages.
        return [*(name for name in object.__dir__(self) if name.startswith("__")), *PUBLIC]

    def __repr__(self) -> str:
        names = [item.function.name for item in self.applications]
        shown = " -> ".join(names if len(names) <= MAX_NAMES else [*names[:3], f"{len(names) - 4} more", names[-1]])
        return f"<fuser.FusionGroup {shown}, {len(self.inputs)} inputs, {len(self.outputs)} outputs>"

    def __str__(self) -> str:
        """One line per application: ``v3 = axpy(v0, v1, alpha=v2)``."""
        offsets = self.value_offsets()
        head = ", ".join(f"v{value}: {item.name}" for value, item in enumerate(self.inputs))
        lines = [f"group({head}):"]
        for offset, item in zip(offsets, self.applications, strict=True):
            made = ", ".join(f"v{offset + slot}" for slot in range(item.function.num_outputs))
            lines.append(f"  {made} = {item}")
        return "\n".join([*lines, f"  return {', '.join(f'v{value}' for value in self.outputs)}"])

    def applications_from_outputs(self) -> list[int]:
        """Return the applications that the outputs need, depth first."""
        # Depth first without recursion: groups can be deep.
        producers, order, seen = self.producers(), [], set[int]()
        stack = [(producers[value], False) for value in reversed(self.outputs)]
        while stack:
            index, done = stack.pop()
            if done:
                order.append(index)
            elif index >= 0 and index not in seen:
                seen.add(index)
                stack.append((index, True))
                stack += [(producers[value], False) for value in reversed(self.applications[index].tensors)]
        return order


def hash_text(text: str, defaults: Sequence[bool | int | float | complex | None]) -> int:
    """Return the key of a group: of its canonical form as JSON (``to_json(indent=None)``), and of its defaults."""
    return int.from_bytes(hashlib.sha256(f"{text}{tuple(defaults)!r}".encode()).digest()[:8]) >> 1


class Section(NamedTuple):
    """Consecutive applications of a group, as a group of their own."""

    group: FusionGroup
    # Values of the whole group that are its inputs and its outputs, in order.
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    # Which of the whole group's applications it has.
    applications: tuple[int, ...]


class GroupBuilder:
    """Builds a FusionGroup: add inputs and applications in any order, then ``build``.

    Handles it returns are opaque until ``build`` numbers the values.

    Args:
        numerics: what the group runs with, whatever the settings say: "strict" or "fast"; None: as the settings say.
    """

    def __init__(self, numerics: str | None = None) -> None:
        self._numerics = numerics
        # Handle -> None for an input, (application, slot) for an application's output.
        self._handles: list[tuple[int, int] | None] = []
        self._inputs: list[Input] = []
        self._applications: list[Application] = []

    def add_input(
        self, name: str, *, is_scalar: bool = False, default: bool | int | float | complex | None = None
    ) -> int:
        """Add an input; return its handle. In the group, inputs with a default come last."""
        self._inputs.append(Input(name, is_scalar, plain_number(default)))
        self._handles.append(None)
        return len(self._handles) - 1

    def apply(
        self, function: Function, tensors: Sequence[int], scalars: Sequence[int] = (), name: str = ""
    ) -> tuple[int, ...]:
        """Apply a function to handles; return one handle per output.

        Raises:
            ArgumentError: it is no Function; of a functor that is ``fn.function``.
        """
        if not isinstance(function, Function):
            raise ArgumentError(f"a Function is wanted, such as a functor's fn.function, got {describe_type(function)}")
        self._applications.append(Application(function, tuple(tensors), tuple(scalars), name))
        first = len(self._handles)
        index = len(self._applications) - 1
        self._handles += [(index, slot) for slot in range(function.num_outputs)]
        return tuple(range(first, len(self._handles)))

    def inline(self, group: FusionGroup, inputs: Sequence[int]) -> tuple[int, ...]:
        """Apply all that a group applies to handles for its inputs; return one handle per output."""
        handles = list(inputs)
        for item in group.applications:
            tensors = [handles[value] for value in item.tensors]
            handles += self.apply(item.function, tensors, [handles[value] for value in item.scalars], item.name)
        return tuple(handles[value] for value in group.outputs)

    def build(self, outputs: Sequence[int]) -> FusionGroup:
        """Return the group that returns the given handles.

        Raises:
            GroupError: a handle is none of this builder's.
        """
        inputs = [handle for handle, made in enumerate(self._handles) if made is None]
        own = dict(zip(inputs, self._inputs, strict=True))
        inputs.sort(key=lambda handle: own[handle].default is not None)
        made = [handle for handle, made in enumerate(self._handles) if made is not None]
        values = {handle: value for value, handle in enumerate(inputs + made)}
        read = [handle for item in self._applications for handle in (*item.tensors, *item.scalars)]
        unknown = [handle for handle in (*read, *outputs) if handle not in values]
        if unknown:
            raise GroupError(f"the builder made no handle {unknown[0]}")
        applications = tuple(
            replace(
                item,
                tensors=tuple(values[handle] for handle in item.tensors),
                scalars=tuple(values[handle] for handle in item.scalars),
            )
            for item in self._applications
        )
        return FusionGroup(
            tuple(own[handle] for handle in inputs),
            applications,
            tuple(values[handle] for handle in outputs),
            self._numerics,
        )

    def __dir__(self) -> list[str]:
        # As a group's.
        return [*(name for name in super().__dir__() if name.startswith("__")), *PUBLIC_OF_BUILDER]

    def __repr__(self) -> str:
        return f"<fuser.GroupBuilder {len(self._inputs)} inputs, {len(self._applications)} applications>"
