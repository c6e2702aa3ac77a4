"""Commands on the machines of a fleet, and for an emulated one: emulate, demo."""

import os
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

import csdctl
from csdctl.cli import options, parameters
from csdctl.cli.call import Call, on_fleet, open_streams
from csdctl.cli.parameters import argument, option, parse_age, parse_size
from csdctl.errors import InputError
from csdctl.fleet.names import format_node_names
from csdctl.reporting.numbers import format_count
from csdctl.terminal.streams import format_json

if TYPE_CHECKING:
    from csdctl.workflows.discovery.inventory import NodeSource
    from csdctl.workflows.provision.machine import NodeKind

emulate = parameters.group(
    help="Run a fleet on this machine: real SSH servers that share its CPU and memory."
)
CPU = option(
    "0.25", "CPU share in cores, for all nodes, or for each: 0.5,0.25,0.1.", metavar="CORES[,CORES…]"
)


@on_fleet
def discover(
    call: Call,
    cidr: list[str] | None = option(
        None, "First scan this address range for machines, and write the fleet file."
    ),
    user: str = option("", "User on the machines that --cidr finds; default: root."),
    key: Path | None = option(None, "Private key for the machines that --cidr finds."),
    port: int | None = option(None, "SSH port that --cidr scans; default: 22.", min=1, max=65535),
    inventory: Path | None = option(None, "First write the fleet file from this Ansible inventory."),
    ssh_config: Path | None = option(
        None, "First write the fleet file from the aliases in this file, such as ~/.ssh/config."
    ),
    force: bool = option(False, "Overwrite an existing fleet file."),
    dry_run: bool = option(False, "Print the fleet file that would be written, and stop."),
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
    forget: bool = option(False, "Delete the accepted keys of these nodes, after they were reinstalled."),
    dry_run: bool = options.DRY_RUN,
    yes: bool = options.YES,
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
    timeout: float = option(180.0, "Timeout of all checks in seconds.", min=1, envvar="CSDCTL_TIMEOUT"),
    connect_timeout: float = options.CONNECT_TIMEOUT,
    mpi_timeout: float = option(
        60.0,
        "Timeout in seconds for each rank to start and for each link to connect.",
        min=1,
        envvar="CSDCTL_MPI_TIMEOUT",
    ),
) -> None:
    """Check that the machines can train together, and report how to fix what fails."""
    from csdctl.terminal.fleet import ExaminationView, doctor_document
    from csdctl.workflows.preflight.examination import check_fitness, examine_fleet
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
    collect: bool = option(False, "Only collect what the nodes need, on this host."),
    send: bool = option(False, "Only collect and send; install nothing. Needs no Ansible."),
    uninstall: bool = option(False, "Remove everything that was installed, and csdctl's files there."),
    kind: list[str] | None = option(
        None,
        "With --collect: kind of node, such as aarch64 or x86_64:3.12; connects to no node.",
        metavar="ARCHITECTURE[:PYTHON]",
    ),
    prefix: str = option("/opt/csdctl", "Installation directory, the same on all nodes."),
    bundles: Path | None = option(None, "Directory of the collected files.  [default: .csdctl/provision]"),
    lock: Path | None = option(None, "Your own lock file of Python packages, with hashes."),
    with_keras: bool = option(
        False,
        "Also install Python's TensorFlow and Keras, for a step that cannot be compiled "
        "and for your functions that import them.",
    ),
    set_: list[str] | None = option(
        None, "Set a variable of the role, such as node_firewall=true.", "--set", metavar="NAME=VALUE"
    ),
    dry_run: bool = option(
        False, "Show what would be sent and changed, without doing it.", "--dry-run", "--check"
    ),
    yes: bool = options.YES,
) -> None:
    """Install Python, the packages for training and MPI on bare nodes."""
    from csdctl.terminal.nodes import TransferView, collected_document, provision_document, render_provisioned
    from csdctl.workflows.provision import provision as workflow
    from csdctl.workflows.provision.bundle import LOCK, ProvisionRequest, collect_bundle

    streams = call.streams
    request = ProvisionRequest(
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
            [collect_bundle(request, node_kind, streams.say) for node_kind in _parse_kinds(kind)]
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
    command: list[str] | None = argument(
        None,
        "After `--`: a command with its arguments, or one quoted shell line; or the task's options.",
        metavar="COMMAND",
    ),
    host: bool = option(False, "Run it on the host too, in this directory."),
    task: str | None = option(
        None, "Run this Fabric task instead, on a connection to each node.", metavar="FILE.py:TASK"
    ),
    timeout: float | None = option(
        None, "Timeout of a command in seconds; default: 60, with --task 600.", min=0.001, max=7 * 86_400
    ),
    connect_timeout: float = options.CONNECT_TIMEOUT,
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
    fleet: Path = options.FLEET,
    form: Literal["ansible", "json", "ssh-config"] = option(
        "ansible", "ansible: for ansible-playbook -i; ssh-config: for ssh -F; or json.", "--format"
    ),
    output: Path | None = option(None, "Write to this file instead of stdout.", "--output", "-o"),
    force: bool = options.FORCE,
    limit: list[str] | None = options.LIMIT,
    exclude: list[str] | None = options.EXCLUDE,
    json: bool = option(False, "Short for --format json."),
) -> None:
    """Print the nodes of the fleet as an Ansible inventory, an ssh_config or JSON."""
    from csdctl.documents import check_output
    from csdctl.terminal.fleet import fleet_document
    from csdctl.worker.protocol.durable_files import save_text
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
    everything: bool = option(
        False, "Also remove prepared data, and deployed trees with their data, on the nodes."
    ),
    unused: bool = option(
        False, "Remove stored files that no deployed tree uses; they are sent again when needed."
    ),
    computed: bool = option(
        False, "Remove features and predictions on host and nodes; they are computed again when needed."
    ),
    older_than: float | None = option(
        None, "Remove data, models, files and logs unused for so long.", parser=parse_age, metavar="AGE"
    ),
    kill: bool = option(False, "Also stop a csdctl that is running there now, from any host."),
    dry_run: bool = options.DRY_RUN,
    yes: bool = options.YES,
) -> None:
    """Stop processes and remove files that earlier csdctl commands left on the machines."""
    from csdctl.launch.leftovers import CleanupOptions, clean
    from csdctl.terminal.fleet import render_cleaned

    chosen = CleanupOptions(
        is_removing_all=everything,
        is_removing_computed=computed,
        is_pruning=unused,
        unused_s=older_than,
        is_forced=kill,
    )

    def visit(*, is_dry: bool) -> Any:
        return clean(
            call.fleet,
            replace(chosen, is_ending=not is_dry, is_removing=not is_dry),
            directory=call.directory,
            on_done=lambda outcome: render_cleaned(call.streams.console, outcome, is_dry=is_dry),
        )

    if not (dry_run or yes) and (everything or computed or unused or older_than is not None):
        visit(is_dry=True)
        call.streams.confirm(f"Remove this on host and {format_count(call.fleet.nodes, 'node')}?", yes=False)
    outcomes = visit(is_dry=dry_run)
    if not everything and older_than is None:
        call.streams.say(
            "prepared data, logs and deployed trees stay on the nodes: --everything removes them"
        )
    call.finish(outcomes, schema="csdctl.clean/1", is_dry=dry_run)


