"""`import csdctl`: quick, complete, documented; jobs and fleets from files; runs and their errors."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import csdctl
from csdctl.api.interface import python_errors
from csdctl.errors import InputError

ROOT = Path(__file__).parents[3]
PUBLIC = [name for name in csdctl.__all__ if name != "__version__"]
HEAVY = ("tensorflow", "keras", "paramiko", "rich", "typer", "pydantic", "numpy", "yaml", "IPython")


class SavedModel:
    """Stands for a Keras model: `save` writes a file."""

    def save(self, path: Path) -> None:
        path.write_bytes(b"PK\x05\x06" + bytes(18))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import csdctl; csdctl.__version__; dir(csdctl)", set(HEAVY)),
        ("import csdctl; csdctl.train, csdctl.Job", {"tensorflow", "keras", "paramiko", "IPython"}),
    ],
)
def test_heavy_modules_are_not_imported(statement: str, absent: set[str]) -> None:
    """For its own sake, `import csdctl` imports none of HEAVY."""
    program = f"{statement}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout.splitlines()[-1])) & absent == set()


def test_public_names_are_those_of_the_interface() -> None:
    assert all(hasattr(csdctl, name) for name in PUBLIC)
    assert set(PUBLIC) < set(dir(csdctl))
    assert csdctl.errors.InputError is InputError
    with pytest.raises(AttributeError, match="no attribute 'fit'"):
        csdctl.fit  # noqa: B018


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name: str) -> None:
    found = getattr(csdctl, name)
    if name == "STOP":
        return
    assert inspect.getdoc(found)
    for member, value in vars(found).items() if inspect.isclass(found) else ():
        is_shown = isinstance(value, property | classmethod) or inspect.isfunction(value)
        assert member.startswith("_") or not is_shown or inspect.getdoc(value), member


class TestJob:
    def test_job_of_a_file(self, tmp_path: Path) -> None:
        made = from_model(tmp_path)
        assert csdctl.Job(str(made.path)) == csdctl.Job(made.path) == made

    def test_early_stopping_with_the_name_that_keras_uses(self, tmp_path: Path) -> None:
        made = from_model(tmp_path, early_stopping=csdctl.EarlyStopping("val_accuracy", patience=np.int64(2)))
        assert made.load().recipe.early_stopping == csdctl.EarlyStopping("validation_accuracy", 2, 0.0)

    def test_object_in_the_recipe(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="received a SavedModel as recipe.optimizer, expected a value"):
            from_model(tmp_path, optimizer=SavedModel())


def from_model(directory: Path, **recipe: object) -> csdctl.Job:
    x, y = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
    return csdctl.Job.from_model(SavedModel(), (x, y), directory=directory, **recipe)


def test_what_is_no_function_is_refused_as_callback() -> None:
    with pytest.raises(InputError, match="received a EarlyStopping as callback") as caught:
        csdctl.TrainOptions(callbacks=(csdctl.EarlyStopping(),))  # type: ignore[arg-type]
    assert "recipe" in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (csdctl.TrainOptions, {"min_nodes": -1}, "min_nodes must be at least 0, received -1"),
        (csdctl.TrainOptions, {"num_checkpoints": 0}, "num_checkpoints must be at least 1, received 0"),
        (csdctl.TrainOptions, {"cut": "a"}, "cut requires strategy split, received strategy auto"),
        (csdctl.TuneOptions, {"probe_duration_s": -1.0}, "probe_duration_s must be at least 0"),
        (csdctl.TuneOptions, {"method": "fit", "step_divisor": 1.0}, "fit does not take batch_sizes"),
    ],
)
def test_errors_name_arguments(options: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        options(**given)
    assert raised.value.message.startswith(message)
    assert "--" not in raised.value.message + raised.value.remedy.partition("`")[0]


def test_commands_in_errors_stay_command_lines() -> None:
    with pytest.raises(InputError) as raised, python_errors():
        raise InputError("run `csdctl tune --host`, not --keep", remedy="csdctl trust --forget; --limit x")
    assert raised.value.message == "run `csdctl tune --host`, not num_checkpoints"
    assert raised.value.remedy == "csdctl trust --forget; limit x"
