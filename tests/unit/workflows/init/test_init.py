"""What `init` takes from its options."""

from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.workflows.init.init import InitRequest, _Looking, init_job, parse_sources


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("model.py", "own_layers.py", "data.py"):
        (tmp_path / name).touch()
    (tmp_path / "model.py").write_text("from own_layers import Scale\n")
    (tmp_path / "jobs").mkdir()
    return tmp_path


def test_paths_are_relative_to_the_job_file_and_imports_are_found(project: Path) -> None:
    function = f"{project}/data.py:load"
    found = parse_sources(
        InitRequest(project / "job.yaml", f"{project}/model.py:build", function, f"{function}:{project}/jobs")
    )
    assert (found.model, found.code) == ("model.py:build", ("own_layers.py",))
    assert found.public == {"path": "data.py", "function": "data.py:load"}
    assert found.validation == {"path": "jobs", "function": "data.py:load"}
    below = parse_sources(InitRequest(project / "jobs/job.yaml", f"{project}/model.py:build", str(project)))
    assert (below.model, below.public) == (f"{project}/model.py:build", {"path": str(project)})


@pytest.mark.parametrize(("given", "expected"), [("HOME/private", "~/private"), ("/data/p", "/data/p")])
def test_home_that_a_shell_has_written_out_is_that_of_the_node(
    project: Path, given: str, expected: str
) -> None:
    private = given.replace("HOME", str(Path.home()))
    request = InitRequest(project / "job.yaml", "keras.applications:X", str(project), private=private)
    assert parse_sources(request).private == expected


@pytest.mark.parametrize("before", [None, "earlier"])
def test_functions_of_a_script_are_kept_only_with_its_job_file(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text(
        "import keras\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "model.compile('adam', 'mse')\n"
        "model.fit([[1, 2]], [1], epochs=1)\n"
    )
    functions = tmp_path / "a_functions.py"
    if before:
        functions.write_text(before)
    seen = []

    def refuse(self: object, sources: object) -> None:
        seen.append(functions.read_text())
        raise InputError("no such data")

    monkeypatch.setattr(_Looking, "look", refuse)
    request = InitRequest(tmp_path / "job.yaml", script=tmp_path / "a.py", is_overwriting=True)
    with pytest.raises(InputError, match="no such data"):
        init_job(request, tmp_path, print, print)
    assert "def build" in seen[0]
    assert (functions.read_text() if functions.exists() else None) == before
    assert not request.output.exists()
