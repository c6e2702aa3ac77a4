"""Saves a run's state and models on rank 0, so that the run can resume.

After every step, the state goes to the step file in the machine's memory, which survives the process. After
every epoch, and every few minutes, it goes to a checkpoint on disk, which survives the machine. Neither is
trusted when it is read: owner, size and format are checked first, then progress.py checks the content. Other
ranks save nothing. They take over rank 0's state, never the other way round (docs/decisions/0024). The ranks
of other servers write a step file, too. From it, csdctl can resume the run there if rank 0's server is lost.
"""

import fnmatch
import io
import itertools
import mmap
import os
import shutil
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from csdctl.worker.data.arrays import Array, read_array_header, save_arrays
from csdctl.worker.data.schedule import OwnSamples
from csdctl.worker.engine.step import StepEngine
from csdctl.worker.process.errors import JobError, WorkerError, describe
from csdctl.worker.process.files import BoundedFile, open_private
from csdctl.worker.protocol.disk_errors import DAMAGED_ARCHIVE, describe_os_error
from csdctl.worker.protocol.durable_files import save_text
from csdctl.worker.protocol.events import CheckpointSaved, Warned
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.run_spec import COPIES, LAST_MODEL, NUM_CHECKPOINTS, RunSpec, step_file_in_memory
from csdctl.worker.tasks.progress import Position, Reporter, max_state_bytes, pack, position_of, unpack

KEPT_STEP_FILE = "step.state"
"""Name of the step file of a failed run, which csdctl has moved from memory to the run directory."""
_ARCHIVE_BYTES = 1 << 16
"""Largest size of an .npz archive with one array beyond the array."""

OnDamage = Callable[[str], object]
"""Takes a sentence that names a damaged file."""


class StepFile:
    """The state after the latest step, in two halves that are written alternately.

    A process that dies while writing leaves the other half intact. The file is memory-mapped: the kernel
    keeps what was written when the process dies. It exists from the first step on.
    """

    _MARK = struct.Struct("<qqI")
    """Before each half: its number, the bytes used, and the CRC-32 of both and of these bytes."""
    _NO_STATE = -1, 0, 0
    """The mark of a half without a complete state."""

    def __init__(self, path: Path, values: Sequence[Array]) -> None:
        """`path`: of states with the shapes and types of `values`."""
        self.path = path
        whole_pages = -(-(self._MARK.size + max_state_bytes(values)) // mmap.PAGESIZE)
        self._half_bytes = whole_pages * mmap.PAGESIZE
        self._bytes: Array | None = None
        self._next = 0

    def write(self, values: Sequence[Array], position: Position) -> None:
        """Write `values`, the state at `position`. Raises OSError when there can be no such file."""
        if self._bytes is None or not self.path.exists():  # removed while the run trains
            self._bytes = self._open()
        start = self._next * self._half_bytes
        self._mark(self._bytes, start, self._NO_STATE)
        body = start + self._MARK.size
        packed = pack(values, position, self._bytes[body : start + self._half_bytes])
        # The state after an epoch is later than the state after its last step.
        number = 2 * position.total_steps + (position.step == 0)
        self._mark(self._bytes, start, (number, len(packed), self._check(number, packed)))
        self._next = 1 - self._next

    def read(self, on_damage: OnDamage = lambda problem: None) -> Array | None:
        """Return the latest intact state, or None. Raises OSError unless the file is this user's."""
        try:
            descriptor = open_private(self.path)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            size, expected = os.fstat(descriptor).st_size, 2 * self._half_bytes
            if size != expected:
                on_damage(f"{self.path} has {size:,} bytes, not {expected:,}: damaged, or of another model")
                return None
            content = np.fromfile(file, np.uint8, expected)
        latest: tuple[int, Array] | None = None
        for half, start in enumerate((0, self._half_bytes)):
            body = start + self._MARK.size
            mark = number, used, check = self._MARK.unpack(content[start:body].tobytes())
            packed = content[body : start + self._half_bytes][: max(0, used)]
            if mark == self._NO_STATE:
                continue
            if not 0 < used == len(packed) or self._check(number, packed) != check:
                on_damage(f"{self.path} is damaged: state {half + 1} of 2 has another checksum")
            elif latest is None or number > latest[0]:
                latest = (number, packed)
                self._next = 1 - half
        return latest[1] if latest else None

    def _open(self) -> Array:
        size = 2 * self._half_bytes
        self.path.parent.mkdir(mode=0o700, exist_ok=True)  # it may have been removed while it was empty
        descriptor = open_private(self.path, is_creating=True)
        try:
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, 0)
                os.ftruncate(descriptor, size)
                for start in (0, self._half_bytes):  # before anything that takes time: without, it is damaged
                    os.pwrite(descriptor, self._MARK.pack(*self._NO_STATE), start)
                os.posix_fallocate(descriptor, 0, size)
            return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        finally:
            os.close(descriptor)

    def _check(self, number: int, packed: Array) -> int:
        return zlib.crc32(packed.data, zlib.crc32(struct.pack("<qq", number, len(packed))))

    def _mark(self, into: Array, start: int, values: tuple[int, int, int]) -> None:
        mark = self._MARK.pack(*values)
        into[start : start + len(mark)] = np.frombuffer(mark, np.uint8)


