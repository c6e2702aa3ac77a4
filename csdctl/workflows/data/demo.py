"""The files of the demo: a job and its model. They also are the job of sample data without one."""

from pathlib import Path

from csdctl.documents import save_text
from csdctl.errors import InputError
from csdctl.notify import Say
from csdctl.workflows.data.sample_placement import FASHION_MNIST

JOB = """\
# What to train; every key is in docs/reference/files.md.
model: fashion_cnn.py:build
data:
  public: {path: data/public, on: host}
  private: {path: ~/private}        # on each node; never leaves it
  validation: {path: data/validation, on: host}
recipe:
  epochs: 5
  optimizer: sgd
  momentum: 0.9
  learning_rate: 0.015
  reference_batch: 128
  warmup_epochs: 1
  decay: cosine
  loss: sparse_categorical_crossentropy
  seed: 7
"""

MODEL = '''\
"""A small convolutional network for 28×28 grayscale images in 10 classes."""

import keras
from keras import layers


def build() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPool2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPool2D(2),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
'''


def write_demo_files(directory: Path) -> None:
    """Write job.yaml and fashion_cnn.py into `directory`; existing files are kept."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is not a directory", remedy="give another directory with --directory")
    for name, content in (("job.yaml", JOB), ("fashion_cnn.py", MODEL)):
        if not (directory / name).exists():
            save_text(directory / name, content)


def write_sample_job(path: Path, sample: str, say: Say) -> None:
    """Write job.yaml at `path`, and its model, for a sample data set, unless there is a job already.

    Another name is left to be an error: it was meant to be a file of the user.
    """
    if sample != FASHION_MNIST or path.name != "job.yaml" or path.exists():
        return
    write_demo_files(path.parent)
    say(f"{path} and fashion_cnn.py written: a job for the sample data")
