"""Gives inputs to a target and judges it: it accepts, refuses with an error that it documents, or fails.

Any other error is a defect, and so are much CPU time, much memory, and a message that nobody could read. The
CPU time is that of this process: a loaded machine does not change it.
"""

import contextlib
import resource
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.fuzz.mutation import Mutator
from tests.fuzz.target import Target
from tests.patience import scaled

MAX_GROWTH_BYTES = 200 << 20
MAX_REFUSED, MAX_ACCEPTED = 400, 100
"""Inputs that are kept, to be changed further."""
MAX_CPU_S = 2.0
ENDLESS_CPU_S = 20.0
"""The input is given up after this."""
MAX_MESSAGE_CHARS = 20_000
_WITHIN = "/csdctl/"


class EndlessError(BaseException):
    """An input took too long; no code catches this."""


@dataclass(frozen=True)
class Outcome:
    """Result of one input."""

    place: str
    """Line of csdctl that refused it, or the problem; '' when it was accepted."""
    defect: str = ""
    """The traceback, or the limit that was passed; '' for none."""


def fuzz(target: Target, seed: int, num_inputs: int) -> dict[str, tuple[bytes, str]]:
    """Try seeds, corpus and `num_inputs` changed inputs of one target.

    Returns the first input of each place with a defect, and what happened.
    """
    mutator = Mutator(target.form, target.words, (target.name, seed))
    seeds = [*target.build_seeds(), *target.corpus]
    refused: list[bytes] = []
    accepted: deque[bytes] = deque(maxlen=MAX_ACCEPTED)
    places: set[str] = set()
    defects: dict[str, tuple[bytes, str]] = {}
    with tempfile.TemporaryDirectory(prefix="csdctl-fuzz-") as directory, bounded_memory():
        for number in range(len(seeds) + num_inputs):
            try:
                with _ended_after(scaled(MAX_CPU_S)):
                    is_seed = number < len(seeds)
                    content = seeds[number] if is_seed else mutator.next(seeds, refused, accepted)
            except (MemoryError, EndlessError):  # lists of lists of lists, repeated
                continue
            outcome = try_input(target, content, Path(directory))
            if outcome.defect:
                defects.setdefault(outcome.place, (content, outcome.defect))
            elif not outcome.place:
                accepted.append(content)
            elif outcome.place not in places and len(refused) < MAX_REFUSED:
                refused.append(content)  # it came further, or elsewhere, than all inputs before it
            places.add(outcome.place)
    return defects


def try_input(
    target: Target,
    content: bytes,
    directory: Path,
    *,
    max_cpu_s: float = MAX_CPU_S,
    endless_cpu_s: float = ENDLESS_CPU_S,
) -> Outcome:
    """Give one input to the target; limits of CPU time are scaled."""
    started_s = time.process_time()
    place = defect = ""
    try:
        with _ended_after(scaled(endless_cpu_s)):
            target.take(content, directory)
    except target.refusals as error:
        place = _place_of(error)
        if len(str(error)) > MAX_MESSAGE_CHARS:
            place, defect = f"long message {place}", f"a message of {len(str(error)):,} characters"
    except (Exception, EndlessError) as error:
        place = _place_of(error)
        defect = "".join(traceback.format_exception(error, limit=-12))
    cpu_s = time.process_time() - started_s
    if cpu_s > scaled(max_cpu_s) and not defect:
        place, defect = f"slow {place}", f"took {cpu_s:.1f} s"
    return Outcome(place, defect)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let this process have MAX_GROWTH_BYTES more than now: who asks for more gets a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    data_bytes = int(status.partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + MAX_GROWTH_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


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
