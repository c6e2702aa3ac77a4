"""The command tree, and the one place where an error becomes a message and an exit code."""

import errno
import functools
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from csdctl import __version__
from csdctl.cli.defaults import config_path, load_defaults
from csdctl.errors import CsdctlError, ExitCode, InputError
from csdctl.fleet.requirements import explain_import
from csdctl.runs.private import STATE_DIRECTORY, check_private
from csdctl.terminal.streams import QUIET, VERBOSE, Streams, own_arguments, protect_standard_streams

COMMANDS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("The fleet", "fleet"): {
        "discover": "Find the machines of a fleet, and record their hardware and software.",
        "trust": "Show the nodes' SSH host keys, and accept all new ones at once.",
        "doctor": "Check that the machines can train together, and report how to fix what fails.",
        "provision": "Install Python, the packages for training and MPI on bare nodes.",
        "exec": "Run a command, or a Fabric task, on all nodes at once; equal answers are one row.",
        "inventory": "Print the nodes of the fleet as an Ansible inventory, an ssh_config or JSON.",
        "clean": "Stop processes and remove files that earlier csdctl commands left on the machines.",
    },
    ("Data and code", "data"): {
        "init": "Write a commented job.yaml, after a look at your model and data.",
        "prepare": "Convert data and model to the format that training reads; data stays where it is.",
        "extract": "Compute the output of the model's frozen layers for all samples, where they are stored.",
        "deploy": "Copy a job's files, or directory trees, to every node; send only what is missing there.",
    },
    ("Before training", "tuning"): {
        "tune": "Measure the machines and write the plan with the highest throughput.",
        "forecast": "Forecast throughput, time and energy for any number of nodes.",
        "measurements": "Show earlier measurements and how well they predicted each trial.",
        "verify": "Check that your fleet computes the same gradient of your model as one process.",
    },
    ("Training", "training"): {
        "train": "Train synchronously on the host and all nodes, each with its own batch size.",
        "predict": "Run a trained model over samples where they are stored; only its answers are sent.",
        "scale": "Train with 0, 1, 2 … nodes, and show speed-up, efficiency and energy.",
    },
    ("Runs", "runs"): {
        "runs": "List, watch, stop, compare and remove runs.",
        "report": "Show the results of a run, or of several side by side.",
        "export": "Write a run for TensorBoard or MLflow.",
    },
    ("A fleet without hardware", "emulation"): {
        "emulate": "Run a fleet on this machine: real SSH servers that share its CPU and memory.",
        "demo": "Train on an emulated fleet, all commands: Fashion-MNIST, or transfer learning.",
    },
}
"""Heading and module in csdctl.cli.commands → name of a command → the first line of its help."""
HELP_OPTIONS = ["-h", "--help"]
MODULES = {name: module for (_, module), section in COMMANDS.items() for name in section}


class LazyCommands(Mapping[str, Any]):
    """Commands by name; each is imported from csdctl.cli.commands when it is looked up, not when listed."""

    def __getitem__(self, name: str) -> Any:
        return _build(name)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


class CommandGroup(TyperGroup):
    """The commands of csdctl, listed under their headings as plain text.

    typer's own panels load Markdown and syntax highlighting, which takes several times as long as all else.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(MODULES)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands of `csdctl --help`."""
        for (heading, _), section in COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl(list(section.items()))


@functools.cache
def _build(name: str) -> Any:
    """Return a command, or a group of commands; raises KeyError for an unknown name."""
    found = getattr(import_module(f"csdctl.cli.commands.{MODULES[name]}"), name)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name)(found)
        found = app
    command = typer.main.get_command(found)
    command.name = name
    command.context_settings.setdefault("help_option_names", HELP_OPTIONS)  # also without the group
    return command


app = typer.Typer(
    name="csdctl",
    help="Train neural networks where the data is stored: on computational storage devices and their host.",
    epilog="Anywhere on the command line: -v prints more, -vv also the traceback of an error; -q prints "
    "results and errors alone; --color auto, always or never.",
    context_settings={"help_option_names": HELP_OPTIONS},
    cls=CommandGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"csdctl {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Do nothing; the commands do the work."""


COLOR = "--color"
COLORS = {"auto": None, "always": "FORCE_COLOR", "never": "NO_COLOR"}
"""Choice → the variable that libraries know it by (no-color.org, force-color.org)."""
JSON = "--json"
LINES = {"train", "scale", "watch"}
"""Commands that write JSON lines: an error is one more."""
DISK_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EPERM)


