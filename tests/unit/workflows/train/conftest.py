"""A job for tests of the train workflow."""

from pathlib import Path

import pytest

from csdctl.job.model import Job, load_job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: keras.applications:MobileNetV2\ndata: {public: {path: data}}\n"
        "recipe: {epochs: 3, learning_rate: 0.1}\n"
    )
    return load_job(path)
