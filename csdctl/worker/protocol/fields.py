"""The names of a sample's parts: its inputs, its labels, its weight."""

from collections.abc import Mapping
from typing import Any

INPUT, OUTPUT = "input", "output"
"""Parts without names of their own have their position: `input_0`, `output_1`."""
LABEL = "label"
"""The field of labels that have no name of their own, beside the samples' weights."""
SAMPLE_WEIGHT = "sample_weight"
"""The field of the labels with the weight of each sample."""


def name_of_position(kind: str, number: int) -> str:
    """Return the name of the input or output with this position."""
    return f"{kind}_{number}"


def is_position(name: str, kind: str) -> bool:
    """Return whether a name only says a position among the inputs or outputs."""
    start, _, number = name.rpartition("_")
    return start == kind and number.isdigit()


def as_inputs(parts: Mapping[str, Any]) -> Any:
    """Return what a model is called with: its only input, a list, or a dict where the inputs have names."""
    if list(parts) == [""]:
        return parts[""]
    return list(parts.values()) if all(is_position(name, INPUT) for name in parts) else dict(parts)
