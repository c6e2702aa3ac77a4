"""A project as `tune` finds and leaves it."""

from pathlib import Path

import pytest

from tests.unit.workflows.measured_project import MeasuredProject, make_project, remember_all


@pytest.fixture
def at(tmp_path: Path) -> MeasuredProject:
    """Prepared, without measurements."""
    return make_project(tmp_path)


@pytest.fixture
def measured(at: MeasuredProject) -> MeasuredProject:
    """With probes, sums and a trial."""
    remember_all(at)
    return at
