"""TFRecord files, whose records are examples: features by name."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.engine import tensorflow_c
from csdctl.worker.engine.protobuf import BYTES, FIXED32, VARINT, encode_field, parse_fields, parse_int64s
from csdctl.worker.engine.tensorflow_c import STRING, FunctionInfo, TensorFlowError
from csdctl.worker.ingest.sources import source as sources
from csdctl.worker.ingest.sources.images import ImageDecoder, known_shape
from csdctl.worker.ingest.sources.source import Candidate, Tree, UnusableError, data_error
from csdctl.worker.protocol.datasets import PrepareSpec
from csdctl.worker.protocol.run_spec import Runtime

TEXTS, FLOATS, INTEGERS = 1, 2, 3
"""Numbers of the fields of tf.train.Feature."""
BUFFER_BYTES = 256 << 10
"""What is read of a file at once, as by tf.data.TFRecordDataset."""
Feature = list[bytes] | list[float] | list[int]


def is_record_file(file: sources.DataFile, tree: Tree) -> bool:
    """Return whether a file has the name of a TFRecord file: x.tfrecord, x-00000-of-00010, …"""
    return bool(re.match(r".+(\.tfrecords?|\.tfrec|-\d{5}-of-\d{5})(\.gz)?$", tree.path_of(file).name))


class RecordFiles(sources.DecodedSource):
    """The examples of TFRecord files, in order of their paths."""

    def __init__(self, tree: Tree, spec: PrepareSpec) -> None:
        """Raise WorkerError, exit code 2, if the job has no schema or an inconsistent one."""
        if spec.records is None:
            problem = "consists of TFRecord files, but the job does not describe them"
            remedy = "set data.tfrecord in job.yaml: {image: FEATURE, label: FEATURE}"
            raise data_error(spec.source, problem, remedy)
        super().__init__(spec)
        self._source, self._schema = spec.source, spec.records
        self._label_of = {name: label for label, name in enumerate(spec.classes or ())}
        self._paths = [tree.path_of(file) for file in tree.files if is_record_file(file, tree)]
        self._reader = RecordReader()
        shape, dtype = self._schema.shape, self._schema.dtype
        is_image = shape is None or (dtype == "uint8" and len(shape) == 3 and known_shape(spec.picture))
        self._decoder = ImageDecoder(spec.picture) if is_image else None
        raw_bytes = math.prod(shape or ()) * np.dtype(dtype).itemsize
        self.sample_bytes = self._decoder.sample_bytes if self._decoder else raw_bytes

    def candidates(self) -> Iterator[Candidate]:
        """Yield all examples. None stands for the end of a file that cannot be read."""
        for path in self._paths:
            number = 0
            try:
                for record in self._reader.read(path, self._compression(path)):
                    yield record, f"{path.name}, record {number}"
                    number += 1
            except (TensorFlowError, OSError):
                yield None, f"{path.name}, record {number}"

    def place_of(self, candidate: Candidate, number: int) -> str:
        """Return file and record."""
        return str(candidate[1])

    def _compression(self, path: Path) -> str:
        """Return 'GZIP' or ''. A plain file may start with the gzip magic: its first record's length."""
        with path.open("rb") as file:
            if file.read(3) != b"\x1f\x8b\x08":
                return ""
        with suppress(TensorFlowError, StopIteration):
            next(self._reader.read(path))
            return ""
        return "GZIP"

    def decode(self, content: bytes | None, label: str) -> tuple[Array, Any]:
        """Return sample and label of an example. Raises UnusableError."""
        if content is None:
            raise UnusableError("damaged_file")
        try:
            features = parse_example(content)
        except ValueError:
            raise UnusableError("undecodable") from None
        if self._schema.image not in features or self._schema.label not in features:
            raise UnusableError("no_feature")
        return self._read_sample(features[self._schema.image]), self._read_label(features[self._schema.label])

    def _read_sample(self, values: Feature) -> Array:
        shape, dtype = self._schema.shape, np.dtype(self._schema.dtype)
        if shape is None:
            assert self._decoder is not None
            if len(values) != 1 or not isinstance(values[0], bytes):
                raise UnusableError("undecodable")
            return self._decoder.decode(values[0])
        if values and isinstance(values[0], float) and dtype.kind != "f":
            problem = f"has floats in {self._schema.image}, not {dtype}"
            raise data_error(self._source, problem, "set data.tfrecord.dtype: float32")
        try:
            first = values[0] if values else None
            flat = np.frombuffer(first, dtype) if isinstance(first, bytes) else np.asarray(values, dtype)
            raw = flat.reshape(shape)
        except (ValueError, OverflowError):
            raise UnusableError("undecodable") from None
        return self._decoder.fit(raw) if self._decoder else raw

    def _read_label(self, values: Feature) -> float:
        label = values[0] if len(values) == 1 else None
        if isinstance(label, bytes):
            label = self._label_of.get(label.decode(errors="replace"))
        if label is None:
            raise UnusableError("no_label")
        return label


