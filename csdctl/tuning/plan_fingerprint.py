"""The job and machines that a plan was tuned for, stored in the plan, and changes since then; pure."""

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from csdctl.documents import Document


class PlanFingerprint(Document):
    """The job and the machines that a plan was tuned for."""

    job: dict[str, Any] = {}
    """Values by their names in job.yaml, without those that are not set."""
    files: dict[str, str] = {}
    """A hash of the content of each of the user's own files, by path."""
    machines: dict[str, str] = {}
    """The description of each rank's machine (`MachineClass.name`)."""


def list_changes(then: PlanFingerprint, now: PlanFingerprint) -> list[str]:
    """List the differences, one line each; a machine that only one of them has is not a change."""
    return [
        *_changed_values(then.job, now.job),
        *_changed_files(then.files, now.files),
        *_changed_machines(then.machines, now.machines),
    ]


def _changed_values(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*now, *then)):
        if then.get(name) != now.get(name):
            yield f"{name}: {_show(now.get(name))}, was {_show(then.get(name))} when tuned"


def _changed_files(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for path, digest in now.items():
        if then.get(path, digest) != digest:
            yield f"{PurePath(path).name} has changed"


def _changed_machines(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name, machine in now.items():
        parts, earlier = machine.split(", "), then.get(name, machine).split(", ")
        new = ", ".join(part for part in parts if part not in earlier)
        gone = ", ".join(part for part in earlier if part not in parts)
        if new and gone:
            yield f"{name}: {new}, was {gone}"
        elif new or gone:
            yield f"{name}: {machine}, was {then[name]}"


def _show(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value)
