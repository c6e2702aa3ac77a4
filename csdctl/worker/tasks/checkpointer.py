"""Where a run's state and models are kept, so that it can go on: rank 0's part.

After every step in the step file (memory of the machine), after every epoch and every few minutes in a
checkpoint (disk), and the models that come of it. Other ranks keep nothing; they can ask rank 0's.
"""

import os
import time
from pathlib import Path

from csdctl.worker.compute.step import Step
from csdctl.worker.process.events import emit
from csdctl.worker.protocol.events import CheckpointSaved
from csdctl.worker.protocol.run_spec import RankSpec, RunSpec
from csdctl.worker.tasks.state import Checkpoints, Position, StepFile, pack, position_of, unpack

STATE_COST_SHARE = 0.01
"""Of the training time, what keeping the state of the last step may cost when no other rank has it too."""
LAST_MODEL, BEST_MODEL = "model.keras", "best.keras"


class Checkpointer:
    """Keeps the state of one run."""

    def __init__(self, spec: RunSpec, me: RankSpec, step: Step) -> None:
        """Takes over what an earlier process of this run kept: see `position`."""
        self._spec = spec
        self._me = me
        self._step = step
        self._checkpoints = Checkpoints(Path(spec.output_directory) / "checkpoints", spec.num_checkpoints)
        self._cost_s = 0.0
        self._kept_at = self._checkpointed_at = time.monotonic()
        self.position = self._take_over()
        """Where the run was when its state was kept last; None for a new run."""
        self._step_file = self._open_step_file()

    def after_step(self, position: Position, *, has_others: bool) -> None:
        """The step is done: keep the state, where it outlives this process, and is worth its cost."""
        now = time.monotonic()
        if has_others or self._cost_s <= STATE_COST_SHARE * (now - self._kept_at):
            self.keep(position)
        if now - self._checkpointed_at >= self._spec.checkpoint_interval_s:
            self.checkpoint(position)

    def keep(self, position: Position) -> None:
        """Write the step file."""
        if self._step_file:
            now = time.monotonic()
            self._step_file.write(self._step.state, position)
            self._kept_at = time.monotonic()
            self._cost_s = self._kept_at - now

    def checkpoint(self, position: Position, *, is_best: bool = False) -> None:
        """Write a checkpoint to disk."""
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
        """The model as it is, for Keras to load; returns its path."""
        path = Path(self._spec.output_directory) / name
        aside = path.with_name(f"part-{name}")
        self._step.model.save(aside)
        os.replace(aside, path)
        return str(path)

    def save_last_good(self) -> None:
        """The model of the newest checkpoint, where there is one: what came after it is spoilt."""
        newest = self._checkpoints.newest()
        if newest is not None:
            unpack(newest, self._step.state)
            self.save_model(LAST_MODEL)

    def _take_over(self) -> Position | None:
        """The later of step file and newest checkpoint, put into the model."""
        kept = StepFile.read(Path(self._spec.step_file)) if self._spec.step_file else None
        states = [state for state in (self._checkpoints.newest(), kept) if state is not None]
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
