"""User code: functions by reference `FILE.py:NAME`, and the job's packed code and `data.augment`.

`data.augment` changes the samples of every training batch of a rank. Its random numbers are a function of
seed, step and rank: a step that is computed again, after a loss or by `verify`, has the same samples.
"""

import importlib
import importlib.util
import itertools
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import machinery
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from csdctl.worker.compute.backend import load_backend
from csdctl.worker.data.arrays import Array, map_fields
from csdctl.worker.data.prepared import PreparedSamples
from csdctl.worker.process.errors import JobError, WorkerError, describe, find_remedy
from csdctl.worker.protocol.model_info import AugmentTrial
from csdctl.worker.protocol.run_spec import UserCode

_AUGMENT = 2
"""The last element of the seed: it keeps these numbers apart from the order of samples (prepared.py)."""
STEPS = (0, 1, 2)
"""Steps that are tried: in one, random numbers of few samples may be equal by chance."""
_PACKED: dict[str, ModuleType] = {}
"""Modules of the job's code, which take the place of the user's files on a rank."""


def load_function(reference: str) -> Any:
    """Return the function or class that `reference` names. Raises WorkerError, exit code 2."""
    path, _, name = reference.rpartition(":")
    packed = _PACKED.get(Path(path).stem)
    function = getattr(packed or import_file(Path(path)), name, None)
    if not callable(function):
        raise JobError(f"{path} has no function {name!r}")
    return function


@contextmanager
def explaining(
    problem: str, remedy: str = "fix the model's code, or model_args", file: Path | None = None
) -> Iterator[None]:
    """Raise the WorkerError that an error of the user's code in `file` is due to, or one with the problem."""
    try:
        yield
    except BaseException as error:  # even SystemExit
        cause: BaseException | None = error
        while cause and not isinstance(cause, WorkerError):  # TensorFlow wraps what a tf.function raises
            cause = cause.__cause__ or cause.__context__
        if cause:
            raise cause from None
        raise JobError(f"{problem}: {describe(error, file)}", find_remedy(error) or remedy) from None


def import_file(path: Path) -> Any:
    """Import a user's file once, under its own name, with the modules beside it. Raises WorkerError."""
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    if loaded is None:  # a library of that name is not replaced
        sys.modules[path.stem] = module
    _search(path.parent.resolve())
    with explaining(f"{path} fails", file=path):
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    return module


def import_roots(roots: Sequence[str]) -> None:
    """Import the user's files and packages `roots` on the host. Raises WorkerError if one fails."""
    for root in map(Path, roots):
        if root.is_file():
            import_file(root)
        else:
            _search(root.parent.resolve())
            with explaining(f"{root} fails"):
                importlib.import_module(root.name)


class _SourceLoader(machinery.SourceFileLoader):
    """Compiles the source: Python takes any .pyc file of a source with the same size and time."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Raise OSError: no .pyc file is read or written."""
        raise OSError


