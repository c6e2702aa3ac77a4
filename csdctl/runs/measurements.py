"""Stored measurements, by model, recipe, machine class and settings, for the next tuning run: JSON lines."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from csdctl.documents import append_lines
from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.hardware import FleetClass, MachineClass
from csdctl.notify import Say
from csdctl.runs.stored_events import read_lines
from csdctl.tuning.measurements import (
    CollectiveMeasurement,
    ModelProperties,
    ProbeMeasurement,
    TrialMeasurement,
)
from csdctl.worker.protocol import json_codec
from csdctl.worker.protocol.durable_files import save_bytes

NUM_NEWEST = 50
"""Repeated measurements that are used, the newest: a fleet changes."""

PROBE_SETTINGS = attrgetter("settings", "batch_size", "node")
SUM_SETTINGS = attrgetter("num_ranks", "num_bytes")

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
    """Hash of everything except the model that affects step time."""
    measured_class: ClassT
    value: ValueT


@dataclass(frozen=True)
class Kind(Generic[ValueT, ClassT]):
    """A kind of measurement: its name, the type of its lines, and the key that identifies repetitions."""

    name: str
    adapter: TypeAdapter[Stored[ValueT, ClassT]]
    identity: Callable[[ValueT], Any]


PROBE = Kind("probe", TypeAdapter(Stored[ProbeMeasurement, MachineClass]), PROBE_SETTINGS)
SUM = Kind("sum", TypeAdapter(Stored[CollectiveMeasurement, FleetClass]), SUM_SETTINGS)
TRIAL = Kind("trial", TypeAdapter(Stored[TrialMeasurement, FleetClass]), lambda trial: ())
KINDS: dict[str, Kind[Any, Any]] = {kind.name: kind for kind in (PROBE, SUM, TRIAL)}


def _key(stored: Stored[Any, Any]) -> tuple[str, str, str, str]:
    return stored.kind, stored.measured_class.key, stored.model.hash, stored.recipe


def _to_line(stored: Stored[Any, Any]) -> bytes:
    line = json.dumps(KINDS[stored.kind].adapter.dump_python(stored)).encode()
    return json_codec.add_check(line)[0] + b"\n"


class MeasurementStore:
    """The measurements in a file. Failures raise CsdctlError. If `is_optional`, they are reported instead."""

    def __init__(
        self, path: Path, say: Say = lambda line: None, *, is_optional: bool = False, is_fresh: bool = False
    ) -> None:
        """Read the file, unless `is_fresh`. `say` reports lines that are left out."""
        self._path, self._say, self._is_optional = path, say, is_optional
        self._stored: list[Stored[Any, Any]] = []
        num_foreign = 0
        try:
            for line in filter(None, read_lines(path) if not is_fresh else ()):
                try:
                    stored = json.loads(line if json_codec.is_unchanged(line) else b"")
                    self._stored.append(KINDS[stored["kind"]].adapter.validate_python(stored))
                except (ValidationError, ValueError, TypeError, KeyError, RecursionError):
                    num_foreign += 1
        except (OSError, InputError) as error:
            is_fresh = True
            self._fail("earlier measurements are not used", error, "make that file readable, or remove it")
        self._is_whole = not (is_fresh or num_foreign)
        if num_foreign:
            say(f"{path}: lines that are damaged or of another version are ignored: {num_foreign}")

    def add(
        self,
        kind: Kind[ValueT, ClassT],
        measured_class: ClassT,
        values: Sequence[ValueT],
        model: ModelProperties = NO_MODEL,
        recipe: str = "",
    ) -> None:
        """Store measurements of one class, where no other process does. Those that are not used go."""
        added = [Stored(kind.name, model, recipe, measured_class, value) for value in values]
        self._stored += added
        newest = self._find_newest()
        try:
            if len(self._stored) > 2 * len(newest) and self._is_whole:
                self._stored = newest
                save_bytes(self._path, b"".join(map(_to_line, newest)))
            else:
                append_lines(self._path, b"".join(map(_to_line, added)))
        except (OSError, InputError) as error:
            self._fail("measurements are not stored", error, "free some disk space, or fix permissions")

    def find(
        self, kind: Kind[ValueT, ClassT], class_key: str, model_hash: str = NO_MODEL.hash, recipe: str = ""
    ) -> list[ValueT]:
        """Return the newest measurements of a kind on one class, of one model and recipe, oldest first."""
        key = kind.name, class_key, model_hash, recipe
        return [stored.value for stored in self._find_newest() if _key(stored) == key]

    def _find_newest(self) -> list[Stored[Any, Any]]:
        """Return the measurements that are used, oldest first."""
        num_newer, newest = Counter[Any](), list[Stored[Any, Any]]()
        for stored in sorted(self._stored, key=lambda stored: stored.value.measured_at)[::-1]:
            setting = (*_key(stored), KINDS[stored.kind].identity(stored.value))
            num_newer[setting] += 1
            newest += [stored] if num_newer[setting] <= NUM_NEWEST else []
        return newest[::-1]

    def _fail(self, failure: str, error: OSError | InputError, remedy: str) -> None:
        message = f"{failure}: {self._path}: {getattr(error, 'strerror', None) or error}"
        if not self._is_optional:
            raise CsdctlError(message, remedy=remedy) from error
        self._say(message)
