"""Names every file of a run, and of the project's `.csdctl/`; nobody else spells a path in them."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from csdctl.documents import load_json, save_json
from csdctl.errors import InputError
from csdctl.worker.protocol.events import Event, event_from_line, event_to_line
from csdctl.worker.protocol.json_codec import ProtocolError

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class ProjectDirectory:
    """The directory that csdctl works in; everything it writes lies below `.csdctl/`."""

    root: Path

    @property
    def state(self) -> Path:
        """One directory to delete."""
        return self.root / ".csdctl"

    @property
    def known_hosts(self) -> Path:
        """csdctl's own known_hosts."""
        return self.state / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        """The ssh_config that mpirun's ssh reads."""
        return self.state / "ssh_config"

    @property
    def ledger(self) -> Path:
        """Every byte that was sent, by command, link and kind."""
        return self.state / "ledger.jsonl"

    @property
    def measurements(self) -> Path:
        """What was measured, for the next tune."""
        return self.state / "measurements.sqlite"

    @property
    def failed(self) -> Path:
        """On which nodes the latest command failed."""
        return self.state / "failed.json"

    @property
    def runs(self) -> Path:
        """All runs."""
        return self.state / "runs"

    @property
    def emulated(self) -> Path:
        """The emulated fleet."""
        return self.state / "emulated"

    @property
    def shards(self) -> Path:
        """Shards cut for the nodes, before they go into the store."""
        return self.state / "shards"

    @property
    def models(self) -> Path:
        """Models as `build` wrote them."""
        return self.state / "models"

    @property
    def scratch(self) -> Path:
        """What `doctor` tried: a directory for each hello that failed."""
        return self.state / "scratch"

    def plan(self, job_name: str) -> Path:
        """The plan that `tune` wrote for a job."""
        return self.state / "plans" / f"{job_name}.yaml"

    def prepared(self, job_name: str) -> Path:
        """What a job's data came to when it was last prepared."""
        return self.state / "prepared" / f"{job_name}.json"

    def step_file(self, run: "RunDirectory") -> Path:
        """Where rank 0 keeps the state after every step: in memory where there is a place, else on disk."""
        if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
            return run.path.absolute() / "step.state"
        # standalone/leftovers.py, which removes stale step files, spells the same name.
        place = hashlib.sha256(os.path.realpath(self.root).encode()).hexdigest()[:12]
        return SHARED_MEMORY / f"csdctl-{os.getuid()}-{place}-{run.run_id}"

    def new_run(self) -> "RunDirectory":
        """A new run directory with an id of its own: UTC time to the microsecond; ids sort by time."""
        return _new_directory(self.runs)

    def new_scratch(self) -> "RunDirectory":
        """A directory for one hello, with an id like a run's."""
        return _new_directory(self.scratch)

    def find_run(self, run_id: str | None) -> "RunDirectory":
        """The run `run_id`, or the latest; raises InputError when there is none."""
        known = (
            sorted(path.name for path in self.runs.iterdir() if path.is_dir()) if self.runs.is_dir() else []
        )
        if run_id is None and known:
            return RunDirectory(self.runs / known[-1])
        if run_id in known:
            return RunDirectory(self.runs / str(run_id))
        raise InputError(
            f"there is no run {run_id!r} in {self.runs}" if run_id else f"there is no run in {self.runs} yet",
            remedy=f"known runs: {', '.join(known[-5:])}" if known else "start one with `csdctl train`",
        )


@dataclass(frozen=True)
class RunDirectory:
    """One training's files."""

    path: Path

    @property
    def run_id(self) -> str:
        """The run's id, which everything it starts carries."""
        return self.path.name

    @property
    def manifest(self) -> Path:
        """Job, plan, fleet, versions, hashes."""
        return self.path / "manifest.json"

    @property
    def spec(self) -> Path:
        """What the ranks were told; `train --resume` tells them the same."""
        return self.path / "spec.json"

    @property
    def events(self) -> Path:
        """Every event of every rank, in order of arrival, as JSON lines."""
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        """What the ranks and mpirun printed."""
        return self.path / "logs"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / "model.keras"

    def rank_log(self, rank: int) -> Path:
        """The log of one rank."""
        return self.logs / f"rank-{rank}.log"

    @property
    def mpirun_log(self) -> Path:
        """What mpirun itself and its ssh processes said."""
        return self.logs / "mpirun.log"

    def save_manifest(self, content: dict[str, object]) -> None:
        """Write manifest.json, whole or not at all."""
        save_json(self.manifest, content)

    def load_manifest(self) -> dict[str, object]:
        """Read manifest.json; raises InputError."""
        content: dict[str, object] = load_json(self.manifest)
        return content

    def read_events(self) -> Iterator[tuple[float, Event]]:
        """Unix time of arrival and event, in order; a line cut short by a crash is left out."""
        try:
            lines = self.events.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise InputError(
                f"run {self.run_id} has no events", remedy="the run ended before it began"
            ) from None
        for line in lines:
            try:
                content = json.loads(line)
                event = event_from_line(content["line"])
            except (ValueError, KeyError, ProtocolError):
                continue
            if event:
                yield content["time"], event


def _new_directory(parent: Path) -> RunDirectory:
    run = RunDirectory(parent / f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}")
    run.logs.mkdir(parents=True)
    return run


class EventLog:
    """Appends events to events.jsonl, a line each."""

    def __init__(self, run: RunDirectory) -> None:
        self._file = run.events.open("a", encoding="utf-8")

    def append(self, time_s: float, event: Event) -> None:
        """Write one event; `time_s` is Unix time."""
        self._file.write(json.dumps({"time": round(time_s, 4), "line": event_to_line(event)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Sync and close."""
        os.fsync(self._file.fileno())
        self._file.close()
