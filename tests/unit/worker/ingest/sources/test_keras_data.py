"""What users' Keras code gives to fit: structures, weights, tf.data, PyDataset; as real functions."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csdctl.shipping.worker_zip import pack_code
from csdctl.worker.data.arrays import open_arrays
from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.ingest.sources.source import IngestLimits
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import DatasetInfo, ImageRule, PrepareProgress, PrepareSpec
from csdctl.worker.protocol.json_codec import from_json, to_json
from csdctl.worker.protocol.run_spec import UserCode

Load = Callable[..., DatasetInfo]


@pytest.fixture
def spec(tmp_path: Path) -> PrepareSpec:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("content")
    return PrepareSpec(
        str(tmp_path / "data"), str(tmp_path / "store"), function=f"{tmp_path / 'my_data.py'}:load"
    )


@pytest.fixture
def load(spec: PrepareSpec) -> Load:
    """Prepare what a function with `body` returns; `top` stands above it in its file."""

    def run(body: str, top: str = "", **settings: Any) -> DatasetInfo:
        indented = "\n".join(f"    {line}" for line in body.splitlines())
        text = f"{top}\nimport numpy as np\n\n\ndef load(path):\n{indented}\n"
        Path(spec.function.rpartition(":")[0]).write_text(text)
        return prepare(replace(spec, **settings))

    return run


def arrays(info: DatasetInfo) -> tuple[np.ndarray, np.ndarray]:
    return open_arrays(f"{info.path}/images.npy", f"{info.path}/labels.npy")


TF = "import tensorflow as tf"
TWO = "x = {'b': np.arange(6.0).reshape(6, 1), 'a': np.arange(12).reshape(6, 2)}; y = np.arange(6) % 3\n"


class TestArrays:
    @pytest.mark.parametrize(
        ("returned", "names"),
        [("x, y", ["b", "a"]), ("tuple(x.values()), y", ["input_0", "input_1"]), ("[*x.values()], y", None)],
    )
    def test_several_inputs_are_fields(self, load: Load, returned: str, names: list[str] | None) -> None:
        info = load(f"{TWO}return {returned}")
        names = names or ["input_0", "input_1"]
        assert info.inputs == {names[0]: ("float32", (1,)), names[1]: ("int64", (2,))}
        samples, labels = arrays(info)
        assert samples[names[0]][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
        assert (labels.tolist(), info.max_label, info.max_values) == ([0, 1, 2] * 2, 2, {names[1]: 11})

    def test_inputs_stand_in_the_order_of_the_model_without_what_it_does_not_take(self, load: Load) -> None:
        text = f"{TWO}x['text'] = np.array(['a'] * 6)\nreturn x, y"
        assert list(load(text, inputs={"a": (2,), "b": (1,)}).inputs) == ["a", "b"]

    def test_name_of_the_only_input_is_that_of_the_model(self, load: Load) -> None:
        for inputs, expected in (({"": (1,)}, ""), ({"b": (1,)}, "b"), ({}, "b")):
            info = load("return {'b': np.zeros((6, 1))}, np.arange(6) % 3", inputs=inputs)
            assert list(info.inputs) == [expected]
        assert list(load("return np.zeros((6, 1)), np.zeros(6)", inputs={"b": (1,)}).inputs) == ["b"]

    def test_several_outputs_are_fields_in_the_order_of_the_model(self, load: Load) -> None:
        text = "return np.zeros((6, 2)), {'age': np.arange(6) / 2, 'kind': np.arange(6) % 2}"
        info = load(text, outputs=("kind", "age"))
        assert info.labels == {"kind": ("int32", ()), "age": ("float32", ())}
        assert (info.max_labels, info.max_label) == ({"kind": 1}, -1)
        assert arrays(info)[1]["age"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
        pair = load("return np.zeros((6, 2)), (np.zeros(6), np.zeros((6, 3)))", outputs=("kind", "age"))
        assert list(pair.labels) == ["output_0", "output_1"]

    def test_weights_are_the_last_field(self, load: Load) -> None:
        info = load("return np.zeros((6, 2)), np.arange(6) % 2, np.arange(6)[:, None] / 4")
        assert info.labels == {"label": ("int32", ()), "sample_weight": ("float32", ())}
        assert arrays(info)[1]["sample_weight"].tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25]
        text = "return np.zeros((6, 2)), {'a': np.zeros(6), 'b': np.zeros(6)}, np.ones(6)"
        assert list(load(text).labels) == ["a", "b", "sample_weight"]

    @pytest.mark.parametrize(
        "returned",
        [
            "np.zeros((6, 2))",
            "{'a': np.zeros((6, 2))}",
            "tf.zeros((6, 2))",
            "tf.data.Dataset.from_tensor_slices(np.zeros((6, 2)))",
            "tf.data.Dataset.from_tensor_slices(np.zeros((6, 2))).batch(4)",
            "tf.data.Dataset.from_tensor_slices({'a': np.zeros((6, 2))}).batch(4)",
            "iter([np.zeros(2)] * 6)",
            "iter([{'a': np.zeros(2)}] * 6)",
        ],
    )
    def test_samples_alone_have_labels_without_values(self, load: Load, returned: str) -> None:
        info = load(f"return {returned}", TF, inputs={"": (2,)})
        assert (info.num_samples, info.sample_shape, info.label_shape) == (6, (2,), (0,))
        assert arrays(info)[1].shape == (6, 0)

    def test_tensors_ragged_and_sparse_ones_too(self, load: Load) -> None:
        text = (
            "x = {'r': tf.ragged.constant([[1, 2, 3], [4]]), 's': tf.sparse.from_dense([[0, 5.0], [6, 0]])}\n"
            "return x, tf.constant([0, 1])"
        )
        info = load(text, TF)
        samples, _ = arrays(info)
        assert samples["r"].tolist() == [[1, 2, 3], [4, 0, 0]]
        assert samples["s"].tolist() == [[0, 5], [6, 0]]
        assert info.padded == {"r": (3,)}

    @pytest.mark.parametrize(
        ("returned", "message", "remedy"),
        [
            ("np.array(['a', 'b']), np.zeros(2)", "returned text or Python objects$", "TextVectorization"),
            (
                "{'t': np.array(['a', 'b'])}, np.zeros(2)",
                "returned text or Python objects as t$",
                "StringLook",
            ),
            ("np.array([[1], [1, 2]], object), np.zeros(2)", "text or Python objects$", "pad_sequences"),
            ("[[1], [1, 2]], np.zeros(2)", "lists of different lengths$", "pad_sequences"),
            (
                "np.zeros((2, 1)), np.zeros(2), np.ones((2, 5))",
                "not one number for each sample",
                "shape (n,)",
            ),
            ("np.zeros((2, 1)), np.zeros(2), {'a': 1, 'b': 2}", "weights for each output", "weigh losses"),
            ("{'a': {'b': 1}}, np.zeros(2)", "returned nested structures", "one array"),
            ("{1: np.zeros(2)}, np.zeros(2)", "returned the name '1'", "ASCII"),
            ("{'ä': np.zeros(2)}, np.zeros(2)", "returned the name 'ä'", "ASCII"),
            (
                "np.zeros(2), {'sample_weight': np.zeros(2), 'b': np.ones(2)}",
                "an output with the name",
                "ren",
            ),
            ("np.zeros(2, complex), np.zeros(2)", "returned values of type complex128", "numbers"),
            ("{'a': np.zeros(2), 'b': np.zeros(3)}, np.zeros(2)", r"lengths: a \(2,\), b \(3,\)", "expected"),
            (
                "(np.zeros((6, 1)), np.zeros(6)), (np.zeros((2, 1)), np.zeros(2))",
                r"different lengths, as \(train, test\) of load_data\(\) has",
                "a function for each",
            ),
            ("np.zeros(2),", "returned 1 values", "expected"),
        ],
    )
    def test_anything_else_is_refused_with_a_remedy(
        self, load: Load, returned: str, message: str, remedy: str
    ) -> None:
        with pytest.raises(WorkerError, match=f"the function load .*{message}") as raised:
            load(f"return {returned}")
        assert remedy in raised.value.remedy
        assert raised.value.exit_code == 2

    def test_more_inputs_than_a_header_can_have_are_refused(self, load: Load) -> None:
        with pytest.raises(WorkerError, match="too many inputs or outputs: 2,000"):
            load("return {f'a_longer_name_{n}': np.zeros(2) for n in range(2000)}, np.zeros(2)")


SLICES = "x = np.arange(40, dtype=np.float32).reshape(20, 2); y = np.arange(20) % 3\n"


class TestDatasets:
    @pytest.mark.parametrize(
        "calls", ["", ".batch(8)", ".batch(5, drop_remainder=True)", ".batch(8).cache()"]
    )
    def test_batched_or_not_gives_the_same(self, load: Load, calls: str) -> None:
        info = load(f"{SLICES}return tf.data.Dataset.from_tensor_slices((x, y)){calls}", TF)
        samples, labels = arrays(info)
        assert np.array_equal(samples, np.arange(40, dtype=np.float32).reshape(20, 2))
        assert labels.tolist() == [n % 3 for n in range(20)]
        assert (info.dtype, info.label_dtype, info.num_samples) == ("float32", "int32", 20)

    @pytest.mark.parametrize("calls", ["", ".batch(8)"])
    def test_columns_of_a_table_as_named_inputs(self, load: Load, calls: str) -> None:
        text = f"{TWO}return tf.data.Dataset.from_tensor_slices((dict(b=x['b'][:, 0]), y)){calls}"
        info = load(text, TF, inputs={"b": (1,)})
        assert info.inputs == {"b": ("float32", ())}
        assert arrays(info)[0]["b"].tolist() == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize(("calls", "shape"), [("", (3,)), (".batch(2, drop_remainder=True)", (3,))])
    def test_as_many_labels_as_values_are_no_batch(
        self, load: Load, calls: str, shape: tuple[int, ...]
    ) -> None:
        text = f"return tf.data.Dataset.from_tensor_slices((np.zeros((6, 3)), np.eye(6)[:, :3])){calls}"
        info = load(text, TF, inputs={"": (3,)})
        assert (info.num_samples, info.sample_shape, info.label_shape) == (6, shape, (3,))

    def test_inputs_outputs_and_weights(self, load: Load) -> None:
        text = (
            "x = {'a': np.zeros((6, 2)), 'b': np.zeros((6, 3), np.int64)}\n"
            "y = {'u': np.arange(6) % 2, 'v': np.ones((6, 4))}\n"
            "return tf.data.Dataset.from_tensor_slices((x, y, np.ones(6))).batch(4)"
        )
        info = load(text, TF, outputs=("v", "u"))
        assert info.inputs == {"a": ("float32", (2,)), "b": ("int64", (3,))}
        assert list(info.labels) == ["v", "u", "sample_weight"]

    @pytest.mark.parametrize(
        "dataset",
        [
            "tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1], [2, 3, 4], [5, 6]]), [0, 1, 2]))",
            "tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1], [2, 3, 4], [5, 6]]), [0, 1, 2]))"
            ".batch(2)",
            "tf.data.Dataset.from_generator(lambda: iter([([1], 0), ([2, 3, 4], 1), ([5, 6], 2)]), "
            "output_signature=(tf.TensorSpec((None,), tf.int32), tf.TensorSpec((), tf.int32)))",
            "tf.data.Dataset.from_generator(lambda: iter([([1], 0), ([2, 3, 4], 1), ([5, 6], 2)]), "
            "output_signature=(tf.TensorSpec((None,), tf.int32), tf.TensorSpec((), tf.int32)))"
            ".padded_batch(1)",
        ],
        ids=["ragged", "ragged batches", "lists", "padded batches"],
    )
    def test_sequences_are_padded_to_the_longest_or_to_the_model(self, load: Load, dataset: str) -> None:
        for inputs, length in (({}, 3), ({"": (0,)}, 3), ({"": (5,)}, 5)):
            info = load(f"return {dataset}", TF, inputs=inputs)
            expected = [[1, 0, 0], [2, 3, 4], [5, 6, 0]]
            assert arrays(info)[0][:, :3].tolist() == expected
            assert (info.sample_shape, info.padded) == ((length,), {"samples": (length,)})
        with pytest.raises(
            WorkerError, match=r"yields samples of shape \(3,\), longer than \(2,\)"
        ) as raised:
            load(f"return {dataset}", TF, inputs={"": (2,)})
        assert "padded_batch" in raised.value.remedy

    def test_pictures_of_any_size_are_fitted(self, load: Load) -> None:
        text = (
            "sizes = tf.data.Dataset.range(3, 7)\n"
            "return sizes.map(lambda n: (tf.cast(tf.fill((n, 2 * n, 3), 9), tf.uint8), n))"
        )
        info = load(text, TF, inputs={"": (4, 4, 3)}, picture=ImageRule((4, 4, 3)))
        assert (arrays(info)[0].shape, np.unique(arrays(info)[0]).tolist()) == ((4, 4, 4, 3), [9])

    def test_sequence_labels_and_masks_of_pixels(self, load: Load) -> None:
        text = "x, y = np.zeros((6, 4, 4, 3)), np.full((6, 4, 4, 1), 2)\n"
        text += "return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)"
        info = load(text, TF, inputs={"": (4, 4, 3)})
        assert (info.sample_shape, info.label_shape, info.max_label) == ((4, 4, 3), (4, 4, 1), 2)

    def test_shuffled_data_is_the_same_every_time(self, load: Load, spec: PrepareSpec) -> None:
        text = f"{SLICES}return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(20).batch(8)"
        orders = []
        for number in range(2):
            info = load(text, TF, store=f"{spec.store}-{number}")
            orders.append(arrays(info)[1].tolist())
        assert orders[0] == orders[1]

    @pytest.mark.parametrize("calls", ["", ".batch(16)"])
    def test_interrupted_call_resumes(self, load: Load, spec: PrepareSpec, calls: str) -> None:
        whole = arrays(load(f"{SLICES}return tf.data.Dataset.from_tensor_slices((x, y)){calls}", TF))
        stopping = replace(spec, store=f"{spec.store}-2")
        limits = IngestLimits(block_samples=4, sync_interval_s=0)

        def stop(progress: PrepareProgress) -> None:
            if progress.num_done >= 4:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            prepare(stopping, limits=limits, on_progress=stop)
        seen: list[int] = []
        again = arrays(prepare(stopping, on_progress=lambda progress: seen.append(progress.num_done)))
        assert seen[0] >= 4
        assert all(np.array_equal(*pair) for pair in zip(whole, again, strict=True))

    @pytest.mark.parametrize(
        ("dataset", "message", "remedy"),
        [
            (".from_tensor_slices((x, y)).repeat()", "without an end", "repeat()"),
            (
                ".from_tensor_slices((x, y, y, y))",
                r"elements are not samples or \(samples, labels\)",
                "map()",
            ),
            (".from_tensor_slices((['a', 'b'], [0, 1]))", "text or Python objects", "TextVectorization"),
            (
                ".from_generator(lambda: iter([([1], 0)]), output_types=(tf.int32, tf.int32))",
                "without a known rank",
                "ensure_shape",
            ),
            (
                ".from_tensor_slices((x, y)).map(lambda a, b: (tf.debugging.check_numerics(a / 0, ''), b))",
                "load fails: InvalidArgumentError",
                "fix",
            ),
        ],
    )
    def test_what_cannot_be_used_is_refused(
        self, load: Load, dataset: str, message: str, remedy: str
    ) -> None:
        with pytest.raises(WorkerError, match=f"the function .*{message}") as raised:
            load(f"{SLICES}return tf.data.Dataset{dataset}", TF)
        assert remedy in raised.value.remedy

    def test_several_data_sets_are_refused(self, load: Load) -> None:
        with pytest.raises(WorkerError, match="returned several data sets"):
            load("a = tf.data.Dataset.from_tensor_slices(([1.0], [0])); return a, a", TF)


BATCHES = """
import keras


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, number):
        import numpy as np
        size = number + 2
        return {"a": np.full((size, 1), number), "b": np.ones((size, size))}, np.full(size, number)
