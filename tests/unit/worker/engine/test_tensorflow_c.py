"""The contract of TensorFlow's C API, as csdctl uses it: types, memory, errors, threads."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from csdctl.worker.engine.tensorflow_c import (
    BFLOAT16,
    TYPES,
    FunctionInfo,
    GraphSession,
    Library,
    TensorFlowError,
    load_library,
)
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.run_spec import Runtime

IDENTITY = FunctionInfo(("x:0",), ("y:0",))
NUM_STEPS = 10_000


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library()


def doubling(dtype: tf.DType, shape: list[int | None] | None = None) -> GraphSession:
    """y = x + x, or x where it cannot be added."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(dtype, shape, name="x")
        if dtype == tf.bool:
            tf.math.logical_not(x, name="y")
        else:
            tf.add(x, x, name="y")
    return GraphSession(graph.as_graph_def().SerializeToString(), Runtime())


@pytest.mark.parametrize("name", TYPES)
def test_every_type_goes_in_and_comes_out(name: str) -> None:
    values = np.arange(12).reshape(3, 4)
    if name == "bfloat16":
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        (found,) = doubling(tf.bfloat16).find("double", IDENTITY)(bits.view(BFLOAT16)).arrays()
        assert found.dtype == BFLOAT16
        wide = (found["bfloat16"].astype(np.uint32) << 16).view(np.float32)
        assert wide.tolist() == (2 * values).tolist()
        return
    array = values.astype(name)
    (found,) = doubling(tf.as_dtype(name)).find("double", IDENTITY)(array).arrays()
    assert found.dtype == name
    assert found.tolist() == (~array if name == "bool" else array + array).tolist()


def test_arrays_of_any_shape_and_order_in_memory() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    double = doubling(tf.float32).find("double", IDENTITY)
    shaped = [np.ones(shape, np.float32) for shape in ((), (0,), (0, 5), (1,), (2, 3, 4), (1,) * 7)]
    for value in (
        *shaped,
        array.T,
        array[::2],
        array[:, ::-1],
        np.asfortranarray(array),
        array.astype(">f4"),
    ):
        (found,) = double(value).arrays()
        assert found.shape == value.shape
        assert found.tolist() == (value + value).tolist()


def same(device: str = "cpu") -> GraphSession:
    """y = x."""
    graph = tf.Graph()
    with graph.as_default():
        tf.identity(tf.compat.v1.placeholder(tf.float32, [None], name="x"), name="y")
    return GraphSession(graph.as_graph_def().SerializeToString(), Runtime(device=device))


def test_large_tensor_is_not_copied(library: Library) -> None:
    memory = np.zeros((1 << 20) + 16, np.float32)
    aligned = memory[(-memory.ctypes.data % 64) // 4 :][: 1 << 20]
    result = same().find("same", IDENTITY)(aligned).array(0)
    assert result.ctypes.data == aligned.ctypes.data


def test_inputs_and_results_live_as_long_as_arrays_that_share_their_memory() -> None:
    double, session = doubling(tf.float32).find("double", IDENTITY), same()
    keep, of_others = session.find("same", IDENTITY), {*session.library._kept}
    inputs = [np.full(1 << 16, number, np.float32) for number in range(20)]
    arrays = [(keep(array).array(0), double(array).array(0)) for array in inputs]
    del inputs
    gc.collect()
    for number, (kept, doubled) in enumerate(arrays):
        assert (kept == number).all()
        assert (doubled == 2 * number).all()
    with pytest.raises(ValueError, match="read-only"):
        arrays[0][0][0] = 1
    del arrays, kept, doubled
    gc.collect()
    assert {*session.library._kept} <= of_others


@pytest.mark.parametrize("size", [0, 22, 23, 1 << 20])
def test_bytes_go_in_and_come_out(library: Library, size: int) -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf.strings.join([tf.compat.v1.placeholder(tf.string, [], name="x"), "."], name="y")
    join = GraphSession(graph.as_graph_def().SerializeToString(), Runtime(), in_caller=True).find(
        "y", IDENTITY
    )
    content = os.urandom(size)
    assert join(content).string(0) == content + b"."
    assert not library._kept


def test_errors_have_the_message_of_tensorflow() -> None:
    definition = tf.compat.v1.GraphDef()
    definition.node.add(name="x", op="Nothing")
    with pytest.raises(TensorFlowError, match="Op type not registered 'Nothing'"):
        GraphSession(definition.SerializeToString(), Runtime())
    with pytest.raises(TensorFlowError):
        GraphSession(b"no graph", Runtime())
    session = doubling(tf.float32, [2])
    with pytest.raises(WorkerError, match="has no operation z"):
        session.find("double", FunctionInfo(("x:0",), ("z:0",)))
    double = session.find("double", IDENTITY)
    with pytest.raises(TensorFlowError, match="to be float but int32 is provided"):
        double(np.zeros(2, np.int32))
    assert double(np.ones(2, np.float32)).array(0).tolist() == [2, 2]


def test_nothing_is_left_of_many_steps() -> None:
    double = doubling(tf.float32).find("double", IDENTITY)
    state = np.ones(1 << 12, np.float32)

    def step() -> None:
        double(state).array(0)

    for _ in range(100):
        step()
    before = resident_bytes()
    for _ in range(NUM_STEPS):
        step()
    assert resident_bytes() - before < NUM_STEPS * state.nbytes / 100
    assert not load_library()._kept


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from csdctl.worker.engine.tensorflow_c import FunctionInfo, GraphSession
from csdctl.worker.protocol.run_spec import Runtime
before = len(list(Path("/proc/self/task").iterdir()))
session = GraphSession(Path(sys.argv[1]).read_bytes(), Runtime(threads=int(sys.argv[2])))
multiply = session.find("multiply", FunctionInfo(("x:0",), ("y:0",)))
multiply(np.ones((512, 512), np.float32))
print(len(list(Path("/proc/self/task").iterdir())) - before, "tensorflow" in sys.modules)
"""


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_are_those_of_the_plan(tmp_path: Path, threads: int) -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, None], name="x")
        tf.matmul(x, x, name="y")
    (tmp_path / "graph.pb").write_bytes(graph.as_graph_def().SerializeToString())
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "graph.pb"), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    started, is_imported = done.stdout.split()
    assert is_imported == "False"
    assert int(started) <= threads + 3


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(WorkerError, match="TensorFlow's libraries are not installed"):
        Library()


def test_missing_gpu_is_an_error_where_the_fleet_file_asks_for_one() -> None:
    assert same("auto").find("y", IDENTITY)(np.ones(2, np.float32))
    with pytest.raises(WorkerError, match="TensorFlow sees no GPU"):
        same("gpu")
