"""What `csdctl demo` does: the commands of a first training on an emulated fleet, as a user types them."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from csdctl.cli.app import run_command
from csdctl.emulation.fleet import stop_fleet
from csdctl.errors import InputError, RunError
from csdctl.launch.mpirun import find_mpirun
from csdctl.reporting.numbers import format_seconds
from csdctl.runs.directory import ProjectDirectory
from csdctl.terminal.streams import Streams

EXAMPLES = Path(__file__).parent.absolute()
STEPS = (
    "csdctl discover",
    "python SAMPLES fashion-mnist",
    "csdctl prepare",
    "csdctl tune",
    "csdctl train",
    "csdctl report",
)
TRANSFER_STEPS = (
    "python efficientnet_lite0.py",
    "csdctl discover",
    "python SAMPLES openclipart",
    "csdctl prepare",
    "csdctl train --strategy features --batch-size 16",
    "csdctl report",
    "csdctl train scratch.yaml --batch-size 16 --skip-doctor",
)
"""Every rank has the same batch size."""


def run_demo(directory: Path, nodes: int, cpu: str, *, is_transfer: bool, is_keeping: bool) -> int:
    """Run the demo in `directory`; return the exit code of the first command that fails, or 0."""
    streams = Streams()
    start = time.monotonic()
    find_mpirun()
    copy_example("transfer_learning" if is_transfer else "fashion_mnist", directory)
    os.chdir(directory)
    emulated = ProjectDirectory(Path.cwd()).emulated
    stop_fleet(emulated, keep=True)  # its nodes have data that sample_data.py does not write again
    streams.say(
        f"The demo runs in {Path.cwd()}. The fleet is emulated: its timings do not represent real nodes."
    )
    up = f"csdctl emulate up --nodes {nodes} --cpu {cpu}"
    samples = shlex.quote(os.path.relpath(EXAMPLES / "sample_data.py"))
    try:
        for template in [up, *(TRANSFER_STEPS if is_transfer else STEPS)]:
            step = template.replace("SAMPLES", samples)
            streams.say("")
            streams.console.print(f"$ {step}", style="bold", soft_wrap=True)
            words = shlex.split(step)
            if words[0] == "python":
                run_python(*words[1:])
                continue
            words += ["--pid", str(os.getpid())] if step == up and not is_keeping else []
            if code := run_command(words[1:], Streams()):
                return code
    finally:
        if not is_keeping:
            stop_fleet(emulated, keep=True)
    streams.say("")
    streams.say(f"The demo took {format_seconds(time.monotonic() - start)}. To continue:")
    for line in list_next(directory, "" if is_keeping else up):
        streams.say(line)
    return 0


def list_next(directory: Path, up: str) -> list[str]:
    """Return the commands to go on with; `up` starts the fleet again, '' where it is still running."""
    program = (
        "csdctl" if shutil.which("csdctl") else os.path.relpath(Path(sys.executable).with_name("csdctl"))
    )
    commands = {
        up: "start the fleet again, with its data",
        "csdctl predict latest": "classify the private images on their nodes",
        "csdctl train --batch-size 64": "equal batch sizes; then: csdctl report",
        "" if up else "csdctl emulate down": "stop the fleet",
    }
    lines = [(command.replace("csdctl", program, 1), why) for command, why in commands.items() if command]
    width = max(len(command) for command, _ in lines)
    return [
        f"  cd {shlex.quote(str(directory))}",
        *(f"  {command:{width}}  # {why}" for command, why in lines),
    ]


def copy_example(name: str, directory: Path) -> None:
    """Copy the files of an example; existing files are kept."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is not a directory", remedy="use another directory with --directory")
    directory.mkdir(parents=True, exist_ok=True)
    for file in (EXAMPLES / name).glob("*.*"):
        if not (directory / file.name).exists():
            shutil.copyfile(file, directory / file.name)


def run_python(*words: str) -> None:
    """Run a script; raises RunError when it fails."""
    if subprocess.run([sys.executable, *words], check=False).returncode != 0:
        raise RunError(f"{Path(words[0]).name} failed; its message is above")
