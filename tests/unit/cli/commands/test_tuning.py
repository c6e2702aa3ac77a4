"""`csdctl tune` with invalid arguments."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from csdctl.cli.app import app
from csdctl.errors import ExitCode, InputError
from csdctl.tuning.stannis import TuningError
from csdctl.workflows.tune.tune import STANNIS, TuneOptions


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: keras.applications:MobileNetV2\n"
        "data: {public: {path: data}}\n"
        "recipe: {epochs: 3, learning_rate: 0.1}\n"
    )
    return path


def refused(*arguments: str) -> InputError:
    """The error of `csdctl tune` with `arguments`."""
    error = CliRunner().invoke(app, ["tune", *arguments]).exception
    assert isinstance(error, InputError)
    assert error.exit_code == ExitCode.BAD_INPUT
    return error


def test_algorithm_1_takes_no_limits(job: Path) -> None:
    error = refused(str(job), "--method", "stannis", "--max-global-batch", "512")
    assert "stannis takes no limits, received max_global_batch" in error.message


@pytest.mark.parametrize("sizes", ["", "4,x", "0,4"])
def test_invalid_list_of_batch_sizes_is_bad_input(job: Path, sizes: str) -> None:
    assert f"invalid --batch-sizes {sizes!r}" in refused(str(job), "--batch-sizes", sizes).message


def test_invalid_arguments_of_algorithm_1_name_the_option() -> None:
    with pytest.raises(TuningError, match="C must be a positive number") as raised:
        TuneOptions(STANNIS, step_divisor=0.0)
    assert raised.value.remedy == "change --step-divisor"
