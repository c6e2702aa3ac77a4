"""What a probe is, and how many of them make one round trip.

A probe is a piece of POSIX shell and a pure parser of what it prints. All pieces go to the machine as one
script; a marker line before each says whose output follows.
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
    """One command that runs all `probes`, whatever some of them do."""
    pieces = [
        f"echo '{_MARKER}{probe.name}'\n(\n{probe.script}\n) 2>/dev/null </dev/null" for probe in probes
    ]
    return ["sh", "-c", "LC_ALL=C; export LC_ALL\n" + "\n".join(pieces) + "\nexit 0", "csdctl-probes", python]


def parse_outputs(
    probes: Sequence[FactProbe], output: str, machine: str
) -> tuple[dict[str, object], list[str]]:
    """The values of all `probes` and, for each that cannot be read, a note that says why.

    Raises RemoteCommandError when nothing of it is ours.
    """
    parts = re.split(rf"^{_MARKER}(.*)\n", output, flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    if not texts:
        raise RemoteCommandError(
            f"probing printed {output[:80]!r} instead of facts", node=machine, remedy="try `sh` there by hand"
        )
    values: dict[str, object] = {}
    notes: list[str] = []
    for probe in probes:
        try:
            values.update(probe.parse(texts.get(probe.name, "")))
        except ValueError as error:
            notes.append(f"{probe.name} could not be told: {error}")
    return values, notes
