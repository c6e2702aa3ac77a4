"""Where rank 0 keeps a run's state and models, so that the run can resume.

After every step in the step file (the machine's memory); after every epoch, and every few minutes, in a
checkpoint (disk). Other ranks keep nothing: they take over rank 0's state, never the other way round
(docs/decisions/0024).
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from csdctl.worker.compute.forward import assemble
from csdctl.worker.compute.step import Step
from csdctl.worker.data.arrays import Array
from csdctl.worker.data.schedule import OwnSamples
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.process.output import emit
from csdctl.worker.protocol.events import CheckpointSaved
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.worker.tasks.position import Position, max_state_bytes, pack, position_of, unpack
from csdctl.worker.tasks.state_files import Checkpoints, StepFile

MAX_COST_SHARE = 0.01
"""The share of the training time that the step file may cost when no other rank holds the state too."""
LAST_MODEL, BEST_MODEL = "model.keras", "best.keras"
KEPT_STEP_FILE = "step.state"
"""In the run directory: the step file of a run that has failed, which csdctl has moved out of memory."""


def save_model(model: Any, path: Path) -> Path:
    """Save `model` to `path`; returns that, or the path of a .weights.h5 beside it.

    Keras cannot save a model whose class has no get_config, which its function builds on every rank.
    """
    try:
        aside = path.with_name(f"part-{path.name}")
        model.save(aside)
    except OSError:
        raise
    except Exception as error:  # of the user's classes
        aside.unlink(missing_ok=True)
        path = path.with_suffix(".weights.h5")
        print(f"only the weights are saved: {describe(error)}", flush=True)
        aside = path.with_name(f"part-{path.name}")
        model.save_weights(aside)
    os.replace(aside, path)
    return path


class Checkpointer:
    """Saves the state and the models of one run."""

    def __init__(self, spec: RunSpec, me: RankSpec, step: Step, own: Sequence[OwnSamples]) -> None:
        """Restore what an earlier process of this run saved: see `position`.

        `own`: the samples of each rank. Raises WorkerError when a state was saved and none can be used.
        """
        self._spec = spec
        self._me = me
        self._step = step
        self._own = own
        output = Path(spec.output_directory)
        self._checkpoints = Checkpoints(output / "checkpoints", spec.num_checkpoints)
        paths = [Path(spec.step_file), output / KEPT_STEP_FILE] if spec.step_file else []
        self._step_files = [StepFile(path, step.state) for path in paths]
        self._can_write = bool(self._step_files)
        self._cost_s = 0.0
        self._written_at = self._checkpointed_at = time.monotonic()
        self.position = self._restore()
        """Where the run was when its state was last saved; None for a new run."""

    def after_step(self, position: Position, *, has_others: bool) -> None:
        """Save the state after a step, where that survives this process and is worth its cost."""
        now = time.monotonic()
        if has_others or self._cost_s <= MAX_COST_SHARE * (now - self._written_at):
            self.write_step_file(position)
        if now - self._checkpointed_at >= self._spec.checkpoint_interval_s:
            self.checkpoint(position)

    def write_step_file(self, position: Position) -> None:
        """Write the state to the step file, if there can be one."""
        if not self._can_write:
            return
        began = time.monotonic()
        try:
            self._step_files[0].write(self._step.state, position)
        except OSError as error:  # there are checkpoints
            print(f"no step file: {error}", flush=True)
            self._can_write = False
        self._written_at = time.monotonic()
        self._cost_s = self._written_at - began

    def checkpoint(self, position: Position, *, is_best: bool = False) -> None:
        """Write a checkpoint to disk, if the run keeps any."""
        if not self._spec.num_checkpoints:
            return
        path = self._checkpoints.save(pack(self._step.state, position), position, is_best=is_best)
        self._checkpointed_at = time.monotonic()
        emit(
            CheckpointSaved(
                self._me.rank, self._me.node, position.epoch, position.total_steps, str(path), is_best
            )
        )

    def save_model(self, name: str) -> str:
        """Save the model as a .keras file, or its weights where that cannot be; returns the path."""
        with self._step.averaged_weights():
            model = assemble(self._spec.head, self._step.model) if self._spec.head else self._step.model
            return str(save_model(model, Path(self._spec.output_directory) / name))

    def save_last_good(self) -> None:
        """Save the model of the newest checkpoint, if it exists: later weights are not finite."""
        newest = self._newest_checkpoint([])
        if newest is not None:
            unpack(newest, self._step.state, self._own)
            self.save_model(LAST_MODEL)

    def _restore(self) -> Position | None:
        """Load the later of step file and newest checkpoint into the model."""
        problems: list[str] = []
        states = [state for state in self._step_states(problems) if self._is_possible(state, problems)]
        newest = self._newest_checkpoint(problems)
        if newest is not None:
            states.append(newest)
        if states:
            latest = max(states, key=lambda state: position_of(state, self._own).total_steps)
            return unpack(latest, self._step.state, self._own)
        if self._checkpoints.exist():  # to begin again would throw away what was trained
            raise WorkerError(
                f"no checkpoint of this run can be used: {'; '.join(problems) or 'they are damaged'}",
                remedy="start a new run",
            )
        return None

    def _step_states(self, problems: list[str]) -> Iterator[Array]:
        for file in self._step_files:
            try:
                state = file.read()
            except OSError as error:
                problems.append(str(error))
                print(f"the step file is not used: {error}", flush=True)
                continue
            if state is not None:
                yield state

    def _newest_checkpoint(self, problems: list[str]) -> Array | None:
        """Return the newest checkpoint that is intact and possible in this run."""
        states = self._checkpoints.newest_first(max_state_bytes(self._step.state))
        return next((state for state in states if self._is_possible(state, problems)), None)

    def _is_possible(self, state: Array, problems: list[str]) -> bool:
        try:
            position_of(state, self._own)
        except WorkerError as error:
            problems.append(error.message)
            return False
        return True
