"""The user's own function: what it may return, as users give it to Keras' fit, and that nothing leaks."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from csdctl.shipping.store import pack_code
from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo, ImageRule, PrepareSpec
from csdctl.worker.protocol.json_codec import to_json
from csdctl.worker.protocol.run_spec import UserCode
from tests.unit.worker.ingest.prepared_data import (
    SECRET,
    InterruptionError,
    arrays_of,
    refusal,
    spec_below,
    stop_at,
)

Load = Callable[..., DatasetInfo]
RUN = [sys.executable, "-m", "csdctl.worker", "prepare"]


@pytest.fixture
def spec(tmp_path: Path) -> PrepareSpec:
    spec = spec_below(tmp_path, function=f"{tmp_path / 'my_data.py'}:load")
    Path(spec.source, f"{SECRET}.bin").write_bytes(bytes(range(48)) * 5)
    return spec


def write(spec: PrepareSpec, body: str, top: str = "") -> PrepareSpec:
    """Write the function; `top` stands above it in its file."""
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    text = f"{top}\nimport pathlib\nimport numpy as np\n\n\ndef load(path):\n{indented}\n"
    Path(spec.function.rpartition(":")[0]).write_text(text)
    return spec


@pytest.fixture
def load(spec: PrepareSpec) -> Load:
    """Prepare what a function returns."""
    return lambda body, top="", **settings: prepare(replace(write(spec, body, top), **settings))


READ = "raw = np.frombuffer(next(pathlib.Path(path).iterdir()).read_bytes(), np.uint8).reshape(5, 4, 4, 3); "
PICTURE = ImageRule((4, 4, 3))
TF = "import tensorflow as tf"
TWO = "x = {'b': np.arange(6.0).reshape(6, 1), 'a': np.arange(12).reshape(6, 2)}; y = np.arange(6) % 3\n"
SLICES = "x = np.arange(40, dtype=np.float32).reshape(20, 2); y = np.arange(20) % 3\n"
DATASET = "tf.data.Dataset.from_tensor_slices"


@pytest.mark.parametrize(
    "statement",
    [
        "return raw, np.arange(5)",
        "return [(image, label) for label, image in enumerate(raw)]",
        "yield from zip(raw, range(5))",
    ],
)
def test_arrays_and_iterators_are_accepted(load: Load, statement: str) -> None:
    images, labels = arrays_of(load(READ + statement, picture=PICTURE))
    assert images.shape == (5, 4, 4, 3)
    assert images[1, 0, 0].tolist() == [0, 1, 2]
    assert labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("return ((np.full((n, 2 * n), 9, np.uint8), n) for n in range(1, 9))", {}),
        (
            "return tf.data.Dataset.range(3, 7).map("
            "lambda n: (tf.cast(tf.fill((n, 2 * n, 3), 9), tf.uint8), n))",
            {"": (4, 4, 3)},
        ),
    ],
)
def test_pictures_of_any_size_are_fitted(load: Load, body: str, inputs: dict[str, Any]) -> None:
    images, _ = arrays_of(load(body, TF, inputs=inputs, picture=PICTURE))
    assert images.shape[1:] == (4, 4, 3)
    assert np.unique(images).tolist() == [9]


def test_other_samples_of_an_iterator_keep_shape_and_type(load: Load) -> None:
    info = load("return ((np.full(3, n, np.float32), np.eye(2)[n % 2]) for n in range(4))", picture=PICTURE)
    assert (info.sample_shape, info.dtype, info.label_shape) == ((3,), "float32", (2,))
    for shape in ((100, 1), (7, 3)):
        info = load(f"return iter([(np.zeros({shape}, np.uint8), np.zeros({shape}))] * 3)")
        assert (info.sample_shape, info.label_shape) == (shape, shape)
    info = load("for n in range(5):\n    yield {'a': [n, 1.5], 'b': n}, n % 2, 0.5")
    assert info.inputs == {"a": ("float32", (2,)), "b": ("int64", ())}
    assert info.labels == {"label": ("int32", ()), "sample_weight": ("float32", ())}
    assert arrays_of(info)[0]["a"][3].tolist() == [3, 1.5]


class TestArrays:
    @pytest.mark.parametrize(
        ("returned", "names"), [("x, y", ["b", "a"]), ("[*x.values()], y", ["input_0", "input_1"])]
    )
    def test_several_inputs_are_fields(self, load: Load, returned: str, names: list[str]) -> None:
        info = load(f"{TWO}return {returned}")
        assert info.inputs == {names[0]: ("float32", (1,)), names[1]: ("int64", (2,))}
        samples, labels = arrays_of(info)
        assert samples[names[0]][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
        assert (labels.tolist(), info.max_label, info.max_values) == ([0, 1, 2] * 2, 2, {names[1]: 11})

    def test_inputs_are_named_and_ordered_as_those_of_the_model(self, load: Load) -> None:
        text = f"{TWO}x['text'] = np.array(['a'] * 6)\nreturn x, y"  # which the model does not take
        assert list(load(text, inputs={"a": (2,), "b": (1,)}).inputs) == ["a", "b"]
        for inputs, expected in (({"": (1,)}, ""), ({"b": (1,)}, "b"), ({}, "b")):
            info = load("return {'b': np.zeros((6, 1))}, np.arange(6) % 3", inputs=inputs)
            assert list(info.inputs) == [expected]
        assert list(load("return np.zeros((6, 1)), np.zeros(6)", inputs={"b": (1,)}).inputs) == ["b"]

    def test_several_outputs_are_fields_in_the_order_of_the_model(self, load: Load) -> None:
        text = "return np.zeros((6, 2)), {'age': np.arange(6) / 2, 'kind': np.arange(6) % 2}"
        info = load(text, outputs=("kind", "age"))
        assert info.labels == {"kind": ("int32", ()), "age": ("float32", ())}
        assert (info.max_labels, info.max_label) == ({"kind": 1}, -1)
        assert arrays_of(info)[1]["age"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
        pair = load("return np.zeros((6, 2)), (np.zeros(6), np.zeros((6, 3)))", outputs=("kind", "age"))
        assert list(pair.labels) == ["output_0", "output_1"]

    def test_weights_are_the_last_field(self, load: Load) -> None:
        info = load("return np.zeros((6, 2)), np.arange(6) % 2, np.arange(6)[:, None] / 4")
        assert info.labels == {"label": ("int32", ()), "sample_weight": ("float32", ())}
        assert arrays_of(info)[1]["sample_weight"].tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25]
        text = "return np.zeros((6, 2)), {'a': np.zeros(6), 'b': np.zeros(6)}, np.ones(6)"
        assert list(load(text).labels) == ["a", "b", "sample_weight"]

    @pytest.mark.parametrize(
        "returned",
        [
            "np.zeros((6, 2))",
            f"{DATASET}(np.zeros((6, 2)))",
            f"{DATASET}({{'a': np.zeros((6, 2))}}).batch(4)",
            "iter([{'a': np.zeros(2)}] * 6)",
        ],
    )
    def test_samples_alone_have_labels_without_values(self, load: Load, returned: str) -> None:
        info = load(f"return {returned}", TF, inputs={"": (2,)})
        assert (info.num_samples, info.sample_shape, info.label_shape) == (6, (2,), (0,))
        assert arrays_of(info)[1].shape == (6, 0)

    def test_sparse_tensors_become_dense(self, load: Load) -> None:
        info = load("return tf.sparse.from_dense([[0, 5.0], [6, 0]]), tf.constant([0, 1])", TF)
        assert arrays_of(info)[0].tolist() == [[0, 5], [6, 0]]


RAGGED = "tf.ragged.constant([[1], [2, 3, 4], [5, 6]]), [0, 1, 2]"


class TestDatasets:
    @pytest.mark.parametrize("calls", ["", ".batch(8)", ".batch(5, drop_remainder=True).cache()"])
    def test_batched_or_not_gives_the_same(self, load: Load, calls: str) -> None:
        info = load(f"{SLICES}return {DATASET}((x, y)){calls}", TF)
        samples, labels = arrays_of(info)
        assert np.array_equal(samples, np.arange(40, dtype=np.float32).reshape(20, 2))
        assert labels.tolist() == [n % 3 for n in range(20)]
        assert (info.dtype, info.label_dtype, info.num_samples) == ("float32", "int32", 20)

    @pytest.mark.parametrize("calls", ["", ".batch(8)", ".batch(2, drop_remainder=True)"])
    def test_columns_as_named_inputs_and_as_many_labels_as_values(self, load: Load, calls: str) -> None:
        """Which are no batch."""
        info = load(f"{TWO}return {DATASET}((dict(b=x['b'][:, 0]), y)){calls}", TF, inputs={"b": (1,)})
        assert info.inputs == {"b": ("float32", ())}
        assert arrays_of(info)[0]["b"].tolist() == [0, 1, 2, 3, 4, 5]
        text = f"return {DATASET}((np.zeros((6, 3)), np.eye(6)[:, :3])){calls}"
        info = load(text, TF, inputs={"": (3,)})
        assert (info.num_samples, info.sample_shape, info.label_shape) == (6, (3,), (3,))

    @pytest.mark.parametrize(
        "returned",
        [f"{DATASET}((x, y)).shuffle(20).batch(8)", "np.random.rand(9, 1), np.random.permutation(9)"],
    )
    def test_random_numbers_are_always_the_same(self, load: Load, spec: PrepareSpec, returned: str) -> None:
        text = f"{SLICES}return {returned}"
        drawn = [arrays_of(load(text, TF, store=f"{spec.store}-{n}"))[1].tolist() for n in range(2)]
        assert drawn[0] == drawn[1]

    @pytest.mark.parametrize("calls", ["", ".batch(16)"])
    def test_interrupted_call_resumes(
        self, load: Load, spec: PrepareSpec, calls: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("csdctl.worker.ingest.sources.source.BLOCK_SAMPLES", 4)
        monkeypatch.setattr("csdctl.worker.ingest.partial_dataset.SYNC_INTERVAL_S", 0)
        whole = arrays_of(load(f"{SLICES}return {DATASET}((x, y)){calls}", TF))
        stopping = replace(spec, store=f"{spec.store}-2")
        with pytest.raises(InterruptionError):
            prepare(stopping, on_progress=stop_at(4))
        seen: list[int] = []
        again = arrays_of(prepare(stopping, on_progress=lambda progress: seen.append(progress.num_done)))
        assert seen[0] >= 4
        assert all(np.array_equal(*pair) for pair in zip(whole, again, strict=True))


BATCHES = """
import keras


