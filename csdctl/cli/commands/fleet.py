"""Commands on the machines of a fleet: discover, trust, doctor, provision, exec, inventory, clean."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from csdctl.cli import options
from csdctl.cli.call import Call, on_fleet, open_streams
from csdctl.cli.options import option
from csdctl.errors import InputError
from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import format_count
from csdctl.terminal.streams import format_json

if TYPE_CHECKING:
    from csdctl.workflows.discovery.inventory import NodeSource
    from csdctl.workflows.provision.machine import NodeKind


@on_fleet
def discover(
    call: Call,
    cidr: Annotated[
        list[str] | None, option("First scan this address range for machines, and write the fleet file.")
    ] = None,
    user: Annotated[str, option("User on the machines that --cidr finds; default: root.")] = "",
    key: Annotated[Path | None, option("Private key for the machines that --cidr finds.")] = None,
    port: Annotated[int | None, option("SSH port that --cidr scans; default: 22.", min=1, max=65535)] = None,
    inventory: Annotated[
        Path | None, option("First write the fleet file from this Ansible inventory.")
    ] = None,
    ssh_config: Annotated[
        Path | None,
        option("First write the fleet file from the aliases in this file, such as ~/.ssh/config."),
    ] = None,
    force: Annotated[bool, option("Overwrite an existing fleet file.")] = False,
    dry_run: Annotated[bool, option("Print the fleet file that would be written, and stop.")] = False,
) -> None:
    """Find the machines of a fleet, and record their hardware and software."""
    from csdctl.terminal.fleet import discover_document, render_fleet, show_imported
    from csdctl.terminal.nodes import CountView
    from csdctl.workflows.discovery.discover import discover
    from csdctl.workflows.discovery.inventory import import_fleet

    source = _parse_source(
        cidr or [], user=user, key=key, port=port, inventory=inventory, ssh_config=ssh_config
    )
    if source and call.failed_from:
        problem = "--failed-from selects nodes of a fleet file, and this command writes a new one"
        raise InputError(problem, remedy="use --limit and --exclude")
    if source:
        imported = import_fleet(
            source,
            call.fleet_path,
            directory=call.directory,
            limit=call.limit or (),
            exclude=call.exclude or (),
            force=force,
            is_dry_run=dry_run,
        )
        show_imported(call.streams, imported, source.name, is_dry_run=dry_run)
        if dry_run:
            return
        call.limit = call.exclude = None  # the file lists only the nodes that they select
        call.repeated_by = ["discover", "--fleet", str(call.fleet_path)]
    elif dry_run or force:
        raise InputError(
            "--dry-run and --force apply only when the fleet file is written",
            remedy="add the source to write it from: --cidr, --inventory or --ssh-config",
        )
    with CountView(call.streams.console, "probing", len(call.fleet.machines)) as view:
        result = discover(call.fleet, directory=call.directory, on_done=view.take)
    render_fleet(call.streams.console, result, verbose=call.streams.is_verbose)
    call.conclude(discover_document(result), list(result.facts), result.failed)


def _parse_source(
    cidrs: list[str],
    *,
    user: str,
    key: Path | None,
    port: int | None,
    inventory: Path | None,
    ssh_config: Path | None,
) -> "NodeSource | None":
    """Return the source that the options name, if any. Raises InputError for more than one."""
    from csdctl.workflows.discovery import inventory as sources

    with_cidr = {"--user": user, "--key": key, "--port": port}
    if unused := [name for name, value in with_cidr.items() if value and not cidrs]:
        raise InputError(f"{unused[0]} applies only to machines that --cidr finds", remedy="add --cidr RANGE")
    num_sources = sum(map(bool, (cidrs, inventory, ssh_config)))
    if num_sources > 1:
        raise InputError(
            f"a fleet file is written from one source, received {num_sources}",
            remedy="choose one of --cidr, --inventory and --ssh-config",
        )
    if cidrs:
        path = Path(os.path.abspath(key.expanduser())) if key else None
        return sources.address_ranges(cidrs, user or "root", path, port or 22)
    if inventory:
        return sources.ansible_inventory(inventory.expanduser())
    return sources.ssh_config(ssh_config.expanduser()) if ssh_config else None


@on_fleet
def trust(
    call: Call,
    forget: Annotated[
        bool, option("Delete the accepted keys of these nodes, after they were reinstalled.")
    ] = False,
    dry_run: options.DryRunOption = False,
    yes: options.YesOption = False,
) -> None:
    """Show the nodes' SSH host keys, and accept all new ones at once."""
    from csdctl.terminal.fleet import TrustScreen
    from csdctl.workflows.discovery.discover import check_forgotten, forget_keys, keep_named, review_keys

    screen = TrustScreen(call.streams, call.fleet, yes=yes, is_dry_run=dry_run)
    if forget:
        is_chosen = yes or dry_run or call.limit or call.exclude or call.failed_from
        call.streams.confirm("Delete the accepted keys of all nodes?", yes=bool(is_chosen))
        fleet = keep_named(call.fleet, call.limit or ())
        screen.show_forgotten(forget_keys(fleet.nodes, call.streams.project, is_dry_run=dry_run))
        if not dry_run:
            check_forgotten(fleet, call.directory)
        return
    num_accepted = review_keys(call.fleet, call.streams.project, screen.show, is_dry_run=dry_run)
    if dry_run:
        call.streams.say("dry run: no key was accepted")
    elif num_accepted:
        call.streams.say(f"{format_count(num_accepted, 'key')} accepted: {call.streams.project.known_hosts}")
    call.conclude(screen.build_document(), [*screen.keys, *screen.failed], screen.failed, is_dry=dry_run)


