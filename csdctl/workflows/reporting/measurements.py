"""`history`: what is known from earlier measurements, and forgetting it."""

import contextlib
from collections.abc import Callable, Sequence

from csdctl.errors import InputError
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import Forgotten, open_measurements
from csdctl.runs.measurements_file import remove_measurements
from csdctl.runs.measurements_overview import Overview, load_overview
from csdctl.tuning.measurements import ModelFeatures

EVERYTHING = "all"


def load_history(project: ProjectDirectory) -> Overview | None:
    """What the project's history knows; None when there is none. Raises CsdctlError."""
    if not project.measurements.exists():
        return None
    with open_measurements(project.measurements) as history:
        return load_overview(history.file)


def forget_measured(project: ProjectDirectory, wanted: str, confirm: Callable[[str], None]) -> Forgotten:
    """Forget a model (its name or hash) or EVERYTHING; `confirm` is asked and raises when it must not be.

    With EVERYTHING a history that cannot be read is removed. Raises InputError for a model that is not known.
    """
    if not project.measurements.exists():
        return Forgotten()
    if wanted == EVERYTHING:
        return _forget_all(project, confirm)
    with open_measurements(project.measurements) as history:
        models = history.find_models(wanted)
        confirm(f"Forget what was measured of {_name(models)}?")
        return history.forget(models)


def _forget_all(project: ProjectDirectory, confirm: Callable[[str], None]) -> Forgotten:
    with contextlib.ExitStack() as stack:
        try:
            history = stack.enter_context(open_measurements(project.measurements))
        except InputError as error:
            confirm(f"{error.message}. Remove it?")
            remove_measurements(project.measurements)
            return Forgotten()
        confirm("Forget everything that was measured?")
        return history.forget(None)


def _name(models: Sequence[ModelFeatures]) -> str:
    return ", ".join(f"{one.short_name} ({one.hash[:8]})" for one in models)
