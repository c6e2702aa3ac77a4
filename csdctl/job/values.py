"""A job as flat named values, with the names of job.yaml, to describe changes."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from csdctl.job.model import Job


def describe_job(job: Job) -> dict[str, Any]:
    """Return the inputs of `Job.fingerprint`, except file content; unset values are omitted.

    Values are YAML values: text, numbers, booleans, and lists of them.
    """
    recipe, reading = asdict(job.recipe), asdict(job.reading)
    described = {
        "model": job.model,
        "model_args": job.model_args,
        "data": {
            "public": {"path": str(job.public_path), "function": reading["public_function"]},
            "private": {
                "path": job.private_path,
                "function": reading["private_function"],
                "noise": asdict(job.noise) if job.noise else {},
            },
            "validation": {"function": reading["validation_function"]},
            "input_range": recipe.pop("input_range"),
            "augment": recipe.pop("augment"),
            "image": reading["picture"],
            "classes": reading["classes"],
            "tfrecord": reading["records"],
        },
        "recipe": recipe,
    }
    return dict(_flatten("", described))


def hash_own_files(job: Job) -> dict[str, str]:
    """Return a short hash of the content of each of the user's files, by path."""
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in job.own_files}


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, list | tuple):
        if value:
            yield name, list(value)
    elif value not in (None, ""):
        yield name, value