@dataclass
class Checkpoints:
    """A run's checkpoints on disk, which survive a power cut. The newest few are kept."""

    directory: Path
    num_kept: int = NUM_CHECKPOINTS

    def save(self, packed: Array, position: Position) -> Path:
        """Write a checkpoint, and remove checkpoints that are not kept any longer. Raises OSError."""
        path = self.directory / f"step-{position.total_steps:08d}.npz"
        for old in (*self.directory.glob("step-*.npz"), *self.directory.glob(".step-*")):
            # Damaged checkpoints, and parts of some.
            if old.name > path.name or old.name.startswith(".") or old.is_dir():
                _remove(old)
        save_arrays(path, {"state": packed})
        for old in sorted(self.directory.glob("step-*.npz"), reverse=True)[self.num_kept :]:
            _remove(old)
        return path

    def newest_first(self, max_bytes: int, on_damage: OnDamage = lambda problem: None) -> Iterator[Array]:
        """Yield the intact states of at most `max_bytes`, and skip all others."""
        names: list[str] = []
        try:
            names = fnmatch.filter(os.listdir(self.directory), "step-*.npz")
        except FileNotFoundError:
            pass
        except OSError as error:
            on_damage(f"{self.directory} cannot be read: {error.strerror}")
        for path in map(self.directory.joinpath, sorted(names, reverse=True)):
            try:
                yield _read_checkpoint(path, max_bytes)
            except DAMAGED_ARCHIVE as error:
                on_damage(f"{path} is damaged: {getattr(error, 'strerror', 0) or describe(error)}")


def _remove(path: Path) -> None:
    (shutil.rmtree if path.is_dir() else os.unlink)(path)


