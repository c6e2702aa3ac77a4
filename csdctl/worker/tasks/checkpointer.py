"""Where rank 0 keeps a run's state and models, so that the run can resume.

After every step in the step file (the machine's memory); after every epoch, and every few minutes, in a
checkpoint (disk). Other ranks keep nothing; they can take over rank 0's state.
"""

import os
import time
from pathlib import Path

from csdctl.worker.compute.step import Step
from csdctl.worker.process.events import emit
from csdctl.worker.protocol.events import CheckpointSaved
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.worker.tasks.position import Position, pack, position_of, unpack
from csdctl.worker.tasks.state_files import Checkpoints, StepFile

MAX_COST_SHARE = 0.01
"""The share of the training time that the step file may cost when no other rank holds the state too."""
LAST_MODEL, BEST_MODEL = "model.keras", "best.keras"


class Checkpointer:
    """Saves the state and the models of one run."""

    def __init__(self, spec: RunSpec, me: RankSpec, step: Step) -> None:
        """Restore what an earlier process of this run saved: see `position`."""
        self._spec = spec
        self._me = me
        self._step = step
        self._checkpoints = Checkpoints(Path(spec.output_directory) / "checkpoints", spec.num_checkpoints)
        self._cost_s = 0.0
        self._written_at = self._checkpointed_at = time.monotonic()
        self.position = self._restore()
        """Where the run was when its state was last saved; None for a new run."""
        self._step_file = self._open_step_file()

    def after_step(self, position: Position, *, has_others: bool) -> None:
        """Save the state after a step, where that survives this process and is worth its cost."""
        now = time.monotonic()
        if has_others or self._cost_s <= MAX_COST_SHARE * (now - self._written_at):
            self.write_step_file(position)
        if now - self._checkpointed_at >= self._spec.checkpoint_interval_s:
            self.checkpoint(position)

    def write_step_file(self, position: Position) -> None:
        """Write the state to the step file, if there is one."""
        if self._step_file:
            began = time.monotonic()
            self._step_file.write(self._step.state, position)
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
        """Save the model as a .keras file; returns its path."""
        path = Path(self._spec.output_directory) / name
        aside = path.with_name(f"part-{name}")
        self._step.model.save(aside)
        os.replace(aside, path)
        return str(path)

    def save_last_good(self) -> None:
        """Save the model of the newest checkpoint, if it exists: later weights are not finite."""
        newest = self._checkpoints.newest()
        if newest is not None:
            unpack(newest, self._step.state)
            self.save_model(LAST_MODEL)

    def _restore(self) -> Position | None:
        """Load the later of step file and newest checkpoint into the model."""
        saved = StepFile.read(Path(self._spec.step_file)) if self._spec.step_file else None
        states = [state for state in (self._checkpoints.newest(), saved) if state is not None]
        if not states:
            return None
        latest = max(states, key=lambda state: position_of(state).total_steps)
        return unpack(latest, self._step.state)

    def _open_step_file(self) -> StepFile | None:
        if not self._spec.step_file:
            return None
        try:
            return StepFile(Path(self._spec.step_file), self._step.state)
        except OSError as error:
            # The other ranks hold the state too, and there are checkpoints.
            print(f"no step file: {error}", flush=True)
            return None
