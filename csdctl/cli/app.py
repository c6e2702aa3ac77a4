"""The command tree, and the one place where an error becomes a message and an exit code."""

import dataclasses
import difflib
import functools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from csdctl import __version__
from csdctl.cli.call import QUIET, VERBOSE, open_streams, own_arguments, typed
from csdctl.cli.parameters import SELECTION
from csdctl.errors import CsdctlError, ExitCode, InputError, naming_options
from csdctl.fleet.requirements import explain_import
from csdctl.runs.private import STATE_DIRECTORY, check_private
from csdctl.terminal.streams import Streams, protect_standard_streams
from csdctl.worker.protocol.disk_errors import PERMANENT, describe_os_error

COMMANDS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("Fleet", "fleet"): {
        "discover": "Find machines; record their hardware and software.",
        "trust": "Show the nodes' SSH host keys; accept new ones.",
        "doctor": "Check that the machines can train together.",
        "provision": "Install Python, TensorFlow and MPI on bare nodes.",
        "exec": "Run a command or a Fabric task on all nodes.",
        "inventory": "Export the fleet to Ansible, ssh or JSON.",
        "clean": "Remove what earlier csdctl commands left on the machines.",
    },
    ("Job", "data"): {
        "init": "Write job.yaml from a training script, or a model and data.",
        "prepare": "Convert data where it is stored, and the model.",
        "deploy": "Copy a job's files or directory trees to every node.",
    },
    ("Job", "training"): {
        "tune": "Measure the machines and write a plan.",
        "forecast": "Forecast throughput, time and energy for more nodes.",
        "verify": "Compare the fleet's gradient with Keras'.",
    },
    ("Training", "training"): {
        "train": "Train on the host and all nodes.",
        "predict": "Run a trained model where the data is stored.",
        "scale": "Train with 0, 1, 2 … nodes; show speed-up and efficiency.",
    },
    ("Training", "runs"): {
        "runs": "List, watch, stop and remove runs.",
        "report": "Show the results of one or several runs.",
    },
    ("No hardware", "fleet"): {
        "emulate": "Start and stop an emulated fleet on this machine.",
        "demo": "Train Fashion-MNIST on an emulated fleet, step by step.",
    },
}
"""Heading and module in csdctl.cli.commands → name of a command → its line in `csdctl --help`."""
HELP_OPTIONS = ["-h", "--help"]
EXEC = "exec"
RECIPE_KEYS = {"--epochs": "epochs", "--lr": "learning_rate", "--learning-rate": "learning_rate"}
"""Options of other programs, and the keys of the recipe that csdctl has for them."""
EXEC_REMEDY = "put `--` before the command and its options, such as csdctl exec -- df"
MODULES = {name: module for (_, module), section in COMMANDS.items() for name in section}
JSON = "--json"
LINES = {"train", "scale", "watch"}
"""Commands that write JSON lines: an error is one more."""
FLAGS = {
    "deadlines.start_s": "--start-timeout",
    "deadlines.silence_s": "--silence-timeout",
    "limits.global_batch": "--global-batch",
    "limits.max_global_batch": "--max-global-batch",
    "is_host_training=False": "--no-host",
    "checkpoint_interval_s": "--checkpoint-seconds",
    "num_checkpoints": "--keep",
    "num_micro_batches": "--micro-batches",
    "probe_duration_s": "--probe-seconds",
    "goal": "--for",
}
"""Options of the command line by their names in errors, where the flag is not the name with dashes."""


class CommandGroup(TyperGroup):
    """The commands under their headings, as plain text: typer's own panels take several times as long."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = MODULES  # of which typer only takes the names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, imported from csdctl.cli.commands when it is looked up. None: unknown."""
        return _build(cmd_name) if cmd_name in MODULES else None

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(MODULES)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands of `csdctl --help`. It fits on a screen with all else."""
        previous = ""
        for (heading, _), section in COMMANDS.items():
            if heading != previous:
                formatter.write(f"{heading}:\n")
            previous = heading
            formatter.indent()
            formatter.write_dl([(f"{name:12}", text) for name, text in section.items()])
            formatter.dedent()


class PlainCommand(TyperCommand):
    """A command whose options are listed by their `rich_help_panel`, as plain text."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the command line. Raises InputError for `exec df -h`, which would only print this help."""
        words = own_arguments(args)
        if self.name == EXEC and len(words) > 1 and {*HELP_OPTIONS} & {*words}:
            raise InputError("received -h beside other arguments", remedy=f"{EXEC_REMEDY} -h")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options and then the groups of rarer options of `--help`."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], SELECTION: []}
        for parameter in self.get_params(ctx):
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panel = getattr(parameter, "rich_help_panel", None) or usual
            if record := parameter.get_help_record(ctx):
                groups.setdefault(panel, []).append(record)
        for panel, records in groups.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)


@functools.cache
def _build(name: str) -> Any:
    command = getattr(import_module(f"csdctl.cli.commands.{MODULES[name]}"), name)
    if not isinstance(command, typer.Typer):
        group = typer.Typer(add_completion=False, rich_markup_mode=None)
        group.command(name, cls=PlainCommand)(command)
        command = group
    command = typer.main.get_command(command)
    command.name = name
    for part in (command, *getattr(command, "commands", {}).values()):
        for parameter in part.params:
            if parameter.default is False:  # no --no-force beside --force
                parameter.secondary_opts = []
    command.context_settings.setdefault("help_option_names", HELP_OPTIONS)  # also without the group
    return command


