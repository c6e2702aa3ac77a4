"""Loads a compiled step from its files."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.data.file_hash import check_stored
from csdctl.worker.engine.step import GraphInfo, StepEngine, StepInfo
from csdctl.worker.engine.tensorflow_c import BFLOAT16, GraphSession
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.recipe import Noise, Recipe
from csdctl.worker.protocol.run_spec import CompiledStep, RankSpec, Runtime

InfoT = TypeVar("InfoT", bound=GraphInfo)


def load_compiled(
    files: CompiledStep, kind: type[InfoT], runtime: Runtime
) -> tuple[InfoT, GraphSession, list[Array]]:
    """Return info, session and first state of a graph. Raises WorkerError if a file is not what was sent."""
    info = load_info(files, kind)
    for path in (files.graph, files.state):
        check_stored(path)
    try:
        content = Path(files.graph).read_bytes()
        with np.load(files.state, allow_pickle=False) as archive:
            stored = (archive[name] for name in sorted(archive.files))
            state = []
            for variable in info.variables:
                dtype = BFLOAT16 if variable.dtype == "bfloat16" else np.dtype(variable.dtype)
                is_zero = variable.is_zero
                state.append(np.zeros(variable.shape, dtype) if is_zero else next(stored).view(dtype))
    except OSError as error:
        raise _unreadable(error) from None
    return info, GraphSession(content, runtime), state


def load_info(files: CompiledStep, kind: type[InfoT]) -> InfoT:
    """Return what is known of a graph. Raises WorkerError if the file is not what was sent."""
    check_stored(files.info)
    try:
        return from_json(kind, Path(files.info).read_text())
    except OSError as error:
        raise _unreadable(error) from None


def _unreadable(error: OSError) -> WorkerError:
    return WorkerError(f"the model cannot be read: {error}", remedy="run `csdctl deploy` again")


def load_engine(
    files: CompiledStep, me: RankSpec, recipe: Recipe, noise: Noise | None, augmentation: Any = None
) -> StepEngine:
    """Return the compiled step of a rank. Raises WorkerError if it cannot be run here."""
    return StepEngine(
        *load_compiled(files, StepInfo, me.runtime),
        recipe.seed,
        rank=me.rank,
        weight=me.weight,
        noise=noise,
        augmentation=augmentation,
    )


def hash_arrays(arrays: Iterable[Array]) -> str:
    """Return the SHA-256, in hex, of the bytes of arrays, such as all weights of a model."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def are_finite(array: Array) -> bool:
    """Return whether all numbers of an array are finite, of bfloat16 too."""
    if array.dtype == BFLOAT16:
        array = (array["bfloat16"].astype(np.uint32) << 16).view(np.float32)
    return array.dtype.kind in "iub" or bool(np.isfinite(array.astype(np.float32, copy=False)).all())