def endless():
    while True:
        yield np.zeros(3), 1


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        return np.full((number + 2, 1), number), np.full(number + 2, number)
"""


def test_batches_of_a_py_dataset_are_read_in_order(load: Load) -> None:
    info = load("return Batches()", BATCHES)
    assert arrays_of(info)[1].tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]


REFUSALS = [
    ("np.array(['a', 'b']), np.zeros(2)", "returned text or Python objects$", "TextVectorization"),
    ("[[1], [1, 2]], np.zeros(2)", "lists of different lengths$", "pad_sequences"),
    ("np.zeros((2, 1)), np.zeros(2), np.ones(())", "a single weight for all samples", "shape (n,)"),
    ("np.zeros((2, 1)), np.zeros(2), {'a': 1, 'b': 2}", "weights for each output", "weigh losses"),
    ("{'a': {'b': 1}}, np.zeros(2)", "returned nested structures", "one array"),
    ("{'ä': np.zeros(2)}, np.zeros(2)", "returned the name 'ä'", "ASCII"),
    ("{'a': np.zeros(2), 'b': np.zeros(3)}, np.zeros(2)", "2 or 3 samples but 2 labels", ""),
    (
        "(np.zeros((6, 1)), np.zeros(6)), (np.zeros((2, 1)), np.zeros(2))",
        r"different lengths, as \(train, test\) of load_data\(\) has",
        "a function for each",
    ),
    ("{f'a_longer_name_{n}': np.zeros(2) for n in range(2000)}, np.zeros(2)", "too many inputs .*2,000", ""),
    (f"{DATASET}((x, y)).repeat()", "without an end", "repeat()"),
    (
        "tf.data.Dataset.from_generator(lambda: iter([([1], 0)]), output_types=(tf.int32, tf.int32))",
        "without a known rank",
        "ensure_shape",
    ),
    (
        f"{DATASET}((x, y)).map(lambda a, b: (tf.debugging.check_numerics(a / 0, ''), b))",
        "load fails: InvalidArgumentError",
        "fix",
    ),
    ("(setattr(Batches, 'num_batches', None), Batches())[1]", "a PyDataset without an end", "__len__"),
    ("endless()", "a generator without an end: `while True`", "repeat()"),
    ("np.ma.masked_array(np.zeros((2, 1)), mask=[[0], [1]]), np.zeros(2)", "a masked array$", "filled"),
    ("np.zeros((2, 1)), np.array([1, 1 << 40])", "integers beyond ±2³¹ in labels", "float32"),
    (
        "iter([(np.zeros(3), 1)] * 7 + [(np.full(3, np.nan), 1)])",
        "infinity in samples, sample 7 ",
        "allow_nan",
    ),
    (f"{DATASET}((x, y / 0)).batch(3)", "infinity in labels, row 0 ", "allow_nan"),
    ("7", "load returned a int", ""),
    ("iter([1, 2])", r"not \(sample, label\)", ""),
    ("np.zeros((3, 4)), np.zeros(2)", "3 samples but 2 labels", ""),
    ("iter([(np.zeros(3), 1), (np.zeros(4), 1)])", "different shapes or types", "pad_sequences"),
    (f"{DATASET}(({RAGGED})).batch(2)", "returned a ragged tensor$", "to_tensor"),
    ("int(str(list(pathlib.Path(path).iterdir())))", "load fails: ValueError$", ""),
    ("exit('x')", "load fails: SystemExit$", ""),
    ("__import__('no_such_module')", "ModuleNotFoundError for no_such_module$", "install"),
    ("__import__('secret'[::-1])", "load fails: ModuleNotFoundError$", "install"),
]


@pytest.mark.parametrize(("returned", "message", "remedy"), REFUSALS)
def test_others_are_refused_without_data(spec: PrepareSpec, returned: str, message: str, remedy: str) -> None:
    spec = write(replace(spec, is_private=True), f"{SLICES}return {returned}", f"{TF}\n{BATCHES}")
    assert remedy in refusal(spec, message)


def test_iterator_without_an_end_does_not_fill_the_disk(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can know that it has none."""
    free = iter(range(1000, 0, -30))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=next(free)))
    with pytest.raises(
        WorkerError, match=r"more than the [\d,]+ samples that the function .*has yielded"
    ) as raised:
        load("return map(lambda one: one, endless())", BATCHES)
    assert "let the function end: yield each sample once" in raised.value.remedy