def parse_example(content: bytes) -> dict[str, Feature]:
    """Return the features of a serialized tf.train.Example by name. Raises ValueError for anything else."""
    features: dict[str, Feature] = {}
    for _, group in _messages(memoryview(content), 1):
        for _, entry in _messages(group, 1):
            name, values = "", list[Any]()
            for number, field in _messages(entry, 1, 2):
                if number == 1:
                    name = str(field, "utf-8")
                else:
                    values = _parse_feature(field)
            features[name] = values
    return features


def _messages(content: memoryview, *numbers: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the fields of a message that have one of these `numbers` and bytes, such as messages."""
    return ((n, field) for n, kind, field in parse_fields(content) if n in numbers and kind == BYTES)


def _parse_feature(content: memoryview) -> list[Any]:
    """Return the values of a tf.train.Feature. Of several kinds of values, the last counts."""
    values, last = list[Any](), 0
    for kind, message in _messages(content, TEXTS, FLOATS, INTEGERS):
        if kind != last:
            values, last = [], kind
        for number, encoding, value in parse_fields(message):
            if number != 1:
                continue
            if kind == TEXTS and encoding == BYTES:
                values.append(bytes(value))
            elif kind == FLOATS and encoding in (BYTES, FIXED32):
                values += np.frombuffer(value, "<f4").tolist() if value else []
            elif kind == INTEGERS and encoding == BYTES:
                values += parse_int64s(value)
            elif kind == INTEGERS and encoding == VARINT:
                values.append(value - (value >> 63 << 64))
    return values


def _node(name: str, operation: str, inputs: Sequence[str], **attributes: bytes) -> bytes:
    """Return a node of a GraphDef. `attributes` are messages of the type AttrValue."""
    texts = ((1, name), (2, operation), *((3, source) for source in inputs))
    fields = [encode_field(number, text.encode()) for number, text in texts]
    for key, value in attributes.items():
        fields.append(encode_field(5, encode_field(1, key.encode()) + encode_field(2, value)))
    return encode_field(1, b"".join(fields))


def _type(number: int) -> bytes:
    return encode_field(6, number)


class RecordReader:
    """Reads TFRecord files, one after the other."""

    def __init__(self) -> None:
        """Raise WorkerError if TensorFlow's libraries are missing."""
        elements = {
            "output_types": encode_field(1, _type(STRING)),
            "output_shapes": encode_field(1, encode_field(7, b"")),  # scalars
        }
        feeds, empty = ("filename", "compression", "buffer_bytes"), encode_field(2, b"")
        nodes = [
            *(_node(name, "Placeholder", (), dtype=_type(STRING)) for name in feeds[:2]),
            _node(feeds[2], "Placeholder", (), dtype=_type(tensorflow_c.TYPES["int64"])),
            _node("records", "TFRecordDataset", feeds),
            _node("iterator", "IteratorV2", (), shared_name=empty, container=empty, **elements),
            _node("begin", "MakeIterator", ["records", "iterator"]),
            _node("next", "IteratorGetNext", ["iterator"], **elements),
        ]
        # It computes in the thread of its caller.
        session = tensorflow_c.GraphSession(b"".join(nodes), Runtime(), in_caller=True)
        self._begin = session.find("begin", FunctionInfo(feeds, (), ("begin",)))
        self._next = session.find("next", FunctionInfo((), ("next",)))

    def read(self, path: Path, compression: str = "") -> Iterator[bytes]:
        """Yield the records of a file, `compression` '' or 'GZIP'. Raises TensorFlowError for damage."""
        self._begin(os.fsencode(path), compression.encode(), np.array(BUFFER_BYTES, np.int64))
        while True:
            try:
                record = self._next().string(0)
            except TensorFlowError as error:
                if error.code == tensorflow_c.OUT_OF_RANGE:
                    return
                raise
            yield record
