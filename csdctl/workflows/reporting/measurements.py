"""`measurements`: load stored measurements."""

from csdctl.notify import Say
from csdctl.runs.directory import ProjectDirectory
from csdctl.runs.measurements import Overview, open_measurements


def load_measurements(project: ProjectDirectory, say: Say) -> Overview:
    """Load the measurements of the project, without creating a file; raises CsdctlError."""
    if not project.measurements.exists():
        return Overview()
    with open_measurements(project.measurements, say) as store:
        return store.overview()
