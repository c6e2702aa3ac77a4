"""`measurements`: load or delete stored measurements."""

import contextlib
from collections.abc import Callable, Sequence

from csdctl.errors import InputError
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import Forgotten, open_measurements
from csdctl.runs.measurements_file import remove_measurements
from csdctl.runs.measurements_overview import Overview, load_overview
from csdctl.tuning.measurements import ModelProperties

EVERYTHING = "all"


def load_measurements(project: ProjectDirectory) -> Overview:
    """Load the measurements of the project, without creating a file; raises CsdctlError."""
    if not project.measurements.exists():
        return Overview()
    with open_measurements(project.measurements) as store:
        return load_overview(store.file)


def forget_measurements(
    project: ProjectDirectory, selection: str, confirm: Callable[[str], None]
) -> Forgotten:
    """Delete the measurements of a model (its name or hash) or EVERYTHING; `confirm` raises to refuse.

    With EVERYTHING, a file that cannot be read is removed. Raises InputError for an unknown model.
    """
    if not project.measurements.exists():
        return Forgotten()
    if selection == EVERYTHING:
        return _forget_all(project, confirm)
    with open_measurements(project.measurements) as store:
        models = store.find_models(selection)
        confirm(f"Delete the measurements of {_name(models)}?")
        return store.forget(models)


def _forget_all(project: ProjectDirectory, confirm: Callable[[str], None]) -> Forgotten:
    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(open_measurements(project.measurements))
        except InputError as error:
            confirm(f"{error.message}. Remove it?")
            remove_measurements(project.measurements)
            return Forgotten()
        confirm("Delete all measurements?")
        return store.forget(None)


def _name(models: Sequence[ModelProperties]) -> str:
    return ", ".join(f"{model.short_name} ({model.hash[:8]})" for model in models)
