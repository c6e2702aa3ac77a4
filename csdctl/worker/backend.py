"""TensorFlow, loaded once, quietly, with the threads a rank may use."""

import os
import resource
from typing import Any


def load_backend(threads: int) -> tuple[Any, Any]:
    """Import TensorFlow and Keras as `load_tensorflow` does; returns both modules."""
    tf = load_tensorflow(threads)
    import keras

    return tf, keras


def load_tensorflow(threads: int) -> Any:
    """Import TensorFlow; returns the module.

    Must come before any other import of it or of Keras in the process. `threads` is the intra-op pool; one
    inter-op thread, because a rank runs one graph.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return tf


def peak_memory_bytes() -> int:
    """The largest resident size this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
