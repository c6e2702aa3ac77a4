"""TFRecord files as TensorFlow writes them."""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csdctl.worker.ingest.prepare import prepare
from csdctl.worker.ingest.sources.tfrecord import parse_example
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.datasets import ImageRule, PrepareSpec, RecordSchema
from tests.unit.worker.ingest.prepared_data import SECRET, arrays_of, refusal, spec_below
from tests.unit.worker.ingest.sources.encoded_images import colours, png, tensorflow

IMAGES = [colours(6, 6, seed=number) for number in range(5)]
RAW = RecordSchema("image", "label", (6, 6, 3))


def feature(value: Any) -> Any:
    train = tensorflow().train
    if isinstance(value, bytes):
        return train.Feature(bytes_list=train.BytesList(value=[value]))
    if isinstance(value, np.ndarray):
        return train.Feature(float_list=train.FloatList(value=value.reshape(-1)))
    return train.Feature(int64_list=train.Int64List(value=[value]))


def example(**features: Any) -> bytes:
    train = tensorflow().train
    named = {name: feature(value) for name, value in features.items()}
    return bytes(train.Example(features=train.Features(feature=named)).SerializeToString())


def write(path: Path, records: Iterable[bytes], compression: str = "") -> None:
    with tensorflow().io.TFRecordWriter(os.fsencode(path), compression) as writer:
        for record in records:
            writer.write(record)


@pytest.fixture
def spec(tmp_path: Path) -> PrepareSpec:
    return spec_below(tmp_path, picture=ImageRule((6, 6, 3)), records=RecordSchema("image", "label"))


ENCODED = [example(image=png(image), label=number) for number, image in enumerate(IMAGES)]


@pytest.mark.parametrize("compression", ["", "GZIP"])
@pytest.mark.parametrize(
    "names", ["train-00000-of-00002 train-00001-of-00002", "a\udce9.tfrecords", "a.tfrec.gz"]
)
def test_images_of_all_shards_are_in_order(
    root: Path, spec: PrepareSpec, names: str, compression: str
) -> None:
    """Whatever the name says about compression."""
    first, *others = names.split()
    write(root / first, ENCODED[:3] if others else ENCODED, compression)
    for name in others:
        write(root / name, ENCODED[3:], compression)
    images, labels = arrays_of(prepare(spec))
    assert np.array_equal(images, IMAGES)
    assert labels.tolist() == [0, 1, 2, 3, 4]
    if not others:
        assert prepare(replace(spec, source=str(root / first))).num_samples == 5


def test_plain_file_with_the_gzip_magic_is_read_as_plain(root: Path, spec: PrepareSpec) -> None:
    length = 0x088B1F  # the first bytes of a record are its length: 1f 8b 08
    trial = example(image=png(IMAGES[0]), label=1, filler=bytes(length - 1000))
    record = example(image=png(IMAGES[0]), label=1, filler=bytes(2 * length - 1000 - len(trial)))
    assert len(record) == length
    write(root / "a.tfrecord", [record])
    assert prepare(spec).num_samples == 1


def test_raw_images_are_fitted_and_numbers_unchanged(root: Path, spec: PrepareSpec, tmp_path: Path) -> None:
    write(root / "a.tfrecord", [example(image=one.tobytes(), label=1) for one in IMAGES])
    assert np.array_equal(arrays_of(prepare(replace(spec, records=RAW)))[0], IMAGES)
    smaller = replace(spec, records=RAW, picture=ImageRule((3, 3, 1)))
    assert prepare(smaller).sample_shape == (3, 3, 1)

    vectors = np.random.default_rng(0).random((4, 7)).astype(np.float32)
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "a.tfrecord", [example(image=row, label=1) for row in vectors])
    schema = RecordSchema("image", "label", (7,), "float32")
    rows = replace(spec, source=str(tmp_path / "rows"), records=schema)
    assert np.array_equal(arrays_of(prepare(rows))[0], vectors)
    with pytest.raises(WorkerError, match="has floats in image, not uint8"):
        prepare(replace(rows, records=replace(schema, dtype="uint8")))


def test_label_may_be_a_class_name(root: Path, spec: PrepareSpec) -> None:
    records = [example(image=png(IMAGES[0]), label=name) for name in (b"dog", b"cat", SECRET.encode())]
    write(root / "a.tfrecord", records)
    info = prepare(replace(spec, classes=("cat", "dog")))
    assert arrays_of(info)[1].tolist() == [1, 0]
    assert (info.num_skipped, info.class_counts) == ({"no_label": 1}, {"cat": 1, "dog": 1})