"""


class TestPyDataset:
    def test_batches_are_read_in_order(self, load: Load) -> None:
        top = BATCHES.replace("LENGTH", "3")
        info = load("return Batches()", top, inputs={"a": (1,)})
        assert arrays(info)[1].tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
        info = load("return Batches()", top, inputs={"a": (1,), "b": (0,)})
        assert info.padded == {"b": (4,)}
        assert arrays(info)[0]["b"][0].tolist() == [1, 1, 0, 0]

    def test_without_an_end_it_is_refused(self, load: Load) -> None:
        with pytest.raises(WorkerError, match="a PyDataset without an end"):
            load("Batches.num_batches = None; return Batches()", BATCHES)


class TestIterators:
    def test_samples_with_several_inputs_and_weights(self, load: Load) -> None:
        text = "for n in range(5):\n    yield {'a': [n, 1.5], 'b': n}, n % 2, 0.5"
        info = load(text)
        assert info.inputs == {"a": ("float32", (2,)), "b": ("int64", ())}
        assert info.labels == {"label": ("int32", ()), "sample_weight": ("float32", ())}
        assert arrays(info)[0]["a"][3].tolist() == [3, 1.5]

    def test_time_series_and_masks_keep_their_shape(self, load: Load) -> None:
        for shape in ((100, 1), (7, 3)):
            info = load(f"return iter([(np.zeros({shape}, np.uint8), np.zeros({shape}))] * 3)")
            assert (info.sample_shape, info.label_shape) == (shape, shape)


class TestOwnCode:
    def test_modules_of_the_job_are_importable_and_change_the_fingerprint(
        self, load: Load, tmp_path: Path
    ) -> None:
        (tmp_path / "own_helper_a.py").write_text("from own_helper_b import COUNT\n")
        (tmp_path / "own_helper_b.py").write_text("COUNT = 4\n")
        packed = pack_code([tmp_path / "own_helper_a.py", tmp_path / "own_helper_b.py"])
        (tmp_path / "code.zip").write_bytes(packed)
        text = "return np.zeros((COUNT, 2)), np.zeros(COUNT)"
        with pytest.raises(WorkerError, match="ModuleNotFoundError") as raised:
            load(text, "from own_helper_a import COUNT")
        assert "`code` of job.yaml" in raised.value.remedy
        code = UserCode(str(tmp_path / "code.zip"), ())
        assert load(text, "from own_helper_a import COUNT", code=code).num_samples == 4

    def test_changed_code_is_refused(self, load: Load, tmp_path: Path) -> None:
        archive = tmp_path / f"{'0' * 64}.zip"
        archive.write_bytes(pack_code([]))
        with pytest.raises(WorkerError, match="is not what csdctl sent"):
            load("return np.zeros((2, 2)), np.zeros(2)", code=UserCode(str(archive), ()))

    def test_dataclasses_with_written_types_work(self, load: Load) -> None:
        top = "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        top += "@dataclass\nclass A:\n    n: int"
        assert load("return np.zeros((A(3).n, 2)), np.zeros(3)", top).num_samples == 3


@pytest.mark.parametrize("top", [TF, "import keras", "from keras import ops\nimport helper_of_nothing"])
def test_worker_sets_threads_before_the_users_tensorflow_starts(spec: PrepareSpec, top: str) -> None:
    """Pictures are decoded with TensorFlow, after the function has started it."""
    top = top.replace("import helper_of_nothing", "import tensorflow as tf; tf.zeros((2, 2))")
    text = (
        f"import numpy as np\n{top}\n\n\ndef load(path):\n    import tensorflow as tf; tf.zeros((2, 2)) + 1\n"
    )
    text += "    return iter([(np.zeros((5, 5, 3), np.uint8), 1)] * 4)\n"
    Path(spec.function.rpartition(":")[0]).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "csdctl.worker", "prepare"],
        input=to_json(replace(spec, picture=ImageRule((4, 4, 3)))) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = from_json(DatasetInfo, done.stdout.splitlines()[-1].removeprefix("@csdctl-result "))
    assert (answer.num_samples, answer.sample_shape) == (4, (4, 4, 3))
