"""The command tree on one page, and the one place where an error becomes a message and an exit code."""

import errno
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from csdctl import __version__
from csdctl.cli.lazy import CommandTable, lazy_group
from csdctl.cli.streams import VERBOSE, Streams
from csdctl.errors import CsdctlError, ExitCode

COMMANDS: CommandTable = {
    "The fleet": {
        "discover": "Find the machines, learn what they are, and keep it beside the fleet file.",
        "doctor": "Examine the machines, and let them say hello over MPI: what is wrong, and the remedy.",
        "inventory": "Print the nodes of the fleet for other programs: Ansible, ssh, or your own.",
        "trust": "Show the nodes' host keys, and accept the new ones for all of them at once.",
    },
    "Data and code": {
        "prepare": "Put data into a form that is read fast, where it lies, the model into one that travels.",
        "deploy": "Bring a job's files, or whole trees, to every node; what is there is not sent again.",
    },
    "Training": {
        "tune": "Measure the machines and write the plan that trains most samples/s.",
        "forecast": "Forecast rate, time and energy for any number of nodes; the plan is what `tune` writes.",
        "measurements": "Show earlier measurements and how well they predicted each trial, or forget them.",
        "verify": "Prove on your model and fleet that the ranks compute what one process would.",
        "train": "Train on the host and all nodes in step, each with its own batch size.",
        "report": "Show what a run came to.",
        "clean": "End and remove what an earlier csdctl left on the machines.",
    },
    "A fleet without hardware": {
        "emulate": "A fleet on this machine: real SSH servers that share its CPU and memory.",
        "demo": "Train Fashion-MNIST on an emulated fleet, from `emulate up` to `report`.",
    },
}

app = typer.Typer(
    name="csdctl",
    help="Train neural networks where the data lies: computational storage devices and their host, in step.",
    epilog="-v, anywhere: show more; -vv: the traceback of an error too.",
    cls=lazy_group(COMMANDS),
    rich_markup_mode=None,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"csdctl {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Nothing of its own: the commands do the work."""


DISK_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EPERM)


def main() -> None:
    """Run csdctl; every error of ours ends here."""
    streams = Streams()
    arguments = [argument for argument in sys.argv[1:] if argument not in VERBOSE]
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(arguments, standalone_mode=False)
        if code == ExitCode.INTERRUPTED:  # typer's word for a KeyboardInterrupt
            streams.errors.print("interrupted: what csdctl had started was ended", style="bold red")
        sys.exit(code if isinstance(code, int) else ExitCode.DONE)
    except CsdctlError as error:
        _show(streams, error)
        sys.exit(error.exit_code)
    except typer.Exit as ending:
        sys.exit(ending.exit_code)
    except typer.Abort:
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        refused = CsdctlError(
            f"the system refused{where}: {error.strerror or type(error).__name__}",
            remedy="make room or mend permissions" if error.errno in DISK_ERRORS else "",
        )
        refused.__cause__ = error
        _show(streams, refused)
        sys.exit(ExitCode.FAILED)
    except Exception as error:
        if _is_usage(error):
            error.show()  # type: ignore[attr-defined]
            sys.exit(ExitCode.BAD_INPUT)
        streams.errors.print(
            f"csdctl failed: {type(error).__name__}: {error}", style="bold red", markup=False
        )
        streams.errors.print("  → this is a defect of csdctl; run again with -vv and report what it prints")
        _show_traceback(error)
        sys.exit(ExitCode.FAILED)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM ends csdctl the way Ctrl-C does: what runs is ended first."""
    raise KeyboardInterrupt


def _is_usage(error: Exception) -> bool:
    """Whether typer's own parser refused the command line."""
    return hasattr(error, "show") and hasattr(error, "exit_code")


def _show(streams: Streams, error: CsdctlError) -> None:
    where = f"{error.node}: " if error.node else ""
    streams.errors.print("error:", style="bold red", end=" ")
    streams.errors.print(f"{where}{error.message}", markup=False)
    if error.remedy:
        streams.errors.print(f"  → {error.remedy}", markup=False)
    _show_traceback(error)


def _show_traceback(error: Exception) -> None:
    if "-vv" in sys.argv:
        import traceback

        traceback.print_exception(error)