app = typer.Typer(
    name="csdctl",
    help="Train neural networks on computational storage devices and their host.",
    epilog="Anywhere: -v more output, -vv tracebacks, -q results only.",
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
    """Do nothing. The commands do the work."""


def explain_usage(error: Any) -> InputError | None:
    """Return the error for a command line that typer refuses, None for one without a command."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return None
    if hasattr(error.__cause__ or error.__context__, "errors"):  # pydantic's, of one value
        from csdctl.documents import describe_value_problem

        problem = (error.__cause__ or error.__context__).errors()[0]
        received = repr(problem["input"])
        error.message = describe_value_problem(problem).rstrip(".")
        error.message += "" if received in error.message else f" (received {received})"
    if hasattr(error, "possibilities"):
        error.possibilities = None  # they are of one command, and often far off
        if similar := _find_similar(error):
            error.message += f". Did you mean {' or '.join(similar)}?"
    message = error.format_message().replace("Choose from:\n\t", "Choose from: ").replace(",\n\t", ", ")
    message = message.removeprefix("Invalid value: ").rstrip(".")
    path = error.ctx.command_path if error.ctx else " ".join(["csdctl", *(MODULES.keys() & typed[:1])])
    commands = getattr(error.ctx.command, "commands", ()) if error.ctx else ()
    is_short = 0 < len(commands) < len(MODULES)
    remedy = f"see `{path} --help`" + (f"; its commands: {', '.join(commands)}" if is_short else "")
    if path == f"csdctl {EXEC}" and hasattr(error, "option_name"):
        remedy = EXEC_REMEDY
    elif getattr(error, "option_name", "") in RECIPE_KEYS:
        remedy = f"set recipe.{RECIPE_KEYS[error.option_name]} in job.yaml"
    return InputError(f"{message[0].lower()}{message[1:]}", remedy=remedy)


def _find_similar(error: Any) -> list[str]:
    if not (error.option_name.startswith("--") and error.ctx):
        return []
    names = [name for parameter in error.ctx.command.get_params(error.ctx) for name in parameter.opts]
    return difflib.get_close_matches(error.option_name, ["--quiet", *names], n=2, cutoff=0.75)


def main() -> None:
    """Run csdctl with the arguments of this process, and exit with its exit code."""
    os.umask(0o077)  # only this user may read csdctl's files
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup and `train --detach` start it
        signal.signal(signal.SIGHUP, _interrupt)
    protect_standard_streams()
    typed[:] = sys.argv[1:]
    sys.exit(run_command(typed, open_streams()))


@naming_options(lambda name: FLAGS.get(name, f"--{name.replace('_', '-')}"))
def run_command(arguments: Sequence[str], streams: Streams) -> int:  # noqa: C901
    """Run one command line and return its exit code. Every error becomes a message here."""
    typed[:] = arguments
    try:
        check_private(streams.directory / STATE_DIRECTORY)
        code = app(take_global_options(arguments), standalone_mode=False, prog_name="csdctl")
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
            if explained_usage := explain_usage(error):
                return _report(streams, arguments, explained_usage)
            error.show()  # the help, where a command is missing
            return ExitCode.BAD_INPUT
        if isinstance(error, ImportError) and (explained := explain_import(error)):
            return _report(streams, arguments, explained)
        streams.errors.print(f"csdctl failed: {type(error).__name__}: {error}", style="bold red")
        streams.errors.print("  → this is a bug in csdctl; run it again with -vv and report the output")
        _show_traceback(streams, error)
        return ExitCode.FAILED
    if code == ExitCode.INTERRUPTED:  # how typer reports a KeyboardInterrupt
        streams.errors.print("interrupted", style="bold red")
    return code if isinstance(code, int) else ExitCode.DONE


def take_global_options(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` without the options of every command. Raises InputError for -q with -v."""
    words = own_arguments(arguments)
    is_quiet, is_verbose = not {*QUIET}.isdisjoint(words), not {*VERBOSE}.isdisjoint(words)
    is_command = words[:1] == [EXEC] and len(words) > 1 and not words[1].startswith("-")
    if is_command and (is_quiet or is_verbose):
        raise InputError("received -v or -q beside the command of exec", remedy=EXEC_REMEDY)
    if is_quiet and is_verbose:
        raise InputError("-q and -v contradict each other", remedy="use only one of them")
    without = [word for word in words if word not in (*VERBOSE, *QUIET)]
    return [*without, *arguments[len(words) :]]


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM and a hang-up like Ctrl-C, so that running processes are stopped first."""
    raise KeyboardInterrupt


def _wrap_os_error(error: OSError) -> CsdctlError:
    problem, remedy = describe_os_error(error)
    if remedy:
        remedy += ", then repeat the command: files that it has not finished are as before"
    wrapped = (InputError if error.errno in PERMANENT else CsdctlError)(problem, remedy=remedy)
    wrapped.__cause__ = error
    return wrapped


def _report(streams: Streams, arguments: Sequence[str], error: CsdctlError) -> int:
    where = f"{error.node}: " if error.node else ""
    streams.errors.print("error:", style="bold red", end=" ")
    streams.errors.print(f"{where}{error.message}")
    if error.remedy:
        streams.errors.print(f"  → {error.remedy}")
    _show_traceback(streams, error)
    words = own_arguments(arguments)
    is_written = getattr(streams.stdout, "has_text", False)  # the one document of the command
    if JSON in words and (not is_written or LINES & {*words}):
        document = {
            "schema": "csdctl.error/1",
            "node": error.node,
            "message": error.message,
            "remedy": error.remedy,
            "exit_code": int(error.exit_code),
        }
        dataclasses.replace(streams, is_json=True).result_line(document)
    return error.exit_code


def _show_traceback(streams: Streams, error: Exception) -> None:
    if streams.is_debugging:
        import traceback

        streams.errors.print("".join(traceback.format_exception(error)).rstrip())
