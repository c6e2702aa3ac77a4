"""A worker that is honest until its time comes: then it prints the lines of a file, once, and goes on.

    hostile_worker.py ATTACK PYTHON ARGUMENT…

Runs `PYTHON ARGUMENT…`, a rank, and passes on what it prints. ATTACK is a file of JSON: after how many of the
rank's progress events the attack begins (0: before its first line), and what is printed then.
"""

import json
import subprocess
import sys
from pathlib import Path


def main() -> int:
    attack = Path(sys.argv[1])
    with subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE) as rank:
        assert rank.stdout
        num_reports = 0
        for line in rank.stdout:
            if attack.exists() and num_reports >= json.loads(attack.read_text())["after"]:
                begin(attack)
            num_reports += b'"event":"Progress"' in line
            write(line)
    return rank.returncode


def begin(attack: Path) -> None:
    content = json.loads(attack.read_text())
    attack.unlink()
    for text, count in content["lines"]:
        for _ in range(count):
            write(text.encode() + b"\n")


def write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
