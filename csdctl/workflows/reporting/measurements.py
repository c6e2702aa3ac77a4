"""`measurements`: load or delete stored measurements."""

from collections.abc import Callable

from csdctl.notify import Say
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import Forgotten, Overview, open_measurements

EVERYTHING = "all"


def load_measurements(project: ProjectDirectory, say: Say) -> Overview:
    """Load the measurements of the project, without creating a file; raises CsdctlError."""
    if not project.measurements.exists():
        return Overview()
    with open_measurements(project.measurements, say) as store:
        return store.overview()


def forget_measurements(
    project: ProjectDirectory, selection: str, confirm: Callable[[str], None], say: Say
) -> Forgotten:
    """Delete the measurements of a model (its name or hash) or EVERYTHING; `confirm` raises to refuse.

    Raises InputError for an unknown model.
    """
    if not project.measurements.exists():
        return Forgotten()
    with open_measurements(project.measurements, say) as store:
        if selection == EVERYTHING:
            confirm("Delete all measurements?")
            return store.forget(None)
        models = store.find_models(selection)
        names = ", ".join(f"{model.short_name} ({model.hash[:8]})" for model in models)
        confirm(f"Delete the measurements of {names}?")
        return store.forget(models)