@on_fleet
def doctor(
    call: Call,
    timeout: Annotated[
        float, option("Timeout of all checks in seconds.", min=1, envvar="CSDCTL_TIMEOUT")
    ] = 180.0,
    connect_timeout: Annotated[
        float, option("Seconds to connect to a node.", min=1, envvar="CSDCTL_CONNECT_TIMEOUT")
    ] = 10.0,
    mpi_timeout: Annotated[
        float,
        option(
            "Timeout in seconds for each rank to start and for each link to connect.",
            min=1,
            envvar="CSDCTL_MPI_TIMEOUT",
        ),
    ] = 60.0,
) -> None:
    """Check that the machines can train together, and report how to fix what fails."""
    from csdctl.terminal.fleet import ExaminationView, doctor_document
    from csdctl.workflows.doctor.doctor import check_fitness, examine_fleet
    from csdctl.workflows.workspace.workspace import record_failed

    streams = call.streams
    with ExaminationView(streams.console, call.fleet, is_verbose=streams.is_verbose) as view:
        examination = examine_fleet(
            call.fleet,
            call.directory,
            view.show,
            deadline_s=timeout,
            connect_deadline_s=connect_timeout,
            mpi_deadline_s=mpi_timeout,
        )
    view.finish(examination)
    streams.result(doctor_document(examination))
    record_failed(streams.project, call.command, call.fleet.machines, examination.red)
    check_fitness(examination)