@emulate.command()
def up(
    nodes: int | None = option(
        None, "Number of nodes; default: as many as --cpu has values, or else 4.", min=1, max=64
    ),
    cpu: str = CPU,
    memory: str = option("2G", "Memory of each node, such as 512M or 2G."),
    fleet: Path = option(parameters.DEFAULT_FLEET, "Path of the fleet file to write."),
    pid: int | None = option(None, "End the fleet when this process ends.", envvar="CSDCTL_EMULATE_PID"),
    json: bool = options.JSON,
) -> None:
    """Start an emulated fleet and write its fleet file."""
    from csdctl.emulation import fleet as emulated
    from csdctl.terminal.fleet import show_started

    streams = open_streams(is_json=json)
    directory = streams.project.emulated
    spec = emulated.EmulatedSpec(emulated.parse_shares(cpu, nodes), parse_size(memory))
    was_up = emulated.is_up(directory)
    path = emulated.start_fleet(directory, spec, fleet_path=fleet, owner_pid=pid)
    status = emulated.fleet_status(directory)
    show_started(streams, path, status, was_up=was_up, owner_pid=None if was_up else pid)


@emulate.command()
def status(json: bool = options.JSON) -> None:
    """Show the current state of every node of the emulated fleet."""
    from csdctl.emulation.fleet import fleet_status
    from csdctl.terminal.fleet import show_status

    streams = open_streams(is_json=json)
    show_status(streams, fleet_status(streams.project.emulated))


@emulate.command()
def down(
    keep: bool = option(False, "Keep the nodes' files: the same `emulate up` starts them again."),
    json: bool = options.JSON,
) -> None:
    """Stop the emulated fleet and remove its files, even after a crash."""
    from csdctl.emulation.fleet import stop_fleet
    from csdctl.terminal.fleet import show_stopped

    streams = open_streams(is_json=json)
    show_stopped(streams, stop_fleet(streams.project.emulated, keep=keep))


def demo(
    directory: Path = option(Path("demo"), "Working directory of the demo."),
    nodes: int = option(3, "Number of emulated nodes.", min=1, max=64),
    cpu: str = CPU,
    transfer: bool = option(False, "Train on a pretrained base, and from scratch; downloads 150 MB."),
    keep: bool = option(False, "Leave the emulated fleet running."),
) -> None:
    """Run all commands on an emulated fleet: Fashion-MNIST, or transfer learning."""
    package = Path(csdctl.__file__).parent  # the wheel has the examples in it, the repository beside it
    [script, *_] = [*package.glob("examples/demo.py"), *package.parent.glob("examples/demo.py")]
    run_demo = runpy.run_path(str(script))["run_demo"]
    if code := run_demo(directory, nodes, cpu, is_transfer=transfer, is_keeping=keep):
        raise typer.Exit(code)
