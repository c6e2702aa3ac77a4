"""Targets of OpenSSH to nodes: `ssh -G`, which connects to nothing, is asked what each of them is."""

import os
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from csdctl.errors import CsdctlError, InputError
from csdctl.fleet.jumps import MAX_HOPS, Hop, parse_jump
from csdctl.fleet.model import Node
from csdctl.fleet.openssh import (
    Settings,
    Target,
    build_node,
    build_query,
    list_notes,
    parse_proxy_command,
    parse_settings,
    written_identities,
)
from csdctl.fleet.ranges import show_names
from csdctl.transport.known_hosts import known_hosts_paths
from csdctl.transport.many import run_on_all, values_or_raise

QUERY_DEADLINE_S = 30.0
"""A `Match exec` in an ssh_config runs a command."""


def resolve_targets(
    targets: Sequence[Target], warnings: Mapping[str, list[str]], *, directory: Path
) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """The nodes that `targets` are, and what csdctl does otherwise, folded; `warnings` are those so far.

    Raises InputError for what csdctl cannot do.
    """
    resolver = _Resolver(known_hosts_paths(directory))
    resolver.notes.update(warnings)
    outcomes = run_on_all(
        {target.name: target for target in targets}, resolver.resolve, max_workers=os.cpu_count() or 1
    )
    nodes = tuple(values_or_raise(outcomes, "reading the nodes").values())
    order = {target.name: number for number, target in enumerate(targets)}
    folded = [
        f"{show_names(sorted(set(names), key=lambda name: order.get(name, 0)))}: {note}" if names else note
        for note, names in resolver.notes.items()
    ]
    return nodes, tuple(folded)


@dataclass
class _Resolver:
    """Asks `ssh -G` what a target is, and follows its jump hosts."""

    known_hosts: Sequence[Path]
    notes: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _defaults: Settings = field(init=False)
    _answers: dict[tuple[str, ...], Settings] = field(default_factory=dict)
    """Many nodes are behind one jump host."""

    def __post_init__(self) -> None:
        self._defaults = self._ask(Target("", "localhost", ("-F", "none")))

    def resolve(self, target: Target) -> Node:
        """The node that `target` is; raises InputError for what csdctl cannot do."""
        return self._resolve(target, MAX_HOPS, asked_by=target.name)

    def _resolve(self, target: Target, hops_left: int, asked_by: str, before: Node | None = None) -> Node:
        if not hops_left:
            raise InputError(f"{asked_by}: more than {MAX_HOPS} jump hosts, or jumps in a circle")
        settings = self._ask(target)
        for note in list_notes(settings, self._defaults, self.known_hosts, Path.home()):
            where = "" if target.name == asked_by else f"jump host {target.name}: "
            self.notes[where + note].append(asked_by)
        jump = before or self._jump(target, settings, hops_left - 1, asked_by)
        return build_node(target, written_identities(settings, self._defaults), jump, Path.home())

    def _jump(self, target: Target, settings: Settings, hops_left: int, asked_by: str) -> Node | None:
        command = settings.get("proxycommand", ["none"])[0]
        if command not in ("", "none"):
            forwarded = parse_proxy_command(command)
            if not forwarded:
                raise InputError(
                    f"{asked_by}: ProxyCommand {command!r} is not supported",
                    remedy="write it as ProxyJump, or leave the node out with --exclude",
                )
            host, arguments = forwarded
            return self._resolve(Target(Hop(host).name, host, arguments), hops_left, asked_by)
        text = settings.get("proxyjump", ["none"])[0]
        try:
            hops = parse_jump(text)
        except ValueError as error:
            raise InputError(f"{asked_by}: ProxyJump {text!r}: {error}") from None
        before: Node | None = None
        for hop in hops:
            before = self._resolve(_hop_target(hop, target), hops_left, asked_by, before)
        return before

    def _ask(self, target: Target) -> Settings:
        query = tuple(build_query(target))
        if query not in self._answers:
            self._answers[query] = self._ask_ssh(target, query)
        return self._answers[query]

    def _ask_ssh(self, target: Target, query: tuple[str, ...]) -> Settings:
        try:
            printed = subprocess.run(
                query,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=QUERY_DEADLINE_S,
                check=False,
            )
        except FileNotFoundError:
            raise InputError("there is no `ssh` here", remedy="install OpenSSH's client") from None
        except subprocess.TimeoutExpired:
            raise CsdctlError(
                f"{target.name}: `ssh -G {target.host}` did not end in {QUERY_DEADLINE_S:.0f} s",
                remedy="a `Match exec` in an ssh_config may hang",
            ) from None
        if printed.returncode:
            said = printed.stderr.strip().splitlines()[:1] or ["no message"]
            raise InputError(f"{target.name}: `ssh -G {target.host}` refuses: {said[0]}")
        return parse_settings(printed.stdout)


def _hop_target(hop: Hop, target: Target) -> Target:
    """A step of a ProxyJump: of the command line, OpenSSH gives it the configuration file and no more."""
    files = [file for flag, file in pairwise(target.arguments) if flag == "-F"]
    arguments = ["-F", files[0]] if files else []
    arguments += ["-p", str(hop.port)] if hop.port else []
    arguments += ["-l", hop.user] if hop.user else []
    return Target(hop.name, hop.address, tuple(arguments))
