"""A job as flat values, which include every input of its fingerprint."""

from pathlib import Path

from csdctl.job.model import Job, describe_job, load_job

PLAIN = """\
model: keras.applications:MobileNetV2
model_args: {input_shape: [64, 64, 3], weights: null}
data:
  public: {path: data}
  private: {path: /data/private}
  classes: [cat, dog]
recipe: {epochs: 3, learning_rate: 0.1, momentum: 0.9, early_stopping: {patience: 4}}
"""


def written(directory: Path, text: str) -> Job:
    (directory / "job.yaml").write_text(text)
    return load_job(directory / "job.yaml")


def test_values_have_the_names_of_the_job_file(tmp_path: Path) -> None:
    values = describe_job(written(tmp_path, PLAIN))
    assert values["model"] == "keras.applications:MobileNetV2"
    assert values["model_args.input_shape"] == [64, 64, 3]
    assert values["data.public.path"] == str(tmp_path / "data")
    assert values["data.private.path"] == "/data/private"
    assert values["data.classes"] == ["cat", "dog"]
    assert values["data.input_range"] == [0.0, 1.0]
    assert values["data.image.fit"] == "stretch"
    assert values["recipe.optimizer_args.momentum"] == 0.9
    assert values["recipe.early_stopping.patience"] == 4
    assert values["recipe.from_logits"] is False
