"""Fuzz all targets, or some, in turn for a given time; print what was tried and found.

`make fuzz ARGS="--minutes 30"`; the inputs of defects are written to build/fuzz. To see one again:
`python -m tests.fuzz --input build/fuzz/NAME/…`.
"""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.fuzz.harness import Fuzzing, Tally, bounded_memory, save_defects, try_input
from tests.fuzz.targets import TARGETS

DEFECTS = Path("build/fuzz")
TURN_S = 1.0


def main() -> int:
    """Return 1 when a defect was found."""
    parser = argparse.ArgumentParser(prog="make fuzz", description="Fuzz what csdctl reads from others.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="all, unless given")
    parser.add_argument("--input", type=Path, help="try only this file; its directory is the target's name")
    options = parser.parse_args()
    if options.input:
        with tempfile.TemporaryDirectory() as directory, bounded_memory():
            target = TARGETS[options.input.parent.name]
            outcome = try_input(target, options.input.read_bytes(), Path(directory))
        print(outcome.defect or outcome.place or "accepted")
        return int(bool(outcome.defect))
    tallies = _run(options.target or sorted(TARGETS), options.seed, options.minutes * 60)
    print(_table(tallies))
    for path in save_defects(tallies, DEFECTS):
        print(f"\n{path}\n{path.with_suffix('.txt').read_text().rstrip()}")
    return int(any(tally.defects for tally in tallies.values()))


def _run(names: list[str], seed: int, duration_s: float) -> dict[str, Tally]:
    end_s = time.monotonic() + duration_s
    with ExitStack() as stack:
        fuzzings = []
        for name in names:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="csdctl-fuzz-"))
            fuzzings.append(Fuzzing(TARGETS[name], seed, Path(directory)))
        for fuzzing in fuzzings:
            with bounded_memory():
                fuzzing.try_known()
        with suppress(KeyboardInterrupt):
            while time.monotonic() < end_s:
                for fuzzing in fuzzings:
                    turn_end_s = min(time.monotonic() + TURN_S, end_s)
                    with bounded_memory():
                        while time.monotonic() < turn_end_s:
                            fuzzing.try_next()
    return {fuzzing.target.name: fuzzing.tally for fuzzing in fuzzings}


def _table(tallies: dict[str, Tally]) -> str:
    lines = [f"{'target':<20} {'tried':>10} {'accepted':>9} {'slowest':>9} {'defects':>8}"]
    for name, tally in tallies.items():
        share = tally.num_accepted / max(1, tally.num_tried)
        lines.append(
            f"{name:<20} {tally.num_tried:>10,} {share:>9.0%} {1000 * tally.slowest_s:>6.0f} ms "
            f"{len(tally.defects):>8}"
        )
    total = sum(tally.num_tried for tally in tallies.values())
    defects = sum(len(tally.defects) for tally in tallies.values())
    return "\n".join([*lines, f"{'all':<20} {total:>10,} {'':>9} {'':>9} {defects:>8}"])


if __name__ == "__main__":
    sys.exit(main())
