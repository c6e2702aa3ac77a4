"""Pictures, records and examples as Python's TensorFlow reads them."""

import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from csdctl.worker.engine.tensorflow_c import TensorFlowError
from csdctl.worker.ingest.sources.tensorflow_io import JPEG_RATIOS, PNG, RGBA, RecordReader, load_decoders
from csdctl.worker.ingest.sources.tfrecord import parse_example
from tests.unit.worker.ingest.sources.encoded_images import (
    CMYK_RED_JPEG,
    colours,
    encode,
    jpeg,
    png,
    tensorflow,
)
from tests.unit.worker.ingest.sources.test_tfrecord import ENCODED, write

WIDE = (colours(9, 7, 1).astype(np.uint16) << 8) + 255
PNGS = {
    "grey": png(colours(9, 7, 1)),
    "grey and alpha": png(colours(9, 7, 2)),
    "rgb": png(colours(9, 7)),
    "rgba": png(colours(9, 7, 4)),
    "palette": png(np.arange(12).reshape(3, 4) % 4),
    "palette with a transparent colour": png(np.arange(12).reshape(3, 4) % 4, transparency=2),
    "16 bit": png(WIDE),
    "16 bit with a colour key": png(WIDE, transparency=int(WIDE[0, 0, 0])),
    "colour key": png(colours(9, 7), transparency=tuple(colours(9, 7)[1, 1].tolist())),
    "1 bit": encode(np.array([[[0], [255]]], np.uint8), "PNG", bits=1),
}


@pytest.mark.parametrize("name", PNGS)
@pytest.mark.parametrize(("decoder", "channels"), [(PNG, 0), (RGBA, 4)])
def test_pngs_have_the_pixels_of_tensorflow(name: str, decoder: str, channels: int) -> None:
    expected = tensorflow().io.decode_png(PNGS[name], channels=channels).numpy()
    found = load_decoders()[decoder](PNGS[name]).array(0)
    assert found.dtype == np.uint8
    assert np.array_equal(found, expected)


def picture(mode: str, **options: Any) -> bytes:
    file = io.BytesIO()
    smooth = Image.fromarray(colours(12, 9)).resize((150, 203), Image.Resampling.BICUBIC)
    smooth.convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


JPEGS = [jpeg(colours(64, 48)), picture("RGB"), picture("RGB", progressive=True), picture("L"), CMYK_RED_JPEG]


@pytest.mark.parametrize("number", range(len(JPEGS)))
@pytest.mark.parametrize("ratio", JPEG_RATIOS)
def test_jpegs_have_the_pixels_of_tensorflow(ratio: int, number: int) -> None:
    content, exact = JPEGS[number], "INTEGER_ACCURATE"
    expected = tensorflow().io.decode_jpeg(content, channels=3, ratio=ratio, dct_method=exact).numpy()
    assert np.array_equal(load_decoders()[JPEG_RATIOS[ratio]](content).array(0), expected)


def test_errors_stay_in_their_thread() -> None:
    whole, damaged = PNGS["rgb"], PNGS["rgb"][:-40]

    def decode(number: int) -> bool:
        try:
            found = load_decoders()[PNG](damaged if number % 2 else whole)
        except TensorFlowError:
            return False
        assert np.array_equal(found.array(0), colours(9, 7))
        return True

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(decode, range(2000))) == [True, False] * 1000


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_records_before_the_damage_are_those_of_tensorflow(tmp_path: Path, compression: str) -> None:
    """Whatever byte is damaged, and wherever the file ends."""
    path = tmp_path / "a.tfrecord"
    write(path, [b"", b"a" * 3, bytes(70), b"\xff" * 9], compression)
    whole, reader = path.read_bytes(), RecordReader()
    changed = [whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :] for place in range(len(whole))]
    for content in (whole, *changed, *(whole[:place] for place in range(len(whole)))):
        path.write_bytes(content)
        theirs = (one.numpy() for one in tensorflow().data.TFRecordDataset(str(path), compression))
        assert drain(reader.read(path, compression)) == drain(theirs)


def drain(records: Any) -> list[bytes | None]:
    found: list[bytes | None] = []
    try:
        for record in records:
            found.append(record)
    except (TensorFlowError, tensorflow().errors.OpError):
        found.append(None)
    return found


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
