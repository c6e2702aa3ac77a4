"""The result of `init`: what was seen, what was written, what to do next."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from csdctl.cli.options import DEFAULT_FLEET, DEFAULT_JOB
from csdctl.cli.streams import Streams
from csdctl.worker.protocol.datasets import DataLook
from csdctl.workflows.data.init import Written
from csdctl.workflows.data.init_text import describe_data, describe_model


def render_written(streams: Streams, written: Written) -> None:
    """Print what was seen, and the commands that come next."""
    looks = written.looks
    streams.say(f"model: {describe_model(looks.model)}")
    streams.say(f"public data: {describe_data(looks.public)}")
    if looks.validation:
        streams.say(f"validation data: {describe_data(looks.validation)}")
    streams.say(f"{written.path} written: read its comments, which name placeholders and guesses")
    if not written.misfit:
        if not (streams.directory / DEFAULT_FLEET).exists():
            streams.say(
                f"{DEFAULT_FLEET} does not exist: describe your machines there, or `csdctl emulate up`"
            )
        streams.say("next: " + ", ".join(f"`{command}`" for command in next_commands(written.path)))


def next_commands(job: Path) -> list[str]:
    """Return the commands that lead from a job file to a training."""
    named = "" if job == DEFAULT_JOB else f" {job}"
    return ["csdctl doctor", *(f"csdctl {command}{named}" for command in ("prepare", "tune", "train"))]


def init_document(written: Written) -> dict[str, Any]:
    """Return the `csdctl.init/1` document."""
    looks, misfit = written.looks, written.misfit
    return {
        "schema": "csdctl.init/1",
        "path": written.path,
        "model": looks.model,
        "public": _look_document(looks.public),
        "validation": _look_document(looks.validation) if looks.validation else None,
        "fits": misfit is None,
        "next": next_commands(written.path),
        "problem": misfit,
    }


def _look_document(look: DataLook) -> dict[str, Any]:
    """Return a look without the path and hashes of what was not kept."""
    document = asdict(look)
    for name in ("path", "fingerprint", "images_sha256", "labels_sha256"):
        del document["info"][name]
    return document
