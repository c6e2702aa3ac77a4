"""What a job must allow before its model is split between nodes and host."""

from pathlib import Path

import pytest

from csdctl.errors import InputError
from csdctl.job.model import load_job
from csdctl.workflows.train.strategies import check_job

JOB = """\
model: model.py:build
data:
  public: {path: public}
  private: {path: private%s}
recipe: {epochs: 1, learning_rate: 0.1}
"""


def write_job(directory: Path, more: str) -> Path:
    (directory / "job.yaml").write_text(JOB % more)
    (directory / "model.py").write_text("def build(): ...\n")
    return directory / "job.yaml"


def test_activations_of_private_samples_leave_only_if_the_job_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sends activations and labels of private samples") as refused:
        check_job(load_job(write_job(tmp_path, "")))
    assert "activations: may-leave" in refused.value.remedy
    check_job(load_job(write_job(tmp_path, ", activations: may-leave")))


def test_noise_on_sums_does_not_go_with_activations(tmp_path: Path) -> None:
    more = ", activations: may-leave, noise: {noise_multiplier: 1.0, l2_norm_clip: 1.0, delta: 1e-5}"
    with pytest.raises(InputError, match="noise hides each sample in a sum"):
        check_job(load_job(write_job(tmp_path, more)))