@on_fleet
def provision(
    call: Call,
    collect: Annotated[bool, option("Only collect what the nodes need, on this host.")] = False,
    send: Annotated[bool, option("Only collect and send; install nothing. Needs no Ansible.")] = False,
    uninstall: Annotated[
        bool, option("Remove everything that was installed, and csdctl's files there.")
    ] = False,
    kind: Annotated[
        list[str] | None,
        option(
            "With --collect: kind of node, such as aarch64 or x86_64:3.12; connects to no node.",
            metavar="ARCHITECTURE[:PYTHON]",
        ),
    ] = None,
    prefix: Annotated[str, option("Installation directory, the same on all nodes.")] = "/opt/csdctl",
    bundles: Annotated[
        Path | None, option("Directory of the collected files.  [default: .csdctl/provision]")
    ] = None,
    lock: Annotated[Path | None, option("Your own lock file of Python packages, with hashes.")] = None,
    with_keras: Annotated[
        bool,
        option(
            "Also install Python's TensorFlow and Keras, for a step that cannot be compiled "
            "and for your functions that import them."
        ),
    ] = False,
    set_: Annotated[
        list[str] | None,
        option("Set a variable of the role, such as node_firewall=true.", "--set", metavar="NAME=VALUE"),
    ] = None,
    dry_run: Annotated[
        bool, option("Show what would be sent and changed, without doing it.", "--dry-run", "--check")
    ] = False,
    yes: options.YesOption = False,
) -> None:
    """Install Python, the packages for training and MPI on bare nodes."""
    from csdctl.terminal.nodes import TransferView, collected_document, provision_document, render_provisioned
    from csdctl.workflows.provision import provision as workflow
    from csdctl.workflows.provision.bundle import LOCK

    streams = call.streams
    request = workflow.ProvisionRequest(
        bundles=(bundles or streams.project.state / "provision").absolute(),
        prefix=prefix.rstrip("/"),
        lock=lock or LOCK,
        with_keras=with_keras,
        is_dry_run=dry_run,
        sends_only=send,
        values=_parse_values(set_ or ()),
    )
    if kind and not collect:
        raise InputError("--kind applies only with --collect", remedy="add --collect, or leave out --kind")
    if (collect and (uninstall or dry_run)) or (uninstall and send):
        raise InputError(
            "received two of --collect, --send and --uninstall, or --collect with --dry-run",
            remedy="use only one of them",
        )
    if collect:
        collected = (
            [request.collect(node_kind, streams.say) for node_kind in _parse_kinds(kind)]
            if kind
            else workflow.collect_fleet(request, call.fleet, call.directory, streams.say)
        )
        streams.result(collected_document(collected))
        return
    if uninstall and not dry_run:
        names = format_node_names(node.name for node in call.fleet.nodes)
        streams.confirm(f"Remove {prefix} and ~/.csdctl, with prepared data, from {names}?", yes=yes)
    with TransferView(streams.console, len(call.fleet.nodes)) as view:
        if uninstall:
            outcomes = workflow.uninstall(request, call.fleet, directory=call.directory, on_task=view.task)
        else:
            outcomes = workflow.provision(
                request,
                call.fleet,
                directory=call.directory,
                say=streams.say,
                on_progress=view.advance,
                on_sent=view.sent,
                on_task=view.task,
            )
    render_provisioned(streams.console, outcomes, request)
    call.finish(outcomes, provision_document(outcomes, request), is_dry=dry_run)


def _parse_values(texts: Sequence[str]) -> dict[str, str | bool]:
    """Return the variables of `--set` by name. Raises InputError for an unusable one."""
    parsed: dict[str, str | bool] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(
                f"--set {text!r} is not NAME=VALUE", remedy="for example --set node_firewall=true"
            )
        parsed[name] = value == "true" if value in ("true", "false") else value  # as roles expect
    return parsed


def _parse_kinds(texts: Sequence[str]) -> "list[NodeKind]":
    """Return the kinds of `--kind`. Without a version, Python itself is collected, too."""
    from csdctl.workflows.provision.machine import ARCHITECTURES, PYTHONS, SENT_PYTHON, NodeKind

    kinds = []
    for text in texts:
        architecture, colon, python = text.partition(":")
        if architecture not in ARCHITECTURES or (colon and python not in PYTHONS):
            raise InputError(
                f"--kind {text!r} is unknown",
                remedy=f"use {' or '.join(ARCHITECTURES)}; with {', '.join(PYTHONS)} if nodes have that",
            )
        kinds.append(NodeKind(architecture, python or SENT_PYTHON, sends_python=not colon))
    return kinds


