"""Stored measurements, by model, recipe, machine class and settings, for the next tuning run: JSON lines.

Values in and out are those of tuning/measurements.py; the caller gives the time.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from csdctl.documents import make_directory
from csdctl.errors import CsdctlError
from csdctl.fleet.hardware import FleetClass, MachineClass
from csdctl.notify import Say
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ModelProperties,
    ProbeMeasurement,
    TrialMeasurement,
)
from csdctl.worker.protocol.run_spec import Runtime

NUM_NEWEST = 50
"""Repeated measurements that are used, the newest: a fleet changes."""
REMEDY = "free some disk space, or fix permissions"

ValueT = TypeVar("ValueT", bound=ProbeMeasurement | CollectiveMeasurement | TrialMeasurement)
ClassT = TypeVar("ClassT", bound=MachineClass | FleetClass)
NO_MODEL = ModelProperties("", "")
"""The model of a sum, which has none."""


@dataclass(frozen=True)
class Stored(Generic[ValueT, ClassT]):
    """A measurement, and what was measured: a model on a machine class or fleet class."""

    kind: str
    model: ModelProperties
    recipe: str
    """A hash of what else than the model a step's time depends on."""
    of: ClassT
    value: ValueT


@dataclass(frozen=True)
class Kind(Generic[ValueT, ClassT]):
    """A kind of measurement: its name, the type of its lines, and what it is repeated by."""

    name: str
    lines: TypeAdapter[Stored[ValueT, ClassT]]
    repeated_by: Callable[[ValueT], tuple[Any, ...]]


PROBE = Kind(
    "probe",
    TypeAdapter(Stored[ProbeMeasurement, MachineClass]),
    lambda probe: (probe.settings, probe.batch_size),
)
COLLECTIVE = Kind(
    "collective",
    TypeAdapter(Stored[CollectiveMeasurement, FleetClass]),
    lambda sums: (sums.name, sums.num_ranks, sums.num_bytes),
)
TRIAL = Kind("trial", TypeAdapter(Stored[TrialMeasurement, FleetClass]), lambda trial: ())
KINDS: dict[str, Kind[Any, Any]] = {kind.name: kind for kind in (PROBE, COLLECTIVE, TRIAL)}


@dataclass(frozen=True)
class ProbeSummary:
    """All probes of one model with one recipe, machine class and settings."""

    model: ModelProperties
    recipe: str
    machine_class: MachineClass
    settings: Runtime
    num_probes: int
    smallest: int | None
    """The smallest batch size that fitted in memory; None: none did."""
    largest: int | None
    too_large: int | None
    """The smallest batch size that did not fit; None: all did."""
    best_batch_size: int | None
    best_samples_per_s: float | None
    measured_at: float
    """Unix time of the newest."""


@dataclass(frozen=True)
class CollectiveSummary:
    """All sums by one collective, of one size and number of ranks, on one fleet class."""

    fleet_class: FleetClass
    name: str
    num_ranks: int
    num_bytes: int
    num_measured: int
    median_s: float
    measured_at: float
    """Unix time of the newest."""


@dataclass(frozen=True)
class Overview:
    """Everything: probes by model, sums by fleet, trials oldest first."""

    probed: tuple[ProbeSummary, ...] = ()
    summed: tuple[CollectiveSummary, ...] = ()
    tried: tuple[Stored[TrialMeasurement, FleetClass], ...] = ()


