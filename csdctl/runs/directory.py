"""The paths of all files of a run and of the project's `.csdctl/`; defined nowhere else."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from csdctl.documents import check_values, load_json, save_json
from csdctl.errors import InputError
from csdctl.runs.manifest import Manifest, check_links
from csdctl.worker.protocol.events import Event, event_from_line, event_to_line
from csdctl.worker.protocol.json_codec import ProtocolError

NEW_RUN = "start a new run"
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class ProjectDirectory:
    """The working directory of csdctl; it writes all its files below `.csdctl/`."""

    root: Path

    @property
    def state(self) -> Path:
        """The directory of all files that csdctl writes."""
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
        """All bytes sent, by command, link and traffic class."""
        return self.state / "ledger.jsonl"

    @property
    def measurements(self) -> Path:
        """Measurements, reused by the next tune."""
        return self.state / "measurements.sqlite"

    @property
    def failed(self) -> Path:
        """The nodes on which the latest command failed."""
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
        """Shards for the nodes, before they are stored."""
        return self.state / "shards"

    @property
    def models(self) -> Path:
        """Models written by the worker's `build`."""
        return self.state / "models"

    @property
    def scratch(self) -> Path:
        """Files of `doctor`: a directory for each failed MPI check."""
        return self.state / "scratch"

    def plan(self, job_name: str) -> Path:
        """Return the path of the plan that `tune` writes for a job."""
        return self.state / "plans" / f"{job_name}.yaml"

    def prepared(self, job_name: str) -> Path:
        """Return the path of the record of a job's prepared data."""
        return self.state / "prepared" / f"{job_name}.json"

    def step_file(self, run: "RunDirectory") -> Path:
        """Return the path of rank 0's state after every step: in shared memory if possible, else on disk."""
        if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
            return run.path.absolute() / "step.state"
        # standalone/leftovers.py, which removes stale step files, builds the same name.
        place = hashlib.sha256(os.path.realpath(self.root).encode()).hexdigest()[:12]
        return SHARED_MEMORY / f"csdctl-{os.getuid()}-{place}-{run.run_id}"

    def new_run(self) -> "RunDirectory":
        """Create a run directory with a unique id: UTC time to the microsecond, so that ids sort by time."""
        return _new_directory(self.runs)

    def new_scratch(self) -> "RunDirectory":
        """Create a directory for one MPI check, with an id like that of a run."""
        return _new_directory(self.scratch)

    def find_run(self, run_id: str | None) -> "RunDirectory":
        """Return run `run_id`, or the latest run; raises InputError if it does not exist, or has a link."""
        known = (
            sorted(path.name for path in self.runs.iterdir() if path.is_dir()) if self.runs.is_dir() else []
        )
        if run_id is None and known:
            run_id = known[-1]
        if run_id in known:
            check_links(self.runs / str(run_id))
            return RunDirectory(self.runs / str(run_id))
        raise InputError(
            f"no run {run_id!r} in {self.runs}" if run_id else f"no runs in {self.runs} yet",
            remedy=f"known runs: {', '.join(known[-5:])}" if known else "start one with `csdctl train`",
        )


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    @property
    def run_id(self) -> str:
        """The run's id, which all its processes carry."""
        return self.path.name

    @property
    def manifest(self) -> Path:
        """Job, plan, fleet, versions, hashes."""
        return self.path / "manifest.json"

    @property
    def spec(self) -> Path:
        """The specification sent to the ranks; `train --resume` sends the same."""
        return self.path / "spec.json"

    @property
    def events(self) -> Path:
        """All events of all ranks, in order of arrival, as JSON lines."""
        return self.path / "events.jsonl"

    @property
    def logs(self) -> Path:
        """Output of the ranks and mpirun."""
        return self.path / "logs"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / "model.keras"

    def rank_log(self, rank: int) -> Path:
        """Return the path of the log of one rank."""
        return self.logs / f"rank-{rank}.log"

    @property
    def mpirun_log(self) -> Path:
        """Output of mpirun and its ssh processes."""
        return self.logs / "mpirun.log"

    def save_manifest(self, content: dict[str, object]) -> None:
        """Write manifest.json atomically."""
        save_json(self.manifest, content)

    def load_manifest(self) -> dict[str, Any]:
        """Read manifest.json; raises InputError when it is missing, or its values do not belong together."""
        content: dict[str, Any] = load_json(self.manifest, remedy=NEW_RUN)
        check_values(content, Manifest, str(self.manifest), remedy=NEW_RUN)
        return content

    def read_events(self) -> Iterator[tuple[float, Event]]:
        """Yield Unix time of arrival and event, in order; skip a line truncated by a crash."""
        try:
            lines = self.events.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise InputError(
                f"run {self.run_id} has no events", remedy="the run ended before training started"
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
    """Appends events to events.jsonl, one per line."""

    def __init__(self, run: RunDirectory) -> None:
        self._file = run.events.open("a", encoding="utf-8")

    def append(self, time_s: float, event: Event) -> None:
        """Write one event; `time_s` is Unix time."""
        self._file.write(json.dumps({"time": round(time_s, 4), "line": event_to_line(event)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Sync and close the file."""
        os.fsync(self._file.fileno())
        self._file.close()