def _read_checkpoint(path: Path, max_bytes: int) -> Array:
    """Return the state, shape (n,), uint8. Memory is allocated by the size of the file, not by a header.

    Raises one of DAMAGED_ARCHIVE.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with BoundedFile(io.FileIO(descriptor)) as file:
        if os.fstat(descriptor).st_size > max_bytes + _ARCHIVE_BYTES:
            raise ValueError("too large for this model")
        with zipfile.ZipFile(file) as archive:
            member = archive.getinfo("state.npy")
            if member.file_size > max_bytes + _ARCHIVE_BYTES:
                raise ValueError("too large for this model")
            content = io.BytesIO(archive.read(member))  # reading to the end checks the archive's CRC-32
    shape, _, dtype = read_array_header(content)
    state = np.frombuffer(content.read(), np.uint8)
    if (shape, dtype) != (state.shape, state.dtype):
        raise ValueError("not one array of bytes")
    return state


def keep_copy(spec: RunSpec) -> RunSpec:
    """Save the files on this server that a resume here needs. Return the spec for saving the state here.

    The copy is a run of the project directory COPIES, with a step file in this machine's memory.
    """
    directory = Path(COPIES, spec.output_directory)
    try:
        save_text(directory / "spec.json", to_json(replace(spec, link_key="")))
        save_text(directory / "manifest.json", Path(spec.manifest).read_text())
    except OSError as error:  # such as a full disk: the run can be resumed on its own server
        print(f"no copy of the run on this server: {error}", flush=True)
    step_file = str(step_file_in_memory(Path(COPIES), spec.run_id))
    return replace(spec, output_directory=str(directory), step_file=step_file, num_checkpoints=0)


class Checkpointer:
    """Saves the state and the models of one run."""

    def __init__(
        self,
        spec: RunSpec,
        reporter: Reporter,
        step: StepEngine,
        *,
        samples: Sequence[OwnSamples],
        save_trained: Callable[[Path], Path],
    ) -> None:
        """Restore what an earlier process of this run saved: see `position`.

        `samples`: of each rank. `save_trained` saves the trained model and returns the path. Raises
        WorkerError when a state was saved and none can be used.
        """
        self._spec, self._reporter, self._step = spec, reporter, step
        self._samples, self._save_trained = samples, save_trained
        output = Path(spec.output_directory)
        self._checkpoints = Checkpoints(output / "checkpoints", spec.num_checkpoints)
        paths = [Path(spec.step_file), output / KEPT_STEP_FILE] if spec.step_file else []
        self._step_files = [StepFile(path, step.values) for path in paths]
        self._can_write = bool(self._step_files)
        self._is_failing = False  # the latest checkpoint
        self._cost_s = 0.0
        self._written_at = self._checkpointed_at = time.monotonic()
        self.position = self._restore()
        """Where the run was when its state was last saved; None for a new run."""

    def after_step(self, position: Position, *, has_others: bool) -> None:
        """Save the state after a step to the step file.

        If no other rank has the same state, this takes at most 1% of the training time.
        """
        if has_others or self._cost_s <= 0.01 * (time.monotonic() - self._written_at):
            self.write_step_file(position)

    def checkpoint_if_due(self, position: Position) -> None:
        """Write a checkpoint if its interval has passed. Call it between steps, outside their time."""
        if time.monotonic() - self._checkpointed_at >= self._spec.checkpoint_interval_s:
            self.checkpoint(position)

    def write_step_file(self, position: Position) -> None:
        """Write the state to the step file, if there can be one."""
        if not self._can_write:
            return
        began = time.monotonic()
        try:
            self._step_files[0].write(self._step.values, position)
        except OSError as error:  # there are checkpoints
            problem, remedy = describe_os_error(error, self._step_files[0].path)
            self._reporter.emit(Warned, f"only checkpoints are kept: {problem}", remedy)
            self._can_write = False
        self._written_at = time.monotonic()
        self._cost_s = self._written_at - began

    def checkpoint(self, position: Position, *, is_best: bool = False) -> None:
        """Write a checkpoint to disk, if the run keeps any."""
        if not self._spec.num_checkpoints:
            return
        try:
            path = self._checkpoints.save(pack(self._step.values, position), position)
        except OSError as error:  # such as a full disk: training goes on from the state in memory
            self.write_step_file(position)
            if not self._can_write:
                raise self._as_failure(self._checkpoints.directory, error) from None
            if not self._is_failing:  # said once, until there is a checkpoint again
                problem, remedy = describe_os_error(error, self._checkpoints.directory)
                kept = "training continues, with its state in memory alone, which a reboot clears"
                self._reporter.emit(Warned, f"no checkpoint: {problem}; {kept}", remedy)
            self._is_failing = True
            self._checkpointed_at = time.monotonic()
            return
        self._is_failing = False
        self._checkpointed_at = time.monotonic()
        self._reporter.emit(CheckpointSaved, position.epoch, position.total_steps, str(path), is_best)

    def save_model(self, name: str) -> str:
        """Save the model as a .keras file, or else its weights. Return the path."""
        path = Path(self._spec.output_directory) / name
        try:
            return str(self._save_trained(path))
        except OSError as error:
            raise self._as_failure(path, error) from None

    def _as_failure(self, path: Path, error: OSError) -> WorkerError:
        problem, remedy = describe_os_error(error, path)
        resume = f"continue the run: csdctl train --resume {self._spec.run_id}"
        return WorkerError(problem, f"{remedy}, then {resume}" if remedy else resume)

    def save_last_good(self) -> bool:
        """Save the model of the newest checkpoint, if there is one. Return whether there is."""
        for _, state in self._newest_checkpoint([]):
            _, self._step.values = unpack(state, self._step.values, self._samples)
            self.save_model(LAST_MODEL)
            return True
        return False

    def _restore(self) -> Position | None:
        """Load the later one of step file and newest checkpoint into the model. Report damaged files."""
        problems: list[str] = []
        states = [*self._possible(self._step_states(problems), problems), *self._newest_checkpoint(problems)]
        if states:
            for problem in problems:
                self._reporter.emit(Warned, f"{problem}; the newest intact state is used")
            _, latest = max(states, key=lambda state: (state[0].total_steps, state[0].epoch))
            position, self._step.values = unpack(latest, self._step.values, self._samples)
            newest = max(self._checkpoints.directory.glob("step-*.npz"), default=None)
            if newest and newest.name > f"step-{position.total_steps:08d}.npz" and not problems:
                self._reporter.emit(Warned, f"{newest} has the state of an earlier step")
            return position
        if problems:  # to begin again would throw away what was trained
            problem = f"no checkpoint of this run can be used: they are damaged: {'; '.join(problems)}"
            raise JobError(problem, remedy="restore one from a copy, or start a new run")
        return None

    def _step_states(self, problems: list[str]) -> Iterator[Array]:
        for file in self._step_files:
            try:
                state = file.read(problems.append)
            except OSError as error:
                problems.append(f"the step file is not used: {file.path}: {error.strerror or error}")
                continue
            if state is not None:
                yield state

    def _newest_checkpoint(self, problems: list[str]) -> Iterator[tuple[Position, Array]]:
        """Yield the newest checkpoint that is intact and possible in this run, if there is one."""
        states = self._checkpoints.newest_first(max_state_bytes(self._step.values), problems.append)
        return itertools.islice(self._possible(states, problems), 1)

    def _possible(self, states: Iterable[Array], problems: list[str]) -> Iterator[tuple[Position, Array]]:
        for state in states:
            try:
                position = position_of(state, self._samples)
                if position.run_id not in ("", self._spec.run_id):  # earlier versions have not stored it
                    raise WorkerError(f"the saved state is of run {position.run_id}")
                yield position, state
            except WorkerError as error:
                problems.append(error.message)
