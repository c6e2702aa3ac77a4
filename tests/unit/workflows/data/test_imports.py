"""The job whose imports `doctor` looks for."""

from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.workflows.data.imports import read_imports

JOB = """\
model: model.py:build
data: {public: {path: data}}
recipe: {epochs: 1, learning_rate: 0.1}
"""


def test_without_a_job_nothing_is_looked_for(tmp_path: Path) -> None:
    assert read_imports(None, tmp_path) is None


def test_job_in_the_directory_is_read_without_being_named(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "model.py").write_text("import scipy\n")
    found = read_imports(None, tmp_path)
    assert found
    # The model was never built: whether the nodes need its code is not known.
    assert [[need.module for need in needs] for needs in (found.host, found.nodes, found.perhaps)] == [
        ["scipy"],
        [],
        ["scipy"],
    ]


def test_job_that_cannot_be_read_is_an_error_only_if_it_was_named(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    found = read_imports(None, tmp_path)
    assert found
    assert "model.py does not exist" in found.problem
    with pytest.raises(InputError, match=r"model\.py does not exist"):
        read_imports(tmp_path / "job.yaml", tmp_path)
