"""Loads a compiled step from its files."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.data.file_hash import check_stored
from csdctl.worker.engine.step import BFLOAT16, StepEngine, StepInfo
from csdctl.worker.engine.tensorflow_c import GraphSession
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.json_codec import from_json
from csdctl.worker.protocol.recipe import Noise, Recipe
from csdctl.worker.protocol.run_spec import CompiledStep, RankSpec, Runtime


def load_compiled(files: CompiledStep, runtime: Runtime) -> tuple[StepInfo, GraphSession, list[Array]]:
    """Return a step's info, session and first state; raises WorkerError if a file is not what was sent."""
    for path in (files.graph, files.info, files.state):
        check_stored(path)
    try:
        info = from_json(StepInfo, Path(files.info).read_text())
        content = Path(files.graph).read_bytes()
        with np.load(files.state, allow_pickle=False) as archive:
            kept = (archive[name] for name in sorted(archive.files))
            state = [
                np.zeros(one.shape, BFLOAT16 if one.dtype == "bfloat16" else one.dtype)
                if one.is_zero
                else next(kept)
                for one in info.variables
            ]
    except OSError as error:
        raise WorkerError(f"the model cannot be read: {error}", remedy="run `csdctl deploy` again") from None
    return info, GraphSession(content, runtime), state


def load_engine(
    files: CompiledStep, me: RankSpec, recipe: Recipe, noise: Noise | None, augmentation: Any = None
) -> StepEngine:
    """Return the compiled step of a rank; raises WorkerError if it cannot be run here."""
    return StepEngine(
        *load_compiled(files, me.runtime),
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
