"""Gives inputs to a target and judges it: it accepts, refuses with an error that it documents, or fails.

Any other error is a defect, and so are much CPU time, much memory, and a message that nobody could read
(`Limits`). The CPU time is that of this process: a loaded machine does not change it.
"""

import contextlib
import hashlib
import resource
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.fuzz.mutation import Mutator
from tests.fuzz.target import Target
from tests.patience import scaled

MAX_GROWTH_BYTES = 200 << 20
MAX_REFUSED, MAX_ACCEPTED = 400, 100
"""Inputs that are kept, to be changed further."""
_WITHIN = "/csdctl/"


@dataclass(frozen=True)
class Limits:
    """Limits of time and of text for one input."""

    cpu_s: float = scaled(2.0)
    endless_cpu_s: float = scaled(20.0)
    """The input is given up after this."""
    message_chars: int = 20_000


LIMITS = Limits()


class EndlessError(BaseException):
    """An input took `endless_cpu_s`; no code catches this."""


@dataclass(frozen=True)
class Outcome:
    """Result of one input."""

    is_accepted: bool
    place: str
    """Line of csdctl that refused it, or the problem; '' when it was accepted."""
    defect: str = ""
    """The traceback, or the limit that was passed; '' for none."""
    cpu_s: float = 0.0


@dataclass
class Tally:
    """The figures of one target."""

    num_tried: int = 0
    num_accepted: int = 0
    slowest_s: float = 0.0
    defects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    """The first input for each place, and what happened."""


class Fuzzing:
    """The fuzzing of one target with one seed."""

    def __init__(self, target: Target, seed: int, directory: Path) -> None:
        """`directory`: for the files of the target."""
        self.target = target
        self.tally = Tally()
        self._directory = directory
        self._mutator = Mutator(target.form, target.words, (target.name, seed))
        self._known = [*target.build_seeds(), *target.corpus]
        self._refused: list[bytes] = []
        """One input for each place that refuses."""
        self._accepted: deque[bytes] = deque(maxlen=MAX_ACCEPTED)
        self._places: set[str] = set()

    def try_known(self) -> None:
        """Try seeds and corpus as they are."""
        for content in self._known:
            self._note(content)

    def try_next(self) -> None:
        """Try one changed input."""
        try:
            with _ended_after(LIMITS.cpu_s):
                content = self._mutator.next(self._known, self._refused, self._accepted)
        except (MemoryError, EndlessError):  # lists of lists of lists, repeated
            return
        self._note(content)

    def _note(self, content: bytes) -> None:
        outcome = try_input(self.target, content, self._directory)
        self.tally.num_tried += 1
        self.tally.num_accepted += outcome.is_accepted
        self.tally.slowest_s = max(self.tally.slowest_s, outcome.cpu_s)
        if outcome.defect:
            self.tally.defects.setdefault(outcome.place, (content, outcome.defect))
        elif outcome.is_accepted:
            self._accepted.append(content)
        elif outcome.place not in self._places and len(self._refused) < MAX_REFUSED:
            self._refused.append(content)  # it came further, or elsewhere, than all inputs before it
        self._places.add(outcome.place)


def try_input(target: Target, content: bytes, directory: Path, limits: Limits = LIMITS) -> Outcome:
    """Give one input to the target."""
    started_s = time.process_time()
    try:
        with _ended_after(limits.endless_cpu_s):
            target.take(content, directory)
    except target.refusals as error:
        place, defect = _place_of(error), ""
        if len(str(error)) > limits.message_chars:
            place, defect = f"long message {place}", f"a message of {len(str(error)):,} characters"
    except (Exception, EndlessError) as error:
        place = _place_of(error)
        defect = "".join(traceback.format_exception(error, limit=-12))
    else:
        place = defect = ""
    cpu_s = time.process_time() - started_s
    if cpu_s > limits.cpu_s and not defect:
        place, defect = f"slow {place}", f"took {cpu_s:.1f} s"
    return Outcome(not place, place, defect, cpu_s)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process have MAX_GROWTH_BYTES more than now: who asks for more gets a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MAX_GROWTH_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


@contextlib.contextmanager
def _ended_after(cpu_s: float) -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _place_of(error: BaseException) -> str:
    """Return the type of an error and the line of csdctl that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _WITHIN in frame.filename and "/tests/" not in frame.filename]
    where = own[-1] if own else frames[-1]
    return f"{type(error).__name__} {where.filename.rpartition(_WITHIN)[2]}:{where.lineno}"


def fuzz(target: Target, seed: int, num_inputs: int) -> Tally:
    """Try seeds, corpus and `num_inputs` changed inputs of one target."""
    with tempfile.TemporaryDirectory(prefix="csdctl-fuzz-") as directory, bounded_memory():
        fuzzing = Fuzzing(target, seed, Path(directory))
        fuzzing.try_known()
        for _ in range(num_inputs):
            fuzzing.try_next()
    return fuzzing.tally


def save_defects(tallies: dict[str, Tally], directory: Path) -> list[Path]:
    """Write the input of every defect, and beside it what happened; return the inputs."""
    saved = []
    for name, tally in tallies.items():
        for content, defect in tally.defects.values():
            path = directory / name / hashlib.sha256(content).hexdigest()[:12]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.with_suffix(".txt").write_text(defect, errors="backslashreplace")
            saved.append(path)
    return saved
