"""Facts of a machine, and how to find many of them in one round trip.

A fact is a POSIX shell script and a pure parser of its output. All scripts are sent to the machine as one; a
marker line precedes the output of each.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from csdctl.errors import RemoteCommandError
from csdctl.fleet.facts import list_invalid
from csdctl.notify import shorten

_MARKER = "csdctl-fact:"

MAX_NOTE = 300
"""Characters of a note; a machine may print a megabyte in place of a number."""

FactValues = Mapping[str, object]
"""Values for fields of `Facts`, by name."""


@dataclass(frozen=True)
class Fact:
    """`script` runs in a subshell with $1 as the machine's Python; `parse` raises ValueError."""

    name: str
    script: str
    parse: Callable[[str], FactValues]


def text_fact(name: str, script: str, field: str) -> Fact:
    """Return the fact whose output is the value of `field`."""

    def parse(output: str) -> FactValues:
        if not output.strip():
            raise ValueError("no output")
        return {field: output.removesuffix("\n")}

    return Fact(name, script, parse)


def build_command(facts: Sequence[Fact], python: str) -> list[str]:
    """Build one command that finds all `facts`, even if some of them fail."""
    scripts = [f"echo '{_MARKER}{fact.name}'\n(\n{fact.script}\n) 2>/dev/null </dev/null" for fact in facts]
    return [
        "sh",
        "-c",
        "LC_ALL=C; export LC_ALL\n" + "\n".join(scripts) + "\nexit 0",
        "csdctl-facts",
        python,
    ]


def parse_outputs(facts: Sequence[Fact], output: str, machine: str) -> tuple[dict[str, object], list[str]]:
    """Return the values of all `facts`, and a note for each fact with unusable output.

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
    for fact in facts:
        try:
            values.update(fact.parse(texts.get(fact.name, "")))
        except ValidationError as error:
            reasons = "; ".join(list_invalid(error).values())
            notes.append(shorten(f"{fact.name} unknown: {reasons}", MAX_NOTE))
        except (ValueError, ArithmeticError, RecursionError) as error:
            notes.append(shorten(f"{fact.name} unknown: {error}", MAX_NOTE))
    return values, notes
