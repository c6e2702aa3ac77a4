"""Fuzz one target with Atheris, which csdctl does not require: inputs change by the code they reach.

`python -m tests.fuzz.guided TARGET [-max_total_time=600 …]`; the options are those of libFuzzer.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["csdctl", "zipfile", "numpy.lib", "paramiko.message"]):
    from tests.fuzz.harness import Limits, bounded_memory, try_input
    from tests.fuzz.targets import TARGETS

LIMITS = Limits(cpu_s=10.0, endless_cpu_s=60.0)
"""Code that is observed is several times slower."""


class DefectError(Exception):
    """A defect, at which libFuzzer stops."""


def main() -> None:
    """Fuzz until an option of libFuzzer ends it, or a defect is found."""
    target = TARGETS[sys.argv[1]]
    with tempfile.TemporaryDirectory() as seeds, tempfile.TemporaryDirectory() as scratch:
        for number, content in enumerate([*target.build_seeds(), *target.corpus]):
            Path(seeds, str(number)).write_bytes(content)

        def take(content: bytes) -> None:
            with bounded_memory():
                outcome = try_input(target, content, Path(scratch), LIMITS)
            if outcome.defect:
                raise DefectError(f"{outcome.place}\n{outcome.defect}")

        atheris.Setup([sys.argv[0], *sys.argv[2:], seeds], take)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
