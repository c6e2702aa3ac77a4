"""Probes, and how to run many of them in one round trip.

A probe is a POSIX shell script and a pure parser of its output. All scripts are sent to the machine as one; a
marker line precedes the output of each.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from csdctl.errors import RemoteCommandError

_MARKER = "csdctl-probe:"

FactValues = Mapping[str, object]
"""Values for fields of `Facts`, by name."""


@dataclass(frozen=True)
class FactProbe:
    """`script` runs in a subshell with $1 as the machine's Python; `parse` raises ValueError."""

    name: str
    script: str
    parse: Callable[[str], FactValues]


def build_command(probes: Sequence[FactProbe], python: str) -> list[str]:
    """Build one command that runs all `probes`, even if some of them fail."""
    scripts = [
        f"echo '{_MARKER}{probe.name}'\n(\n{probe.script}\n) 2>/dev/null </dev/null" for probe in probes
    ]
    return [
        "sh",
        "-c",
        "LC_ALL=C; export LC_ALL\n" + "\n".join(scripts) + "\nexit 0",
        "csdctl-probes",
        python,
    ]


def parse_outputs(
    probes: Sequence[FactProbe], output: str, machine: str
) -> tuple[dict[str, object], list[str]]:
    """Return the values of all `probes`, and a note for each probe with unusable output.

    Raises RemoteCommandError when the output has no marker at all.
    """
    parts = re.split(rf"^{_MARKER}(.*)\n", output, flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    if not texts:
        raise RemoteCommandError(
            f"probing printed {output[:80]!r} instead of facts",
            node=machine,
            remedy="run `sh` there manually",
        )
    values: dict[str, object] = {}
    notes: list[str] = []
    for probe in probes:
        try:
            values.update(probe.parse(texts.get(probe.name, "")))
        except ValueError as error:
            notes.append(f"{probe.name} unknown: {error}")
    return values, notes
