"""The job of sample data in a directory without one."""

from pathlib import Path

from csdctl.job.model import load_job
from csdctl.workflows.data.demo import write_sample_job


def test_sample_without_a_job_gets_one(tmp_path: Path) -> None:
    said: list[str] = []
    write_sample_job(tmp_path / "job.yaml", "fashion-mnist", said.append)
    assert load_job(tmp_path / "job.yaml").validation_path == tmp_path / "data/validation"
    assert said == [f"{tmp_path / 'job.yaml'} and fashion_cnn.py written: a job for the sample data"]


def test_job_that_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: mine.py:build\n")
    write_sample_job(tmp_path / "job.yaml", "fashion-mnist", lambda text: None)
    assert (tmp_path / "job.yaml").read_text() == "model: mine.py:build\n"
    assert not (tmp_path / "fashion_cnn.py").exists()


def test_mistyped_name_of_a_job_does_not_become_one(tmp_path: Path) -> None:
    write_sample_job(tmp_path / "jbo.yaml", "fashion-mnist", lambda text: None)
    write_sample_job(tmp_path / "job.yaml", "openclipart", lambda text: None)
    assert list(tmp_path.iterdir()) == []