def test_missing_function_and_errors_of_public_data_are_complete(spec: PrepareSpec, load: Load) -> None:
    with pytest.raises(WorkerError, match="ValueError: column 3 is missing"):
        load("raise ValueError('column 3 is missing')")
    with pytest.raises(WorkerError, match="other fails: AttributeError"):
        prepare(replace(spec, function=spec.function.replace(":load", ":other")))


def test_modules_of_the_job_are_importable_if_they_are_what_was_sent(load: Load, tmp_path: Path) -> None:
    (tmp_path / "own_helper_a.py").write_text("from own_helper_b import COUNT\n")
    (tmp_path / "own_helper_b.py").write_text("COUNT = 4\n")
    (tmp_path / "code.zip").write_bytes(
        pack_code([tmp_path / "own_helper_a.py", tmp_path / "own_helper_b.py"])
    )
    call = ("return np.zeros((COUNT, 2)), np.zeros(COUNT)", "from own_helper_a import COUNT")
    with pytest.raises(WorkerError, match="ModuleNotFoundError") as raised:
        load(*call)
    assert "`code` of job.yaml" in raised.value.remedy
    assert load(*call, code=UserCode(str(tmp_path / "code.zip"), ())).num_samples == 4
    changed = (tmp_path / "code.zip").rename(tmp_path / f"{'0' * 64}.zip")
    with pytest.raises(WorkerError, match="is not what csdctl sent: expected SHA-256 0+, found"):
        load(*call, code=UserCode(str(changed), ()))


@pytest.mark.parametrize("end", ["return raw, np.arange(5)", "raise ValueError(SECRET)", "os._exit(3)"])
def test_its_output_does_not_leave_the_worker(spec: PrepareSpec, end: str) -> None:
    loud = (
        f"import os, sys, warnings; SECRET = '{SECRET}'; print(SECRET); print(SECRET, file=sys.stderr); "
        "os.write(1, SECRET.encode()); os.write(2, SECRET.encode()); os.system('ls ' + path); "
        "warnings.warn(SECRET); "
    )
    spec = write(replace(spec, is_private=True), loud + READ + end)
    done = subprocess.run(RUN, input=to_json(spec) + "\n", capture_output=True, text=True, check=False)
    assert SECRET not in done.stdout + done.stderr
    kinds = {line.split()[0] for line in done.stdout.splitlines()}
    assert kinds <= {"@csdctl-progress", "@csdctl-result", "@csdctl-error"}
    assert done.returncode == {"return": 0, "raise ": 2, "os._ex": 3}[end[:6]]
