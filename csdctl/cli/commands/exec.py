"""`csdctl exec`."""

import shlex
from typing import Annotated

import typer

from csdctl.cli.call import Call, on_fleet


@on_fleet
def exec(
    call: Call,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="After `--`: a command with its arguments, or one quoted shell line; of a task, KEY=VALUE.",
        ),
    ] = None,
    host: Annotated[bool, typer.Option("--host", help="Run it on the host too, in this directory.")] = False,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:TASK", help="Run this Fabric task instead, on a connection to each node."
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a command is ended; default: 60, of a task's commands 600."),
    ] = None,
    connect_deadline: Annotated[
        float, typer.Option(envvar="CSDCTL_CONNECT_DEADLINE", help="Seconds to connect to a node.")
    ] = 10.0,
) -> None:
    """Run a command, or a Fabric task, on all nodes at once; equal answers are one row."""
    from csdctl.terminal.nodes import CountView, exec_document, render_answers
    from csdctl.workflows.exec.run_command import ExecOptions, parse_command, run_command

    words = command or []
    chosen = ExecOptions((600.0 if task else 60.0) if timeout is None else timeout, connect_deadline, host)
    if task is None:
        parse_command(words)
    directory = call.directory
    with CountView(call.streams.console, "running", len(call.fleet.nodes) + host) as view:
        if task is None:
            result = run_command(call.fleet, words, directory=directory, options=chosen, on_done=view.show)
        else:
            from csdctl.workflows.exec.run_task import run_task

            result = run_task(call.fleet, task, words, directory=directory, options=chosen)
    render_answers(call.streams, result)
    retry = shlex.join(["--task", task, *words] if task else ["--", *words])
    call.conclude(exec_document(result, words, task), result.machines, result.failed, f" {retry}")