def main() -> None:
    """Run csdctl with the arguments of this process, and exit with its exit code."""
    os.umask(0o077)  # whatever csdctl writes is for this user alone
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup and `train --detach` start it
        signal.signal(signal.SIGHUP, _interrupt)
    protect_standard_streams()
    sys.exit(run_command(sys.argv[1:], Streams()))


def run_command(arguments: Sequence[str], streams: Streams) -> int:
    """Run one command line and return its exit code; every error becomes a message here."""
    try:
        check_private(streams.directory / STATE_DIRECTORY)
        words = take_global_options(arguments)
        code = app(words, standalone_mode=False, default_map=load_defaults(config_path(), app, words))
    except CsdctlError as error:
        return _report(streams, arguments, error)
    except typer.Exit as exit_request:
        return exit_request.exit_code
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return ExitCode.FAILED
    except OSError as error:
        return _report(streams, arguments, _wrap_os_error(error))
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's parser refuses the command line
            error.show()
            _write_error(streams, arguments, InputError(error.format_message()))  # type: ignore[attr-defined]
            return ExitCode.BAD_INPUT
        if isinstance(error, ImportError) and (explained := explain_import(error)):
            return _report(streams, arguments, explained)
        streams.errors.print(f"csdctl failed: {type(error).__name__}: {error}", style="bold red")
        streams.errors.print("  → this is a bug in csdctl; run it again with -vv and report the output")
        _show_traceback(streams, error)
        return ExitCode.FAILED
    if code == ExitCode.INTERRUPTED:  # how typer reports a KeyboardInterrupt
        streams.errors.print("interrupted: all processes that csdctl started were stopped", style="bold red")
    return code if isinstance(code, int) else ExitCode.DONE


def take_global_options(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` without the options of every command; set the colours of this process.

    Raises InputError for an unknown colour, and for -q with -v.
    """
    own = own_arguments(arguments)
    if {*QUIET} & {*own} and {*VERBOSE} & {*own}:
        raise InputError("-q and -v contradict each other", remedy="give one of them")
    rest = []
    words = iter(own)
    for word in words:
        if word == COLOR or word.startswith(f"{COLOR}="):
            _set_color(word.partition("=")[2] if "=" in word else next(words, ""))
        elif word not in (*VERBOSE, *QUIET):
            rest.append(word)
    return [*rest, *arguments[len(own) :]]


def _set_color(choice: str) -> None:
    if choice not in COLORS:
        raise InputError(f"{COLOR} {choice!r}: expected {', '.join(COLORS)}")
    for name in filter(None, COLORS.values()):
        os.environ.pop(name, None)
    if variable := COLORS[choice]:
        os.environ[variable] = "1"


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM and a hang-up like Ctrl-C, so that running processes are stopped first."""
    raise KeyboardInterrupt


def _wrap_os_error(error: OSError) -> CsdctlError:
    where = f" {error.filename}" if error.filename else ""
    wrapped = CsdctlError(
        f"the operating system refused{where}: {error.strerror or type(error).__name__}",
        remedy="free disk space, or fix the permissions" if error.errno in DISK_ERRORS else "",
    )
    wrapped.__cause__ = error
    return wrapped


def _report(streams: Streams, arguments: Sequence[str], error: CsdctlError) -> int:
    """Show an error, and return its exit code."""
    where = f"{error.node}: " if error.node else ""
    streams.errors.print("error:", style="bold red", end=" ")
    streams.errors.print(f"{where}{error.message}")
    if error.remedy:
        streams.errors.print(f"  → {error.remedy}")
    _show_traceback(streams, error)
    _write_error(streams, arguments, error)
    return error.exit_code


def _write_error(streams: Streams, arguments: Sequence[str], error: CsdctlError) -> None:
    """Write the error as JSON for a command with --json, unless its one document is already there."""
    own = own_arguments(arguments)
    is_written = getattr(streams.stdout, "has_text", False)
    if JSON not in own or (is_written and not LINES & {*own}):
        return
    document = {
        "schema": "csdctl.error/1",
        "node": error.node,
        "message": error.message,
        "remedy": error.remedy,
        "exit_code": int(error.exit_code),
    }
    streams.result_line(document, is_json=True)


def _show_traceback(streams: Streams, error: Exception) -> None:
    if streams.is_debugging:
        import traceback

        streams.errors.print("".join(traceback.format_exception(error)).rstrip())
