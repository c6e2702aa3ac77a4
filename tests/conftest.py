"""What holds for all tests."""

import signal
from collections.abc import Iterator

import pytest

from csdctl.runs.directory import ProjectDirectory, RunDirectory

# A shell that runs a job in the background lets it ignore Ctrl-C, and whatever the job starts inherits that.
# The tests that press Ctrl-C must mean the same wherever they run.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def remove_step_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The states of runs that were not finished are kept in the machine's memory, for nobody here."""
    yield
    for path in tmp_path_factory.getbasetemp().rglob(".csdctl/runs/*"):
        ProjectDirectory(path.parents[2]).step_file(RunDirectory(path)).unlink(missing_ok=True)
