"""The user's own function, `FILE.py:NAME`: called with the path of the data, it returns all samples."""

import hashlib
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from csdctl.worker.compute.backend import load_tensorflow
from csdctl.worker.data.file_hash import check_stored
from csdctl.worker.ingest.sources.arrays import ArraySource, InMemoryRows, as_rows
from csdctl.worker.ingest.sources.iterated import (
    SHUFFLE_SEED,
    Elements,
    IteratedSamples,
    describe_parts,
    open_dataset,
    open_py_dataset,
)
from csdctl.worker.ingest.sources.source import SampleSource, Tree
from csdctl.worker.ingest.sources.structure import (
    EXPECTED,
    StructureError,
    check_lengths,
    is_ragged,
    name_inputs,
    name_outputs,
    no_labels,
    split,
    to_arrays,
)
from csdctl.worker.process.errors import WorkerError, describe
from csdctl.worker.protocol.datasets import PrepareSpec

_MODULE = "csdctl_users_data"
_USES_TENSORFLOW = re.compile(rb"tensorflow|keras")


def call_function(tree: Tree, spec: PrepareSpec, threads: int) -> SampleSource:
    """Call the user's function and return its result as a source.

    Raises WorkerError, exit code 2, if it fails or returns something else.
    """
    function = UserFunction(spec)
    function.check_content()
    function.load_libraries()
    returned = function.guard(lambda: function.load()(str(tree.root)))
    try:
        return _as_source(returned, function, spec, threads)
    except StructureError as error:
        raise function.error(error.problem, error.remedy) from None


def _as_source(returned: Any, function: "UserFunction", spec: PrepareSpec, threads: int) -> SampleSource:
    """Return what a function returned as a source; raises StructureError or WorkerError."""
    for open_elements in (open_dataset, open_py_dataset):
        if (source := open_elements(returned, function, spec, threads)) is not None:
            return source
    if isinstance(returned, tuple | Mapping) or hasattr(returned, "shape"):
        return _open_arrays(returned, spec)
    try:
        iterator = iter(returned)
    except TypeError:
        raise StructureError(f"returned a {type(returned).__name__}") from None
    elements = Elements(function, lambda: iterator, spec, is_batched=False)
    return IteratedSamples(function, elements, spec, threads)


def _open_arrays(returned: Any, spec: PrepareSpec) -> ArraySource:
    if isinstance(returned, tuple) and any(hasattr(part, "element_spec") for part in returned):
        raise StructureError("returned several data sets", "return one, and write a function for each")
    try:
        samples, labels, weights = split(returned)
    except StructureError:
        raise StructureError(f"returned {len(returned)} values") from None
    inputs, outputs = name_inputs(samples, spec), name_outputs(labels, weights, spec)
    arrays = [to_arrays(parts, 1) for parts in (inputs, outputs)]
    lengths = {array.shape[:1] for part in arrays for array in part.values()}
    if len(lengths) > 1 and isinstance(returned, tuple) and all(isinstance(part, tuple) for part in returned):
        raise StructureError(
            "returned arrays of different lengths, as (train, test) of load_data() has",
            "return one pair, and write a function for each",
        )
    if not outputs:
        arrays[1] = {"": no_labels(next(iter(arrays[0].values())).shape[:1])}
    for part in arrays:
        check_lengths(part, 1)
    rows = [as_rows({name: InMemoryRows(array) for name, array in part.items()}) for part in arrays]
    source = ArraySource(rows[0], rows[1], spec)
    source.padded = {
        name: array.shape[1:]
        for name, part, array in describe_parts((inputs, outputs), arrays)
        if is_ragged(part)
    }
    return source


class UserFunction:
    """The user's function; all its failures become a WorkerError that exposes no private data."""

    def __init__(self, spec: PrepareSpec) -> None:
        path, _, self._name = spec.function.rpartition(":")
        self._path = Path(path)
        self._source = b""
        self._is_private = spec.is_private
        self._code = spec.code.archive if spec.code else ""

    def check_content(self) -> None:
        """Raise WorkerError if the file, whose name in the store begins with its hash, was changed."""
        self._source = self._path.read_bytes()
        stated = re.match(r"[0-9a-f]{64}", self._path.name)
        if stated and stated[0] != hashlib.sha256(self._source).hexdigest():
            raise WorkerError(f"{self._path} has been changed since csdctl sent it", remedy="deploy again")

    def load_libraries(self) -> None:
        """Make the job's own code importable, and load TensorFlow if the user's code does.

        TensorFlow's threads must be set before it starts. Random numbers are the same in every call, so that
        the same data gives the same bytes.
        """
        sources = [self._source]
        if self._code:
            check_stored(self._code)
            archive = str(Path(self._code).resolve())
            sys.path.insert(0, archive)
            with zipfile.ZipFile(archive) as packed:
                sources += [packed.read(name) for name in packed.namelist()]
        if any(map(_USES_TENSORFLOW.search, sources)):
            load_tensorflow()
            import keras

            keras.utils.set_random_seed(SHUFFLE_SEED)

    def load(self) -> Callable[[str], Any]:
        """Import the function; raises whatever its file raises."""
        module = ModuleType(_MODULE)
        module.__file__ = str(self._path)
        sys.modules[_MODULE] = module  # where dataclasses look up the types that they are written with
        exec(compile(self._source, self._path, "exec"), module.__dict__)  # no __pycache__ is read or written
        function: Callable[[str], Any] = getattr(module, self._name)
        return function

    def guard(self, code: Callable[[], Any]) -> Any:
        """Return what `code` returns; raises WorkerError for whatever it raises."""
        try:
            return code()
        except BaseException as error:
            # The message may name a private file or contain private data.
            reason = type(error).__name__ if self._is_private else describe(error)
            remedy = "fix its file"
            if isinstance(error, ModuleNotFoundError):
                remedy = "install the module on this machine; name your own modules in `code` of job.yaml"
            raise WorkerError(
                f"the function {self._name} fails: {reason}", remedy=remedy, exit_code=2
            ) from None

    def error(self, problem: str, remedy: str = EXPECTED) -> WorkerError:
        """Return the error for a result that is not samples."""
        return WorkerError(f"the function {self._name} {problem}", remedy=remedy, exit_code=2)
