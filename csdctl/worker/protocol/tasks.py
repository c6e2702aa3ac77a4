"""The task of a run's ranks, as one tagged value."""

from dataclasses import dataclass, field
from typing import Any

TRAIN, TRAIN_SPLIT = "train", "train-split"
TRIAL, TRIAL_SPLIT = "trial", "trial-split"
VERIFY, VERIFY_SPLIT = "verify", "verify-split"
"""The tasks of csdctl itself; the worker's registry (tasks/registry.py) has their implementations."""

JOINING = (TRAIN, TRAIN_SPLIT, TRIAL, TRIAL_SPLIT)
"""Tasks whose ranks report `Joined` before they report anything else of a group."""

ELEMENT_SPEC = "element_spec"
"""Argument of a trial: the `DatasetInfo` whose shapes and types its random samples have."""


@dataclass(frozen=True)
class TaskSpec:
    """A task by its name in the worker's registry, and its arguments, as JSON has them."""

    name: str = TRAIN
    arguments: dict[str, Any] = field(default_factory=dict)