@cache
def _search(directory: Path) -> None:
    """Import modules from `directory` first, and compile those below it, except for installed packages."""
    find = machinery.FileFinder.path_hook(
        (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
        (_SourceLoader, machinery.SOURCE_SUFFIXES),
    )

    def find_below(path: str) -> Any:
        if not Path(path).is_relative_to(directory) or "-packages/" in f"{path}/":
            raise ImportError
        return find(path)

    sys.path_hooks.insert(0, find_below)
    sys.path_importer_cache.pop(str(directory), None)
    sys.path.insert(0, str(directory))


def import_packed(archive: str, modules: Sequence[str]) -> dict[str, Any]:
    """Import `modules` of the zip `archive`. Return what Keras may need of them. Raises WorkerError."""
    sys.path.insert(0, archive)
    remedy = "install what it imports, or add the user's own modules to `code` in job.yaml"
    for name in modules:
        with explaining(f"importing {name} of the job's code fails", remedy):
            _PACKED[name] = importlib.import_module(name)
    return find_objects(lambda file: file.startswith(archive))


def missing_packages(architecture: str) -> list[str]:
    """Return the packages that a model's JSON names, and that cannot be imported here."""
    named = {name.partition(".")[0] for name in re.findall(r'"module": "([^"]+)"', architecture)}
    return sorted(name for name in named if name.isidentifier() and importlib.util.find_spec(name) is None)


def find_objects(is_users: Callable[[str], bool]) -> dict[str, Any]:
    """Return classes and functions of the imported modules whose file `is_users`, by name."""
    return {
        key: value
        for name, module in list(sys.modules.items())
        if is_users(str(getattr(module, "__file__", None) or ""))
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == name
    }


def imported_beside(directory: Path) -> list[Path]:
    """Return the files below `directory` that modules of this process were imported from."""
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    below, installed = f"{directory.resolve()}/", f"{Path(sys.prefix).resolve()}/"
    return sorted(Path(file) for file in files if file.startswith(below) and not file.startswith(installed))


def load_augmentation(reference: str, seed: int, code: UserCode | None) -> "Augmentation | None":
    """Return `FILE.py:NAME` of the job's code, None for ''. Raises WorkerError if it is missing."""
    if not reference:
        return None
    if code:
        import_packed(code.archive, code.modules)
    return Augmentation(reference, seed)


class Augmentation:
    """The function of one rank."""

    def __init__(self, reference: str, seed: int, *, is_public: bool = False) -> None:
        """`is_public`: all samples are, so that what the function raises may be shown. Raises WorkerError."""
        self.name = Path(reference).name
        self._function = load_function(reference)
        self._seed, self._is_public = seed, is_public

    def __call__(
        self, samples: Array, labels: Array, step: int, rank: int, num_single: int = 0
    ) -> tuple[Array, Array]:
        """Return as many samples and labels, with the same shapes and types.

        The first `num_single` samples are passed one by one: with noise, no sample may depend on another.
        Raises WorkerError if the function fails or returns something else. It names no value of a private
        sample.
        """
        seed = [self._seed, step, rank, _AUGMENT]
        parts = [slice(number, number + 1) for number in range(num_single)]
        try:
            changed = [self._call(samples[part], labels[part], [*seed, part.start]) for part in parts]
            if num_single < len(samples) or not changed:
                changed.append(self._call(samples[num_single:], labels[num_single:], seed))
        except WorkerError:
            raise
        except BaseException as error:
            if self._is_public:
                problem = f"fails with {len(samples)} samples: {describe(error)}"
            else:
                traceback.print_exc()  # to the rank's log: the message may contain values of samples
                problem = f"fails: {type(error).__name__}; its message is in the rank's log"
            raise self._error(problem, "fix the function, and try it with `csdctl prepare`") from None
        all_samples, all_labels = zip(*changed, strict=True)
        return np.concatenate(all_samples), np.concatenate(all_labels)

    def _call(self, samples: Array, labels: Array, seed: list[int]) -> tuple[Array, Array]:
        if not len(samples):
            return samples, labels
        generator = np.random.default_rng(seed)
        # For functions of libraries that draw from the global generators.
        random.seed(seed_of_all := int(generator.integers(1 << 32)))
        np.random.seed(seed_of_all)
        copies = (map_fields(np.array, part) for part in (samples, labels))  # which it may write to
        returned = self._function(*copies, generator)
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            value = f"{len(returned)} values" if isinstance(returned, tuple | list) else _type_of(returned)
            raise self._error(f"returned {value}, expected (samples, labels)", "return samples, labels")
        return self._pack(returned[0], samples, "samples"), self._pack(returned[1], labels, "labels")

    def _error(self, problem: str, remedy: str) -> WorkerError:
        return JobError(f"{self.name} {problem}", remedy)

    def _pack(self, returned: Any, expected: Array, what: str) -> Array:
        if expected.dtype.names is None:
            return self._convert(returned, expected, what)
        names = expected.dtype.names
        if not isinstance(returned, Mapping) or set(returned) != set(names):
            value = ", ".join(map(str, returned)) if isinstance(returned, Mapping) else _type_of(returned)
            raise self._error(
                f"returned {what} {value}, expected a dict of {', '.join(names)}",
                "return the same names as it gets",
            )
        packed = np.empty(expected.shape, expected.dtype)
        for name in names:
            packed[name] = self._convert(returned[name], expected[name], f"{what} {name}")
        return packed

    def _convert(self, returned: Any, expected: Array, what: str) -> Array:
        """Return an array or tensor in the type of `expected`, if that changes no value."""
        try:
            array = np.asarray(returned)
        except Exception:
            array = np.asarray(None)
        is_number = array.dtype.kind in "biuf" or str(array.dtype) == "bfloat16"
        is_float = expected.dtype.kind == "f"
        if is_number and array.shape == expected.shape:
            with np.errstate(invalid="ignore", over="ignore"):
                converted = array.astype(expected.dtype, copy=False)
            if is_float and not np.isfinite(converted).all() and np.isfinite(expected).all():
                raise self._error(f"returned {what} that are not finite", "return finite numbers")
            if is_float or array.dtype == expected.dtype or np.array_equal(converted, array):
                return converted
        value, expected_form = (
            "×".join(map(str, part.shape)) + f" {part.dtype}" for part in (array, expected)
        )
        raise self._error(
            f"returned {what} as {value if is_number else _type_of(returned)}, expected {expected_form}",
            "return as many samples as it gets, of the same shape and type; for images, "
            "`np.clip(np.rint(x), 0, 255).astype(np.uint8)`",
        )


def _type_of(value: Any) -> str:
    return f"a {type(value).__name__}"


def try_augment(spec: AugmentTrial) -> None:
    """Call the function as ranks do: on several samples, on one, and twice for the same step.

    Raises WorkerError, exit code 2, if it cannot be imported, fails, returns something else than samples and
    labels of the same form, or other ones when a step is repeated.
    """
    load_backend()  # whose threads cannot be set any more once the user's code has imported it
    import_packed(spec.code.archive, spec.code.modules)
    augmentation = Augmentation(spec.reference, spec.seed, is_public=True)
    samples, labels = PreparedSamples(spec.samples).span(0, 8)
    for size, step in itertools.product(dict.fromkeys((len(samples), 1)), STEPS):
        # Ranks compute the steps of a run in order, a rank that is restarted only one of them.
        batch = samples[:size], labels[:size]
        first, _, again = (augmentation(*batch, number, 0) for number in (step, step + 1, step))
        parts = zip(first, again, strict=True)
        if not all(np.array_equal(a[name], b[name]) for a, b in parts for name in a.dtype.names or [...]):
            raise JobError(
                f"{augmentation.name} returns different results for the same rng: "
                "a step could not be repeated",
                "draw all random numbers from rng; for TensorFlow, its stateless functions with "
                "`seed=rng.integers(2**31, size=2)`",
            )
