"""Tell another program that a run has ended."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from csdctl.errors import CsdctlError, ExitCode, InputError
from csdctl.notify import Say
from csdctl.reporting.results import load_run_status
from csdctl.runs.directory import RunDirectory

DEADLINE_S = 60.0


def parse_command(text: str | None) -> list[str]:
    """Return a command's words, none of None.

    Raises InputError for text without words, an open quote, or a program that does not exist.
    """
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise InputError(f"--notify {text!r}: {str(error).lower()}", remedy="close the quote") from None
    if text is not None and not words:
        raise InputError("--notify is empty", remedy="give a program with its arguments")
    if words and not shutil.which(words[0]):
        raise InputError(
            f"--notify: there is no program {words[0]!r}", remedy="give its path, or a program on PATH"
        )
    return words


@contextmanager
def notifying(
    command: Sequence[str], find_run: Callable[[], RunDirectory | None], say: Say
) -> Iterator[None]:
    """Run `command`, if there is one, when the block has ended in any way and there is a run.

    CSDCTL_RUN, CSDCTL_RUN_DIRECTORY, CSDCTL_STATE and CSDCTL_EXIT_CODE tell it about the run.
    """
    code = ExitCode.FAILED
    try:
        yield
        code = ExitCode.DONE
    except CsdctlError as error:
        code = error.exit_code
        raise
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
        raise
    finally:
        if command and (run := find_run()):
            _notify(command, run, code, say)


def _notify(command: Sequence[str], run: RunDirectory, code: int, say: Say) -> None:
    """Run `command`; its failure is said and changes nothing."""
    result = {
        "CSDCTL_RUN": run.run_id,
        "CSDCTL_RUN_DIRECTORY": str(run.path.absolute()),
        "CSDCTL_STATE": load_run_status(run).state,
        "CSDCTL_EXIT_CODE": str(int(code)),
    }
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **result},
            stdin=subprocess.DEVNULL,
            timeout=DEADLINE_S,
            check=False,
            stdout=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        say(f"--notify: {command[0]} could not be run: {error}")
        return
    if done.returncode:
        say(f"--notify: {command[0]} exited with {done.returncode}")
