"""`import csdctl`: quick, complete and documented. Jobs and fleets from files, runs and their errors."""

import inspect
import json
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import csdctl
from csdctl.errors import InputError, naming_options, option

ROOT = Path(__file__).parents[3]
PUBLIC = [name for name in csdctl.__all__ if name != "__version__"]
HEAVY = ("tensorflow", "keras", "paramiko", "rich", "typer", "pydantic", "numpy", "yaml", "IPython")


ARRAYS = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)


class SavedModel:
    """Stands for a Keras model: `save` writes a file with parts of these names."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def save(self, path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("config.json", json.dumps([{"class_name": part} for part in self.parts]))


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
    public = getattr(csdctl, name)
    if name == "STOP":
        return
    assert inspect.getdoc(public)
    for member, value in vars(public).items() if inspect.isclass(public) else ():
        is_shown = isinstance(value, property | classmethod) or inspect.isfunction(value)
        assert member.startswith("_") or not is_shown or inspect.getdoc(value), member


class TestJob:
    def test_early_stopping_with_the_name_that_keras_uses(self, tmp_path: Path) -> None:
        stopping = csdctl.EarlyStopping("val_accuracy", patience=np.int64(2))
        made = from_model(tmp_path, early_stopping=stopping, validation=ARRAYS)
        assert made.load().recipe.early_stopping == csdctl.EarlyStopping("validation_accuracy", 2, 0.0)

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({"optimizer": SavedModel()}, "received SavedModel as optimizer, expected a value"),
            (
                {"epoch": 3},
                "from_model has no argument `epoch`, did you mean `epochs`?\n  → change or omit it",
            ),
            ({"batch_size": 8}, "no argument `batch_size`\n  → pass it to csdctl.train"),
            ({"early_stopping": csdctl.EarlyStopping()}, "monitors validation_loss, but the job has no"),
            ({"data": (ARRAYS[0], ARRAYS[1][:3])}, "different numbers of samples: x has 4, y has 3"),
            (
                {"data": (ARRAYS[0], np.array(["a"] * 4))},
                "y is <U1\n  → convert it: x.astype(np.float32); labels: y = np.unique(",
            ),
            (
                {"data": (np.ma.masked_array(np.ones(4), [0, 0, 1, 0]), ARRAYS[1])},
                "is not numbers: x is masked",
            ),
            ({"data": [(ARRAYS[0][0], ARRAYS[1][0])]}, "single samples, expected batches"),
            ({"model": SavedModel("__lambda__")}, "nodes cannot import it\n  → write a function or layer"),
        ],
    )
    def test_what_cannot_be_used_is_refused_in_terms_of_the_arguments(
        self, tmp_path: Path, given: dict[str, Any], expected: str
    ) -> None:
        with pytest.raises(InputError) as raised:
            from_model(tmp_path, **given)
        assert expected in str(raised.value)
        assert "job.yaml:" not in str(raised.value)

    def test_class_of_a_script_needs_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        mine, model = type("Mine", (), {"__module__": "__main__"}), SavedModel("Dense", "Mine")
        monkeypatch.setattr(sys.modules["__main__"], "Mine", mine, raising=False)
        (tmp_path / "script.py").write_text("class Mine: pass")
        from_model(tmp_path, model=model, code=tmp_path / "script.py")
        with pytest.raises(InputError, match="Mine of the model is defined in the notebook or script"):
            from_model(tmp_path, model=model)

    def test_jobs_in_two_directories_have_plans_of_their_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert [from_model(Path(name)).load().name for name in ("a", "b")] == ["a", "b"]
        from_model(Path("a"))
        assert "".join(capsys.readouterr()) == "the job in a is replaced, also that of earlier Job objects\n"


def from_model(directory: Path, **given: Any) -> csdctl.Job:
    model, data = given.pop("model", SavedModel()), given.pop("data", ARRAYS)
    return csdctl.Job.from_model(model, data, directory=directory, **given)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (csdctl.TrainOptions, {"min_nodes": -1}, "min_nodes must be at least 0, received -1"),
        (csdctl.TuneOptions, {"goal": "accuracy"}, "goal: must be 'throughput' or"),
        (csdctl.TrainOptions, {"max_steps": "ten"}, "max_steps: must be a whole number (received 'ten')"),
        (csdctl.TrainOptions, {"callbacks": (csdctl.EarlyStopping(),)}, "callbacks: `0`: must be callable"),
        (partial(csdctl.train, "job.yaml"), {"batch_size": 0}, "batch_size: expected 1 to"),
        (csdctl.TrainOptions, {"deadlines": csdctl.Patience("soon")}, "start_s: must be a number"),  # type: ignore[arg-type]
        (partial(csdctl.train, "job.yaml"), {"options": {"max_steps": 3}}, "options: must be an instance"),
        (csdctl.TrainOptions, {"cut": "a"}, "cut requires strategy split, received strategy auto"),
        (csdctl.TuneOptions, {"method": "fit", "step_divisor": 1.0}, "fit does not take batch_sizes"),
    ],
)
def test_errors_name_arguments(options: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        options(**given)
    assert raised.value.message.startswith(message)
    assert "--" not in raised.value.message + raised.value.remedy.partition("`")[0]


def test_options_in_errors_have_the_names_of_the_interface_that_shows_them() -> None:
    assert option("deadlines.start_s") == "deadlines.start_s"
    with naming_options(lambda name: f"<{name}>"):
        assert option("deadlines.start_s") == "<deadlines.start_s>"