class MeasurementStore:
    """The measurements in a file. Its failures raise CsdctlError; if it is optional, they are said instead.

    Tuning works without earlier measurements, and goes on when new ones cannot be stored.
    """

    def __init__(
        self,
        path: Path,
        say: Say = lambda line: None,
        *,
        is_optional: bool = False,
        is_fresh: bool = False,
    ) -> None:
        """Read the file at `path`, if there is one; `say` tells of lines that are left out.

        With `is_fresh`, earlier measurements are not read, but new ones are stored.
        """
        self._path, self._say, self._is_optional = path, say, is_optional
        self._stored: list[Stored[Any, Any]] = []
        content, num_foreign = b"", 0
        try:
            content = path.read_bytes() if path.exists() and not is_fresh else b""
        except OSError as error:
            self._fail("earlier measurements are not used", error)
        for line in filter(None, content.split(b"\n")):
            try:
                self._stored.append(KINDS[from_json(line)["kind"]].lines.validate_json(line))
            except (ValidationError, ValueError, TypeError, KeyError):
                num_foreign += 1
        if num_foreign:
            say(f"{path}: lines that are damaged or of another version are ignored: {num_foreign}")

    def add(
        self,
        kind: Kind[ValueT, ClassT],
        of: ClassT,
        values: Sequence[ValueT],
        model: ModelProperties = NO_MODEL,
        recipe: str = "",
    ) -> None:
        """Store measurements of one class."""
        added = [Stored(kind.name, model, recipe, of, value) for value in values]
        self._stored += added
        # A line end comes first: after a line that was cut off, it ends that one.
        content = b"".join(b"\n" + kind.lines.dump_json(one) for one in added)
        try:
            make_directory(self._path.parent)
            with self._path.open("ab", buffering=0) as file:  # in one piece, beside other writers
                if file.write(content) != len(content):
                    raise OSError("the disk is full")
        except OSError as error:
            self._fail("measurements are not stored", error)

    def find(
        self, kind: Kind[ValueT, ClassT], class_key: str, model_hash: str = NO_MODEL.hash, recipe: str = ""
    ) -> list[ValueT]:
        """Return the newest measurements of a kind on one class, of one model and recipe, oldest first."""
        wanted = class_key, model_hash, recipe
        found = [
            one.value for one in self._select(kind) if (one.of.key, one.model.hash, one.recipe) == wanted
        ]
        repeated: dict[tuple[Any, ...], list[ValueT]] = defaultdict(list)
        for value in found:
            repeated[kind.repeated_by(value)].append(value)
        return [value for value in found if value in repeated[kind.repeated_by(value)][-NUM_NEWEST:]]

    def overview(self) -> Overview:
        """Summarize all measurements: counts and extremes rather than every measurement."""
        probed: dict[tuple[ModelProperties, str, MachineClass, Runtime], list[ProbeMeasurement]] = (
            defaultdict(list)
        )
        for probe in self._select(PROBE):
            probed[probe.model, probe.recipe, probe.of, probe.value.settings].append(probe.value)
        summed: dict[tuple[FleetClass, str, int, int], list[CollectiveMeasurement]] = defaultdict(list)
        for one in self._select(COLLECTIVE):
            summed[one.of, one.value.name, one.value.num_ranks, one.value.num_bytes].append(one.value)
        summaries = [_summarize_probes(key, probes) for key, probes in probed.items()]
        sums = [
            CollectiveSummary(
                *key, len(times), median(timed.seconds for timed in times), times[-1].measured_at
            )
            for key, times in summed.items()
        ]
        return Overview(
            tuple(sorted(summaries, key=_order)),
            tuple(
                sorted(sums, key=lambda one: (one.fleet_class.key, one.name, one.num_ranks, one.num_bytes))
            ),
            tuple(self._select(TRIAL)),
        )

    def _select(self, kind: Kind[ValueT, ClassT]) -> list[Stored[ValueT, ClassT]]:
        """Return the measurements of a kind, oldest first."""
        return sorted(
            (one for one in self._stored if one.kind == kind.name), key=lambda one: one.value.measured_at
        )

    def _fail(self, failure: str, error: OSError) -> None:
        message = f"{failure}: {self._path}: {error.strerror or error}"
        if not self._is_optional:
            raise CsdctlError(message, remedy=REMEDY) from error
        self._say(message)


def _order(one: ProbeSummary) -> tuple[Any, ...]:
    return one.model.name, one.model.hash, one.recipe, one.machine_class.key, astuple(one.settings)


def _summarize_probes(
    subject: tuple[ModelProperties, str, MachineClass, Runtime], probes: Sequence[ProbeMeasurement]
) -> ProbeSummary:
    fitting = [probe for probe in probes if probe.has_fitted]
    sizes = [probe.batch_size for probe in fitting]
    best = max(fitting, key=lambda probe: probe.samples_per_s or 0.0, default=None)
    return ProbeSummary(
        *subject,
        num_probes=len(probes),
        smallest=min(sizes, default=None),
        largest=max(sizes, default=None),
        too_large=min((probe.batch_size for probe in probes if not probe.has_fitted), default=None),
        best_batch_size=best.batch_size if best else None,
        best_samples_per_s=best.samples_per_s if best else None,
        measured_at=probes[-1].measured_at,
    )
