"""Look up the known vulnerabilities of every version that requirements/*.txt pin: `make audit`.

pip-audit asks the service that knows. This program adds what pip-audit leaves out, and does not pass on its
"none known" for what was not looked up:

- It leaves out requirements whose marker is false on this machine, such as TensorFlow for aarch64. So it gets
  them without markers.
- It takes one version of a package at a time, and the files pin several. So it runs several times.
- It ends with exit code 0 when the service knows no such package. A proxy that carries packages but no
  advisories answers that for every package. So its answers are counted.

Arguments go on to pip-audit. Exit codes: 0 no vulnerability is known, 1 some are, 4 not everything could be
looked up.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIN = re.compile(
    r"^(?P<name>[a-z0-9][\w.-]*)==(?P<version>[^\s;]+)[^\\\n]*(?P<hashes>(?:\\\n +--hash=\S+ ?)+)$", re.M
)
# Advisory → why it does not concern csdctl. Only for those that a newer version cannot mend.
ACCEPTED: dict[str, str] = {}
NONE_KNOWN, SOME_KNOWN, NOT_LOOKED_UP = 0, 1, 4


@dataclass
class Pin:
    """A version of a package, and the files that pin it."""

    name: str
    version: str
    hashes: str
    files: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the pin with its files."""
        return f"{self.name} {self.version} ({', '.join(self.files)})"


@dataclass
class Findings:
    """What is known: lines for people, and for each pin that could not be looked up, why."""

    vulnerabilities: list[str] = field(default_factory=list)
    not_looked_up: list[tuple[Pin, str]] = field(default_factory=list)
    num_looked_up: int = 0


RunPipAudit = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def load_pins(files: Iterable[Path]) -> list[Pin]:
    """Return each version that `files` pin, sorted by name. ValueError: a line is no pin with hashes."""
    pins: dict[tuple[str, str], Pin] = {}
    for file in files:
        text = file.read_text()
        found = list(PIN.finditer(text))
        if len(found) != len(re.findall(r"^[^\s#]", text, re.MULTILINE)):
            raise ValueError(f"{file} has a line that is no pinned requirement with hashes → make lock")
        for one in found:
            pin = pins.setdefault(
                (one["name"], one["version"]), Pin(one["name"], one["version"], one["hashes"])
            )
            pin.files.append(file.name)
    return sorted(pins.values(), key=lambda pin: pin.name)


def split_rounds(pins: Sequence[Pin]) -> list[list[Pin]]:
    """Return `pins` in rounds that have each package at most once. The first is a single pin.

    If that one cannot be looked up, nothing else is asked.
    """
    rounds: list[list[Pin]] = [[]]
    num_seen: dict[str, int] = {}
    for pin in pins[1:]:
        nth = num_seen[pin.name] = num_seen.get(pin.name, -1) + 1
        if nth == len(rounds):
            rounds.append([])
        rounds[nth].append(pin)
    return [[pins[0]], *rounds]


def run_pip_audit(arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run the pip-audit of this environment."""
    command = [sys.executable, "-m", "pip_audit", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def look_up(pins: Sequence[Pin], arguments: Sequence[str], run: RunPipAudit, findings: Findings) -> None:
    """Add to `findings` what pip-audit says about `pins`, of which no two are of the same package."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "pins.txt")
        file.write_text("".join(f"{pin.name}=={pin.version} {pin.hashes}\n" for pin in pins))
        options = ["--requirement", str(file), "--require-hashes", "--disable-pip", "--format", "json"]
        options += ["--progress-spinner", "off", *(f"--ignore-vuln={advisory}" for advisory in ACCEPTED)]
        ended = run([*options, *arguments])
    try:
        answers = {answer["name"]: answer for answer in json.loads(ended.stdout)["dependencies"]}
    except ValueError:
        answers = {}
    said = (ended.stderr.strip() or "nothing").splitlines()[-1]
    for pin in pins:
        answer = answers.get(pin.name, {"skip_reason": f"pip-audit ended with {ended.returncode}: {said}"})
        if "vulns" not in answer:
            findings.not_looked_up.append((pin, answer["skip_reason"]))
            continue
        findings.num_looked_up += 1
        for one in answer["vulns"]:
            names = ", ".join([one["id"], *one["aliases"]])
            mended = ", ".join(one["fix_versions"]) or "no version yet"
            findings.vulnerabilities.append(f"{pin}: {names}; fixed in {mended}")


def look_up_all(pins: Sequence[Pin], arguments: Sequence[str], run: RunPipAudit) -> Findings:
    """Return what is known about `pins`."""
    findings = Findings()
    for some in split_rounds(pins):
        look_up(some, arguments, run, findings)
        if not findings.num_looked_up:
            reason = findings.not_looked_up[0][1]
            findings.not_looked_up = [(pin, reason) for pin in pins]
            break
    return findings


def report(findings: Findings) -> int:
    """Print `findings` and return the exit code."""
    total = findings.num_looked_up + len(findings.not_looked_up)
    print(*findings.vulnerabilities, sep="\n", end="\n" if findings.vulnerabilities else "")
    for advisory, why in ACCEPTED.items():
        print(f"accepted: {advisory}: {why}")
    if findings.num_looked_up:
        num_known = len(findings.vulnerabilities)
        print(f"{num_known} known vulnerabilities in {findings.num_looked_up} pinned versions")
    if findings.not_looked_up:
        pin, reason = findings.not_looked_up[0]
        print(
            f"NOT LOOKED UP: {len(findings.not_looked_up)} of {total} pinned versions. "
            "They may have known vulnerabilities.\n"
            f"  {pin}: {reason}\n"
            "  → run this where the advisory service can be reached (a proxy may carry packages only),\n"
            '    or name another: make audit ARGS="--vulnerability-service osv", with --osv-url for a mirror',
            file=sys.stderr,
        )
    if findings.vulnerabilities:
        return SOME_KNOWN
    return NOT_LOOKED_UP if findings.not_looked_up else NONE_KNOWN


if __name__ == "__main__":
    locks = sorted((ROOT / "requirements").glob("*.txt"))
    sys.exit(report(look_up_all(load_pins(locks), sys.argv[1:], run_pip_audit)))
