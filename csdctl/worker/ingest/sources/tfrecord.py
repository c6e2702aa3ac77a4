"""TFRecord files, plain or gzip, of tf.train.Example with the features that the job names."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import load_tensorflow, tf
from csdctl.worker.data.arrays import Array
from csdctl.worker.ingest.sources.images import ImageDecoder, known_shape
from csdctl.worker.ingest.sources.source import (
    Candidate,
    DataFile,
    DecodedSource,
    Tree,
    UnusableError,
    data_error,
)
from csdctl.worker.protocol.datasets import PrepareSpec, RecordSchema

_FILE_NAME = re.compile(r".+(\.tfrecords?|\.tfrec|-\d{5}-of-\d{5})(\.gz)?$")


def is_record_file(file: DataFile, tree: Tree) -> bool:
    """Return whether a file has the name of a TFRecord file: x.tfrecord, x-00000-of-00010, …"""
    return bool(_FILE_NAME.match(tree.path_of(file).name))


class RecordFiles(DecodedSource):
    """The examples of TFRecord files, in order of their paths."""

    def __init__(self, tree: Tree, spec: PrepareSpec, threads: int) -> None:
        """Raise WorkerError, exit code 2, if the job has no schema or an inconsistent one."""
        if spec.records is None:
            problem = "consists of TFRecord files, but the job does not describe them"
            remedy = "set data.tfrecord in job.yaml: {image: FEATURE, label: FEATURE}"
            raise data_error(spec.source, problem, remedy)
        super().__init__(spec, threads)
        self._label_of = {name: label for label, name in enumerate(spec.classes or ())}
        self._schema: RecordSchema = spec.records
        self._paths = [tree.path_of(file) for file in tree.files if is_record_file(file, tree)]
        load_tensorflow()
        is_image = self._schema.shape is None or (
            self._schema.dtype == "uint8" and len(self._schema.shape) == 3 and known_shape(spec.picture)
        )
        self._decoder = ImageDecoder(spec.picture) if is_image else None
        self.sample_bytes = (
            self._decoder.sample_bytes
            if self._decoder
            else int(np.prod(self._schema.shape or ())) * np.dtype(self._schema.dtype).itemsize
        )

    def candidates(self) -> Iterator[Candidate]:
        """Yield all examples."""
        return ((record, None) for path in self._paths for record in self._records(path))

    def _records(self, path: Path) -> Iterator[bytes | None]:
        """Yield the records of a file, and None at the end if the rest of it cannot be read."""
        try:
            for record in tf.data.TFRecordDataset(str(path), compression_type=self._compression(path)):
                yield record.numpy()
        except (tf.errors.OpError, OSError):
            yield None

    def _compression(self, path: Path) -> str:
        """Return 'GZIP' or ''. A plain file may start with the gzip magic: its first record's length."""
        with path.open("rb") as file:
            if file.read(3) != b"\x1f\x8b\x08":
                return ""
        try:
            next(iter(tf.data.TFRecordDataset(str(path))))
        except (tf.errors.OpError, StopIteration):
            return "GZIP"
        return ""

    def decode(self, content: bytes | None, label: None) -> tuple[Array, Any]:
        """Return sample and label of an example; raises UnusableError."""
        if content is None:
            raise UnusableError("damaged_file")
        try:
            example = tf.train.Example.FromString(content)
        except Exception:  # protobuf's own error, which TensorFlow does not export
            raise UnusableError("undecodable") from None
        features = example.features.feature
        if self._schema.image not in features or self._schema.label not in features:
            raise UnusableError("no_feature")
        return self._sample(features[self._schema.image]), self._label(features[self._schema.label])

    def _sample(self, feature: Any) -> Array:
        if self._schema.shape is None:
            assert self._decoder is not None
            if len(feature.bytes_list.value) != 1:
                raise UnusableError("undecodable")
            return self._decoder.decode(feature.bytes_list.value[0])
        raw = self._raw_values(feature, self._schema.shape)
        return self._decoder.fit(raw) if self._decoder else raw

    def _raw_values(self, feature: Any, shape: tuple[int, ...]) -> Array:
        try:
            if feature.bytes_list.value:
                flat = np.frombuffer(feature.bytes_list.value[0], self._schema.dtype)
            else:
                numbers = feature.float_list.value or feature.int64_list.value
                flat = np.asarray(numbers, self._schema.dtype)
            return flat.reshape(shape)
        except (ValueError, OverflowError):
            raise UnusableError("undecodable") from None

    def _label(self, feature: Any) -> Any:
        """Return an integer label, or the index of a class given by name."""
        if len(feature.int64_list.value) == 1:
            return int(feature.int64_list.value[0])
        if len(feature.bytes_list.value) == 1:
            name = feature.bytes_list.value[0].decode(errors="replace")
            if name in self._label_of:
                return self._label_of[name]
        raise UnusableError("no_label")
