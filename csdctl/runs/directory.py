"""The paths of all files of a run and of the project's `.csdctl/`, defined nowhere else, and a run's logs."""

import contextlib
import errno
import itertools
import json
import os
import re
import shlex
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from csdctl.documents import check_values, load_json, load_kept, open_log, save_json
from csdctl.errors import InputError
from csdctl.notify import Say, make_printable
from csdctl.placement.equation1 import Placed
from csdctl.runs.private import STATE_DIRECTORY, check_directory, private_memory
from csdctl.runs.stored_events import StoredEvents, find_last_check, first_check
from csdctl.tuning.plan import DATA_PARALLEL, UPDATE, Plan, check_schema
from csdctl.worker.protocol.disk_errors import DAMAGED_ARCHIVE
from csdctl.worker.protocol.durable_files import make_directory, replacing
from csdctl.worker.protocol.events import Event, Progress, WaitingFor, describe_model, event_document
from csdctl.worker.protocol.json_codec import add_check
from csdctl.worker.protocol.recipe import Noise
from csdctl.worker.protocol.run_spec import BEST_MODEL, LAST_MODEL, step_file_in_memory

MAX_SAMPLES = 10**15
NEW_RUN = "start a new run"
COUNTS = EVENT_BYTES, NUM_KILLED = "event_bytes", "num_killed"
"""Numbers in process.json."""
NO_LINK = "replace it with the file itself, or remove it"
LATEST = "latest"
"""The name of the latest run on the command line."""
_ID = "%Y%m%d-%H%M%S-%f"
MAX_LOG_BYTES = 16 << 20
MAX_LINE_BYTES = 1 << 16
FREQUENT = (Progress, WaitingFor)
"""Events that come again and again; only those of rank 0 are needed to tell how far a run came."""
Described = Annotated[dict[str, Any], BeforeValidator(lambda value: value if isinstance(value, dict) else {})]
"""A part that only people need: empty where somebody has made something else of it."""


class _Part(BaseModel):
    """A part of the manifest. Keys that nothing reads may be there too."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class DataFingerprints(_Part):
    """Fingerprints of the prepared data. Private data by node."""

    public: str
    private: dict[str, str] = {}
    public_path: str = ""


class Manifest(_Part):
    """The content of manifest.json that csdctl reads: job, plan, fleet, versions, hashes."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    plan: Plan
    placed: list[Placed]
    """In order of rank."""
    data: DataFingerprints
    noise: Noise | None = None
    run: str = ""
    """Its ID. Earlier versions have not stored it."""
    server: str = ""
    """The server on which csdctl runs; '' for a single server, or a machine beside the servers."""
    strategy: str = DATA_PARALLEL
    cut: str = ""
    csdctl: Any = "–"
    versions: Described = {}
    job: Described = {}
    recipe: Described = {}
    fleet: Described = {}
    predicted_samples_per_s: Annotated[float, Field(gt=0)] | None = None
    predicted_range: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] | None = None

    @model_validator(mode="after")
    def _describes_one_run(self) -> Self:
        position = 0
        if len(self.plan.ranks) != len(self.placed):
            raise ValueError("plan.ranks and placed have different numbers of ranks")
        for rank, shard in zip(self.plan.ranks, self.placed, strict=True):
            for name, value, expected in (
                ("name", shard.name, rank.node),
                ("batch_size", shard.batch_size, rank.batch_size),
                ("public_start", shard.public_start, position),
                ("public_stop", shard.public_stop, min(max(shard.public_stop, position), MAX_SAMPLES)),
                ("num_private", shard.num_private, min(max(shard.num_private, 0), MAX_SAMPLES)),
                ("num_repeated", shard.num_repeated, min(max(shard.num_repeated, 0), shard.num_private)),
            ):
                if value != expected:
                    raise ValueError(f"placed: {name} of {rank.node} is {value}, expected {expected}")
            position = shard.public_stop
        return self

    @property
    def nodes(self) -> list[str]:
        """The machine of each rank."""
        return self.plan.nodes


def began_s(run_id: str) -> float:
    """Return the Unix time at which a run was created, 0 for a name that is no id."""
    try:
        return datetime.strptime(run_id, _ID).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def check_links(directory: Path) -> None:
    """Raise InputError for a symbolic link in a run's directory: csdctl writes none, and would follow it."""
    names = ((place, name) for place, *below in os.walk(directory) for name in itertools.chain(*below))
    for path in itertools.chain([str(directory)], itertools.starmap(os.path.join, names)):
        if os.path.islink(path):
            problem = f"{path} is a symbolic link, which csdctl does not create in a run"
            raise InputError(problem, remedy=NO_LINK)


