"""`csdctl tune` as a person meets it who gives it what it cannot use."""

import sys
from pathlib import Path

import pytest

from csdctl.cli.app import main
from csdctl.errors import ExitCode
from csdctl.tuning.stannis import TuningError
from csdctl.workflows.tune.tune import STANNIS, TuneOptions


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: keras.applications:MobileNetV2\n"
        "data: {public: {path: data}}\n"
        "recipe: {epochs: 3, learning_rate: 0.1}\n"
    )
    return path


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_step_time_that_is_none_is_wrong_input_and_no_defect(
    job: Path, seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["csdctl", "tune", str(job), "--max-step-seconds", seconds])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.BAD_INPUT
    said = " ".join(capsys.readouterr().err.split())
    assert "must be a number above 0" in said
    assert "give another --max-step-seconds, or none" in said
    assert "defect" not in said


def test_limits_are_not_for_algorithm_1(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["tune", str(job), "--method", "stannis", "--max-global-batch", "512"]
    monkeypatch.setattr(sys, "argv", ["csdctl", *asked])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.BAD_INPUT
    assert "stannis knows no limits, received max_global_batch" in capsys.readouterr().err


def test_arguments_of_algorithm_1_that_cannot_be_used_name_the_option() -> None:
    with pytest.raises(TuningError, match="C must be a positive number") as raised:
        TuneOptions(STANNIS, step_divisor=0.0)
    assert raised.value.remedy == "give another --step-divisor"