def test_label_may_be_a_float(root: Path, spec: PrepareSpec) -> None:
    write(root / "a.tfrecord", [example(image=png(IMAGES[0]), label=np.array([0.5 + n])) for n in range(3)])
    info = prepare(spec)
    assert (info.label_dtype, arrays_of(info)[1].tolist()) == ("float32", [0.5, 1.5, 2.5])


def test_texts_as_labels_need_classes(root: Path, spec: PrepareSpec) -> None:
    write(root / "a.tfrecord", [example(image=png(IMAGES[0]), label=SECRET.encode())])
    assert refusal(spec, "no usable samples: 1 no label$").startswith("if its labels are texts, list the")


def test_nan_is_named_by_file_and_record(root: Path, spec: PrepareSpec) -> None:
    rows = [np.zeros(3), np.array([0, np.inf, 0])]
    for number in (1, 2):
        write(root / f"{number}.tfrecord", [example(image=row, label=1) for row in rows[:number]])
    spec = replace(spec, records=RecordSchema("image", "label", (3,), "float32"))
    refusal(spec, "NaN or infinity in samples, 2.tfrecord, record 1 ")
    refusal(replace(spec, is_private=True), "NaN or infinity in samples, record 1 ")


def test_unusable_examples_are_counted_by_reason(root: Path, spec: PrepareSpec) -> None:
    records = [
        *ENCODED,
        example(image=png(IMAGES[0])[:-30], label=1),
        example(other=1, label=1),
        example(image=1, label=1),
        example(image=png(IMAGES[0]), label=SECRET.encode()),
        b"no example",
    ]
    write(root / "a.tfrecord", records)
    info = prepare(spec)
    assert info.num_samples == 5
    assert info.num_skipped == {"no_feature": 1, "no_label": 1, "undecodable": 3}
    assert info.skipped == tuple(f"a.tfrecord, record {number}" for number in range(5, 10))


def test_records_before_the_damage_in_a_file_are_used(root: Path, spec: PrepareSpec) -> None:
    for number in (1, 2):
        write(root / f"{number}.tfrecord", ENCODED)
    path = root / "1.tfrecord"
    path.write_bytes(path.read_bytes()[:-10])
    info = prepare(spec)
    assert (info.num_samples, info.num_skipped) == (9, {"damaged_file": 1})


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (None, "the job does not describe them"),
        (RecordSchema("picture", "label"), "no usable samples: 5 no feature"),
    ],
)
def test_files_need_a_matching_schema(
    root: Path, spec: PrepareSpec, records: RecordSchema | None, message: str
) -> None:
    write(root / f"{SECRET}.tfrecord", ENCODED)
    assert "data.tfrecord" in refusal(replace(spec, records=records), message)
    refusal(replace(spec, classes=("cat", "dog")), "labels that are not classes: the job has 2 classes")


@given(st.sampled_from(ENCODED), st.data())
def test_damaged_examples_are_an_error_or_examples(whole: bytes, data: st.DataObject) -> None:
    changed = bytearray(whole[: data.draw(st.integers(1, len(whole)))])
    for _ in range(data.draw(st.integers(0, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        parse_example(bytes(changed))


TEXTS = st.lists(st.binary(max_size=200), max_size=3)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=5)
INTEGERS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.tuples(st.sampled_from("bfi"), TEXTS, FLOATS, INTEGERS)))
def test_examples_are_parsed_as_by_protobuf(drawn: dict[str, Any]) -> None:
    train = tensorflow().train
    made = {
        "b": lambda texts, floats, integers: train.Feature(bytes_list=train.BytesList(value=texts)),
        "f": lambda texts, floats, integers: train.Feature(float_list=train.FloatList(value=floats)),
        "i": lambda texts, floats, integers: train.Feature(int64_list=train.Int64List(value=integers)),
    }
    features = {name: made[kind](*values) for name, (kind, *values) in drawn.items()}
    content = train.Example(features=train.Features(feature=features)).SerializeToString()
    assert parse_example(content) == {
        name: [*one.bytes_list.value, *one.float_list.value, *one.int64_list.value]
        for name, one in features.items()
    }