@on_fleet
def exec(
    call: Call,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help="After `--`: a command with its arguments, or one quoted shell line; or the task's options.",
        ),
    ] = None,
    host: Annotated[bool, option("Run it on the host too, in this directory.")] = False,
    task: Annotated[
        str | None,
        option("Run this Fabric task instead, on a connection to each node.", metavar="FILE.py:TASK"),
    ] = None,
    timeout: Annotated[
        float | None,
        option("Timeout of a command in seconds; default: 60, with --task 600.", min=0.001, max=7 * 86_400),
    ] = None,
    connect_timeout: Annotated[
        float, option("Seconds to connect to a node.", min=0.001, envvar="CSDCTL_CONNECT_TIMEOUT")
    ] = 10.0,
) -> None:
    """Run a command, or a Fabric task, on all nodes at once. Identical output is grouped."""
    from csdctl.terminal.nodes import CountView, exec_document, render_answers
    from csdctl.workflows.exec.run_command import ExecOptions, parse_command, run_command

    words = command or []
    chosen = ExecOptions((600.0 if task else 60.0) if timeout is None else timeout, connect_timeout, host)
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
    call.conclude(exec_document(result, words, task), list(result.outcomes), result.failed)


def inventory(
    fleet: options.FleetOption = options.DEFAULT_FLEET,
    form: Annotated[
        Literal["ansible", "json", "ssh-config"],
        option("ansible: for ansible-playbook -i; ssh-config: for ssh -F; or json.", "--format"),
    ] = "ansible",
    output: Annotated[Path | None, option("Write to this file instead of stdout.", "--output", "-o")] = None,
    force: options.ForceOption = False,
    limit: options.LimitOption = None,
    exclude: options.ExcludeOption = None,
    json: Annotated[bool, option("Short for --format json.")] = False,
) -> None:
    """Print the nodes of the fleet as an Ansible inventory, an ssh_config or JSON."""
    from csdctl.documents import check_output, save_text
    from csdctl.terminal.fleet import fleet_document
    from csdctl.workflows.discovery.inventory import render_ansible, render_ssh_config
    from csdctl.workflows.workspace.workspace import choose_fleet

    streams = open_streams()
    if output:
        check_output(output, "--output", force=force)
    chosen = choose_fleet(fleet, limit, exclude)
    if form == "json" or json:
        text = format_json(fleet_document(chosen), indent=2) + "\n"
    else:
        render = render_ansible if form == "ansible" else render_ssh_config
        text = render(chosen, streams.directory)
    if output:
        save_text(output, text)
        streams.say(f"{format_count(chosen.nodes, 'node')}: {output} written")
    else:
        streams.write(text)


@on_fleet
def clean(
    call: Call,
    everything: Annotated[
        bool, option("Also remove prepared data, and deployed trees with their data, on the nodes.")
    ] = False,
    unused: Annotated[
        bool, option("Remove stored files that no deployed tree uses; they are sent again when needed.")
    ] = False,
    computed: Annotated[
        bool,
        option("Remove features and predictions on host and nodes; they are computed again when needed."),
    ] = False,
    kill: Annotated[bool, option("Also stop a csdctl that is running there now, from any host.")] = False,
    dry_run: options.DryRunOption = False,
    yes: options.YesOption = False,
) -> None:
    """Stop processes and remove files that earlier csdctl commands left on the machines."""
    from csdctl.launch.leftovers import CleanupOptions, clean
    from csdctl.terminal.fleet import render_cleaned

    if everything and not dry_run:
        count = format_count(call.fleet.nodes, "node")
        call.streams.confirm(
            f"Remove all files of csdctl on {count}, prepared data and deployed trees too?", yes=yes
        )
    outcomes = clean(
        call.fleet,
        CleanupOptions(
            is_ending=not dry_run,
            is_removing=not dry_run,
            is_removing_all=everything,
            is_removing_computed=computed,
            is_pruning=unused and not dry_run,
            is_forced=kill,
        ),
        directory=call.directory,
        on_done=lambda outcome: render_cleaned(call.streams.console, outcome, is_dry=dry_run),
    )
    if not everything:
        call.streams.say(
            "prepared data, logs and deployed trees stay on the nodes: --everything removes them"
        )
    call.finish(outcomes, schema="csdctl.clean/1", is_dry=dry_run)