class _Below:
    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, owner: "ProjectDirectory | RunDirectory", _: type) -> Path:
        below = owner.state if isinstance(owner, ProjectDirectory) else owner.path
        return below.joinpath(*self._parts)


@dataclass(frozen=True)
class ProjectDirectory:
    """The working directory of csdctl. It writes all its files below `.csdctl/`."""

    root: Path

    @property
    def state(self) -> Path:
        """The directory of all files that csdctl writes."""
        return self.root / STATE_DIRECTORY

    known_hosts = _Below("known_hosts")
    ledger = _Below("ledger.jsonl")
    """All bytes sent, by command, link and traffic class."""
    measurements = _Below("measurements.jsonl")
    failed = _Below("failed.json")
    """The nodes on which the latest command failed."""
    runs = _Below("runs")
    statuses = _Below("statuses.json")
    emulated = _Below("emulated")
    shards = _Below("shards")
    """Shards for the nodes, before they are stored."""
    models = _Below("models")
    scratch = _Below("scratch")
    """Files of `doctor`: a directory for each failed MPI check."""

    def plan(self, job_name: str) -> Path:
        """Return the path of the plan that `tune` writes for a job."""
        return self.state / "plans" / f"{job_name}.yaml"

    def prepared(self, job_name: str) -> Path:
        """Return the path of the record of a job's prepared data."""
        return self.state / "prepared" / f"{job_name}.json"

    def step_file(self, run: "RunDirectory") -> Path:
        """Return the path of rank 0's state after every step: in the machine's memory if possible."""
        if private_memory() is None:
            return run.kept_step_file.absolute()
        return step_file_in_memory(self.root, run.run_id)

    def new_run(self, *, is_scratch: bool = False) -> "RunDirectory":
        """Create a run directory with a unique id: UTC time to the microsecond, so that ids sort by time.

        A scratch directory is for one MPI check. The id comes after all others, also where the clock has been
        set back.
        """
        parent = self.scratch if is_scratch else self.runs
        now = datetime.now(UTC).replace(tzinfo=None)
        for name in sorted(os.listdir(parent), reverse=True) if parent.is_dir() else ():
            with contextlib.suppress(ValueError, OverflowError):  # a name that is no id
                now = max(now, datetime.strptime(name, _ID) + timedelta(microseconds=1))
                break
        run = RunDirectory(parent / f"{now:{_ID}}")
        make_directory(run.logs)
        return run

    def run_ids(self) -> list[str]:
        """Return the ids of all runs, the oldest first. Raises InputError, OSError."""
        check_directory(self.runs)
        if not self.runs.exists():
            return []
        return sorted(entry.name for entry in os.scandir(self.runs) if entry.is_dir())

    def find_run(self, run_id: str | None) -> "RunDirectory":
        """Return the run with this id or its beginning. None and LATEST: the latest. Raises InputError."""
        run_ids = self.run_ids()
        if run_id in (None, LATEST) and run_ids:
            run_id = run_ids[-1]
        begun = [name for name in run_ids if run_id and name.startswith(run_id)]
        if run_id in begun:
            begun = [run_id]
        if len(begun) == 1:
            check_links(self.runs / begun[0])
            return RunDirectory(self.runs / begun[0])
        if begun:
            problem = f"{len(begun)} runs begin with {run_id!r}"
            remedy = f"type more of it: {', '.join(begun[-5:])}"
        elif run_ids:
            problem = f"no run {run_id!r} in {self.runs}"
            remedy = f"{len(run_ids)} runs, the latest: {', '.join(run_ids[-5:])}"
        else:
            problem, remedy = f"no runs in {self.runs} yet", "`csdctl train`"
        raise InputError(problem, remedy=remedy)


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    @property
    def run_id(self) -> str:
        """The run's id, which all its processes carry."""
        return self.path.name

    manifest = _Below("manifest.json")
    spec = _Below("spec.json")
    """The specification sent to the ranks; `train --resume` sends the same."""
    events = _Below("events.jsonl")
    """All events of all ranks, in order of arrival."""
    process = _Below("process.json")
    """The csdctl that trains the run, or the last one that did."""
    power = _Below("power.jsonl")
    kept_step_file = _Below("step.state")
    """The step file of a run that has not finished; rank 0 reads it when the run is resumed."""
    logs = _Below("logs")
    own_log = _Below("logs", "csdctl.log")
    """Output of csdctl itself, of a run that was detached from its terminal."""
    model = _Below(LAST_MODEL)
    best_model = _Below(BEST_MODEL)

    def rank_log(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.logs / f"rank-{rank}.log"

    def has_state(self) -> bool:
        """Return whether there is a file, whatever is in it, from which the run could be resumed."""
        step_file = ProjectDirectory(self.path.parents[2]).step_file(self)
        states = self.kept_step_file, step_file, *self.path.glob("checkpoints/*.npz")
        return any(map(os.path.lexists, states))

    def has_lost_events(self) -> bool:
        """Return whether the log is shorter than when the latest csdctl of the run ended."""
        return bool(self.count_event_bytes() < self.load_process().get(EVENT_BYTES, 0))

    def load_process(self) -> dict[str, Any]:
        """Return process.json. {} where it is missing, damaged or of another run."""
        content = load_kept(self.process, dict[str, Any]) or {}
        process = {key: value for key, value in content.items() if key not in COUNTS or type(value) is int}
        is_own = process.get("run", self.run_id) == self.run_id
        return process if is_own or process["run"] == self.first_id() else {}

    def count_event_bytes(self) -> int:
        """Return the size of the log, 0 where there is none."""
        return self.events.stat().st_size if self.events.exists() else 0

    def save_manifest(self, content: dict[str, object]) -> None:
        """Write manifest.json atomically."""
        save_json(self.manifest, {"run": self.run_id, **content})

    def read_manifest(self) -> Manifest:
        """Read manifest.json. Raises InputError when it is missing, or its values do not belong together."""
        content = load_json(self.manifest, remedy=NEW_RUN)
        check_schema(content, self.manifest, 1)
        manifest = check_values(content, Manifest, str(self.manifest), remedy=NEW_RUN)
        if manifest.run not in ("", self.run_id) and manifest.run != self.first_id():
            remedy = f"if the run's directory was renamed, rename it back; else restore it, or {NEW_RUN}"
            raise InputError(f"{self.manifest} is of run {manifest.run}", remedy=remedy)
        if manifest.run == self.run_id != self.first_id():
            remedy = f"restore it from a copy, or {NEW_RUN}"
            raise InputError(f"{self.spec} is of run {self.first_id()}", remedy=remedy)
        return manifest

    def first_id(self) -> str:
        """Return the run's id when it began, which its files have: the directory may be renamed since."""
        run_id = (load_kept(self.spec, dict[str, Any]) or {}).get("run_id")
        return run_id if isinstance(run_id, str) else self.run_id

    def load_manifest(self) -> dict[str, Any]:
        """Return all of manifest.json, to write it again. Raises what `read_manifest` raises."""
        content: dict[str, Any] = load_json(self.manifest, remedy=NEW_RUN)
        checked = self.read_manifest().model_dump(by_alias=True)
        return {**content, **checked}

    def read_events(self, nodes: Sequence[str]) -> StoredEvents:
        """Return the stored events of the run, whose ranks are on `nodes`."""
        return StoredEvents(self.events, nodes, self.first_id(), is_cut=self.has_lost_events())


def has_model(path: Path, weights_hash: str = "") -> bool:
    """Return whether the undamaged model of a run is at `path`, or else its weights in a file of their own.

    `weights_hash`: that the run reported at its end. Models of earlier versions do not tell theirs.
    """
    with contextlib.suppress(*DAMAGED_ARCHIVE):
        if path.is_file():
            with zipfile.ZipFile(path) as archive:
                run_id = RunDirectory(path.parent).first_id() if archive.comment else ""
                expected = os.fsencode(describe_model(run_id, weights_hash))
                is_of_run = not archive.comment or archive.comment.startswith(expected)
                return is_of_run and archive.testzip() is None  # reads all of it
    return path.with_suffix(".weights.h5").is_file()


def find_run(
    project: ProjectDirectory,
    run_id: str | None,
    say: Say,
    read: Callable[[RunDirectory], object] = RunDirectory.read_manifest,
) -> RunDirectory:
    """Return the run `run_id`. None and LATEST: the latest one that can be read, and `say` names later ones.

    Where none can be read, the latest directory is returned. Raises InputError.
    """
    skipped: list[str] = []
    for name in reversed(project.run_ids()) if run_id in (None, LATEST) else ():
        with skipping(name, skipped.append):
            run = project.find_run(name)
            read(run)
            for line in skipped:
                say(line)
            return run
    return project.find_run(run_id)


@contextlib.contextmanager
def skipping(run_id: str, say: Say) -> Iterator[None]:
    """Warn instead of raising: a foreign, empty or damaged directory must not hide the other runs."""
    try:
        yield
    except (InputError, OSError) as error:
        problem = error.message if isinstance(error, InputError) else str(error)
        remedy = getattr(error, "remedy", "")
        name = shlex.quote(run_id)
        if not run_id.isprintable():  # not UTF-8
            quoted = re.sub(rb"[^\w.-]", lambda byte: b"\\x%02x" % ord(byte[0]), os.fsencode(run_id)).decode()
            name = f"$'{quoted}'"
        if remedy not in (UPDATE, NO_LINK):
            remedy = f"mend it, or remove the run: csdctl runs rm {name}"
        say(f"warning: {run_id} is skipped: {problem} ({remedy})")


def keep_step_file(step_file: Path, kept: Path) -> None:
    """Move the step file of a run that has not finished to disk, if that has space: resuming finds both."""
    if step_file == kept or not step_file.exists():
        return
    with contextlib.suppress(OSError):
        with replacing(kept) as into, step_file.open("rb") as content:
            shutil.copyfileobj(content, into, 1 << 20)
        step_file.unlink(missing_ok=True)  # the copy is synced


class CappedLog:
    """Appends lines to a file until it has `max_bytes`, then says so once. Several writers share the limit.

    A full disk must not end a run: what cannot be written is dropped.
    """

    def __init__(self, path: Path, name: str, max_bytes: int = MAX_LOG_BYTES) -> None:
        """Open `path` for the output of `name`."""
        self._max_bytes = max_bytes
        self._last_line = f"… further output of {name} is dropped after {max_bytes >> 20} MiB\n".encode()
        self._file = None
        with contextlib.suppress(OSError, InputError):
            self._file = open_log(path)

    def write(self, line: bytes) -> None:
        """Write one line, printable. Its end is added. Users read logs with `tail -f`."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            num_free = self._max_bytes - os.fstat(self._file.fileno()).st_size
            kept = line[:MAX_LINE_BYTES].replace(b"\0", b"").rstrip(b"\r\n")
            text = make_printable(kept.decode(errors="backslashreplace")).encode()[:MAX_LINE_BYTES] + b"\n"
            if num_free >= len(text):
                self._file.write(text)
            elif num_free > 0:  # with this, the file has more than the limit: nobody writes again
                self._file.write(text[: num_free - 1] + b"\n" + self._last_line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class EventLog:
    """Appends events to events.jsonl, one per line: `time` (Unix time of arrival), `event` and its fields.

    A number at the end of each line shows lines that were lost or changed later.
    After an event of rank 0 that is not frequent, such as a checkpoint, all are on the disk.
    Once it has `max_bytes`, it leaves out frequent events of ranks other than 0, and their logs say so.
    """

    max_bytes = 1 << 30

    def __init__(self, run: RunDirectory, say: Say = lambda line: None, *, is_begun: bool = False) -> None:
        """`say` tells of a last line that was cut. `is_begun`: the log of this run cannot be empty."""
        self._run = run
        self._file = open_log(run.events, say)
        self._num_bytes = os.fstat(self._file.fileno()).st_size
        # With another first number, a reader notices that events are gone.
        self._check = find_last_check(self._file, 0 if is_begun else first_check(run.run_id))
        self._check *= not run.has_lost_events()
        self._is_synced = False
        self.unwritten = bytearray()
        """Bytes for which a full disk has no place, written once it has."""
        self._limited: set[int] = set()
        """Ranks whose frequent events are no longer stored."""

    def append(self, time_s: float, event: Event) -> None:
        """Write one event. `time_s` is Unix time."""
        if self._num_bytes >= self.max_bytes and event.rank != 0 and isinstance(event, FREQUENT):
            if event.rank not in self._limited:
                self._limited.add(event.rank)
                log = CappedLog(self._run.rank_log(event.rank), event.node)
                size = f"{self._run.events.name} has {self.max_bytes >> 20} MiB"
                log.write(f"… progress of {event.node} is no longer stored: {size}".encode())
                log.close()
            return
        document = {"time": round(time_s, 4), **event_document(event)}
        text = json.dumps(document, separators=(",", ":")).encode()
        line, self._check = add_check(text, self._check)
        self._num_bytes += len(line) + 1
        self.unwritten += line + b"\n"
        self._write(is_synced=event.rank == 0 and not isinstance(event, FREQUENT))

    def _write(self, *, is_synced: bool) -> None:
        """Raise OSError, for a full disk only when too much is unwritten."""
        try:
            while self.unwritten:
                del self.unwritten[: self._file.write(self.unwritten)]
            self._is_synced = False
            if is_synced:
                os.fsync(self._file.fileno())
                self._is_synced = True
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or len(self.unwritten) > 64 << 20:
                raise

    def close(self) -> None:
        """Write, sync and close the file. Raises OSError."""
        try:
            self._write(is_synced=True)
            if self.unwritten or not self._is_synced:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._run.events))
        finally:
            self._file.close()
