"""The errors that a worker raises deliberately, and a description for unexpected ones."""

import traceback
from contextlib import suppress
from pathlib import Path

from csdctl.worker.protocol.limits import explain_error

KERAS_2 = {
    "{'lr'": "learning_rate",
    "np_utils": "keras.utils",
    "'fit_generator'": "fit, with the same arguments",
    "'ImageDataGenerator'": "tensorflow.keras.preprocessing.image",
    "keras.preprocessing.text": "tensorflow.keras.preprocessing.text, or keras.layers.TextVectorization",
    "keras.optimizers.legacy": "keras.optimizers",
    "module 'keras.backend'": "keras.ops",
    "keras.layers.": "keras.layers",
}
"""Names of Keras 2 as they stand in errors, and what Keras 3 has instead."""


class WorkerError(Exception):
    """The worker cannot continue. The message and the remedy are shown to the user."""

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


class JobError(WorkerError):
    """The job, its code or its data must be changed."""

    exit_code = 2


def describe(error: BaseException, file: Path | None = None) -> str:
    """Return type and first line of an error, without the stack of Keras, and which line of `file` ran."""
    while isinstance(error, ImportError) and error.__cause__:  # numpy raises a page of advice
        error = error.__cause__
    lines: list[str] = []
    with suppress(Exception):
        lines = str(error).strip().splitlines()
    if lines and lines[0] == "Graph execution error:":  # of TensorFlow: the cause stands at the end
        lines = [line for line in lines if line.strip() and "{{node" not in line][-1:]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    text += explain_error(text)
    frames = traceback.extract_tb(error.__traceback__)
    lines_of_file = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f"{text} (line {lines_of_file[-1]})" if lines_of_file else text


def find_remedy(error: BaseException) -> str:
    """Return a remedy for a name that only Keras 2 has, and for a missing module, '' for any other error."""
    for old, new in KERAS_2.items():
        if old in describe(error):
            return f"that is Keras 2; in Keras 3 write {new}"
    is_missing = isinstance(error, ModuleNotFoundError)
    return "install the module on this machine; list your own modules in `code` of job.yaml" * is_missing
