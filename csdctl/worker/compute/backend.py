"""TensorFlow and Keras, loaded once, quietly, with the threads that a rank may use."""

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from csdctl.worker.process.errors import JobError, WorkerError, describe
from csdctl.worker.protocol.run_spec import CPU, GPU, Runtime

DEFAULT = Runtime()
STATE = "CPU:0"
"""The device that holds what training changes, and computes it from sums. A GPU rounds differently, and all
ranks need the same bits (docs/decisions/0047)."""


class _Module:
    """A module that is imported when something of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        with _without_keras_file():
            return getattr(import_module(self._name), name)


tf: Any = _Module("tensorflow")
keras: Any = _Module("keras")
"""For modules that are imported before `load_backend` is called, or in processes that need neither."""


def has_libraries_only() -> bool:
    """Return whether TensorFlow's libraries are here without its modules, as `csdctl provision` does it."""
    package = find_spec("tensorflow")
    return package is not None and package.origin is None


def load_backend(runtime: Runtime = DEFAULT) -> tuple[Any, Any]:
    """Import TensorFlow and Keras, and return both modules.

    Must be called before anything else in the process imports them. Raises WorkerError where only
    TensorFlow's libraries are, and without the GPU that `runtime` requires.
    """
    if has_libraries_only():
        raise WorkerError(
            "this machine has TensorFlow's libraries, but not Python's TensorFlow and Keras; a step that "
            "cannot be compiled needs them, and so does your code that imports them",
            remedy="install them: `csdctl provision --with-keras`",
        )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if runtime.device == CPU:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("OMP_NUM_THREADS", str(runtime.threads))
    if not runtime.onednn:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    # An import makes 300,000 objects that all stay. To go through them again and again takes a fifth of the
    # CPU time of loading TensorFlow. Keras would import drawing packages where they are installed.
    gc.disable()
    hidden = [name for name in ("matplotlib", "IPython") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # as if they were not installed
    with _without_keras_file():
        tensorflow, keras_module = map(import_module, ("tensorflow", "keras"))
    for name in hidden:
        del sys.modules[name]
    gc.freeze()
    gc.enable()
    tensorflow.config.threading.set_intra_op_parallelism_threads(runtime.threads)
    tensorflow.config.threading.set_inter_op_parallelism_threads(runtime.inter_threads)
    if runtime.device != CPU:
        _use_gpu(tensorflow, is_required=runtime.device == GPU)
    return tensorflow, keras_module


def _use_gpu(tf: Any, *, is_required: bool) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus and is_required:
        built = "with" if tf.test.is_built_with_cuda() else "without"
        raise WorkerError(
            f"TensorFlow {tf.__version__}, built {built} CUDA, sees no GPU; the fleet file has `device: gpu`",
            "check the driver there (`nvidia-smi` lists the GPU), install tensorflow[and-cuda] in place of "
            "tensorflow-cpu; or set `device: auto`",
        )
    if gpus:
        tf.config.set_visible_devices(gpus[:1], "GPU")
        tf.config.experimental.set_memory_growth(gpus[0], True)
        # TensorFloat-32 has 10 bits of precision.
        tf.config.experimental.enable_tensor_float_32_execution(False)


def keras_settings() -> dict[str, Any]:
    """Return what a model computes with beside its layers, as `keras.config` has it in this process."""
    config = keras.config
    names = ("floatx", "epsilon", "image_data_format")
    return {name: getattr(config, name)() for name in names}


def apply_settings(floatx: str, epsilon: float, image_data_format: str) -> None:
    """Let this process compute with these settings: all ranks have the host's. Raises ValueError."""
    keras.config.set_floatx(floatx)
    keras.config.set_epsilon(float(epsilon))
    keras.config.set_image_data_format(image_data_format)


def load_settings(directory: Path) -> None:
    """Apply the keras.json in `directory`, or else this user's. Raises JobError if Keras refuses it."""
    path, defaults = directory / "keras.json", keras_settings()
    path = path if path.exists() else _keras_home() / path.name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        apply_settings(**{name: content.get(name, default) for name, default in defaults.items()})
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError, TypeError, AssertionError) as error:
        apply_settings(**defaults)
        raise JobError(f"{path} cannot be used: {describe(error)}", "correct or remove it") from None


def _keras_home() -> Path:
    return Path(os.environ.get("KERAS_HOME") or "~/.keras").expanduser()


@contextlib.contextmanager
def _without_keras_file() -> Iterator[None]:
    """Let Keras be imported as if there were no keras.json. What it downloads stays where the user has it."""
    if "keras.src.backend.config" in sys.modules:
        yield
        return
    home, before = _keras_home(), os.environ.get("KERAS_HOME")
    os.environ["KERAS_HOME"] = os.devnull  # no directory: it reads and writes nothing
    try:
        yield
    finally:
        del os.environ["KERAS_HOME"]
        if before is not None:
            os.environ["KERAS_HOME"] = before
    if config := sys.modules.get("keras.src.backend.config"):
        config._KERAS_DIR = str(home)  # type: ignore[attr-defined]
