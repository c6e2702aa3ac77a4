"""What a run has come to, from its manifest and the end of its events: a list must not read them all."""

from dataclasses import dataclass
from typing import Any

from csdctl.errors import InputError
from csdctl.runs.directory import RunDirectory
from csdctl.tuning.strategies import DATA_PARALLEL
from csdctl.worker.protocol.events import STOPPED as ASKED_TO_STOP
from csdctl.worker.protocol.events import EpochEnd, Failed, Finished, Progress

TAIL_BYTES = 1 << 18
DONE, STOPPED, FAILED, INTERRUPTED = "done", "stopped", "failed", "interrupted"


@dataclass(frozen=True)
class RunStatus:
    """A run, without reading all of it."""

    run_id: str
    state: str
    """As the last events say: DONE, STOPPED, FAILED, or INTERRUPTED for a run without an end."""
    job: str = ""
    strategy: str = DATA_PARALLEL
    num_ranks: int = 0
    epochs: int = 0
    """That are to be trained."""
    epoch: int = 0
    """The one that was trained last, from 1."""
    step: int = 0
    """In that epoch; 0: it has ended."""
    samples_per_s: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    last_event_s: float | None = None
    """Unix time."""
    emulated: bool = False


def load_run_status(run: RunDirectory) -> RunStatus:
    """Return what is known of `run`; one whose files cannot be read has only its state."""
    try:
        manifest: Any = run.load_manifest()
    except InputError:
        return RunStatus(run.run_id, INTERRUPTED)
    nodes = [rank["node"] for rank in manifest["plan"]["ranks"]]
    found: dict[str, Any] = {}
    finished: dict[int, Finished] = {}
    failed, last_s = False, None
    for time_s, event in run.read_events(nodes).last(TAIL_BYTES):
        last_s = time_s
        if isinstance(event, Progress | EpochEnd) and event.rank == 0:
            failed, finished = False, {}  # a resumed run goes on after its end
            found |= _totals(event)
        elif isinstance(event, Finished):
            finished[event.rank] = event
        elif isinstance(event, Failed):
            failed = True
    state = FAILED if failed else INTERRUPTED
    if 0 in finished:
        state = STOPPED if finished[0].reason == ASKED_TO_STOP else DONE
    recipe, job = manifest.get("recipe"), manifest.get("job")
    return RunStatus(
        run.run_id,
        state,
        job=str(job.get("path", "")) if isinstance(job, dict) else "",
        strategy=str(manifest.get("strategy", DATA_PARALLEL)),
        num_ranks=len(nodes),
        epochs=_count(recipe.get("epochs")) if isinstance(recipe, dict) else 0,
        last_event_s=last_s,
        emulated=bool(manifest["plan"].get("emulated")),
        **found,
    )


def _totals(event: Progress | EpochEnd) -> dict[str, Any]:
    found: dict[str, Any] = {"epoch": event.epoch, "loss": event.loss, "accuracy": event.accuracy}
    found["step"] = event.step if isinstance(event, Progress) else 0
    if event.wall_s:
        found["samples_per_s"] = event.global_samples / event.wall_s
    if isinstance(event, EpochEnd):
        found["validation_loss"] = event.validation_loss
        found["validation_accuracy"] = event.validation_accuracy
    return found


def _count(value: object) -> int:
    return value if type(value) is int else 0
