"""Convert OpenSSH targets to nodes with `ssh -G`, which prints settings without connecting."""

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
    SshSettings,
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
"""`Match exec` in an ssh_config runs commands, which may take time."""


def resolve_targets(
    targets: Sequence[Target], warnings: Mapping[str, list[str]], *, directory: Path
) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """Return the nodes for `targets`, and combined notes on where csdctl deviates from ssh.

    `warnings` are earlier notes. Raises InputError for unsupported settings.
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
    """Resolves targets and their jump hosts with `ssh -G`."""

    known_hosts: Sequence[Path]
    notes: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _defaults: SshSettings = field(init=False)
    _cache: dict[tuple[str, ...], SshSettings] = field(default_factory=dict)
    """A cache: many nodes are behind one jump host."""

    def __post_init__(self) -> None:
        self._defaults = self._query(Target("", "localhost", ("-F", "none")))

    def resolve(self, target: Target) -> Node:
        """Return the node for `target`; raises InputError for unsupported settings."""
        return self._resolve(target, MAX_HOPS, name=target.name)

    def _resolve(self, target: Target, hops_left: int, name: str, before: Node | None = None) -> Node:
        if not hops_left:
            raise InputError(f"{name}: more than {MAX_HOPS} jump hosts, or a cycle of jumps")
        settings = self._query(target)
        for note in list_notes(settings, self._defaults, self.known_hosts, Path.home()):
            where = "" if target.name == name else f"jump host {target.name}: "
            self.notes[where + note].append(name)
        jump = before or self._jump(target, settings, hops_left - 1, name)
        return build_node(target, written_identities(settings, self._defaults), jump, Path.home())

    def _jump(self, target: Target, settings: SshSettings, hops_left: int, name: str) -> Node | None:
        command = settings.get("proxycommand", ["none"])[0]
        if command not in ("", "none"):
            forwarded = parse_proxy_command(command)
            if not forwarded:
                raise InputError(
                    f"{name}: ProxyCommand {command!r} is not supported",
                    remedy="write it as ProxyJump, or skip the node with --exclude",
                )
            host, arguments = forwarded
            return self._resolve(Target(Hop(host).name, host, arguments), hops_left, name)
        text = settings.get("proxyjump", ["none"])[0]
        try:
            hops = parse_jump(text)
        except ValueError as error:
            raise InputError(f"{name}: ProxyJump {text!r}: {error}") from None
        before: Node | None = None
        for hop in hops:
            before = self._resolve(_hop_target(hop, target), hops_left, name, before)
        return before

    def _query(self, target: Target) -> SshSettings:
        command = tuple(build_query(target))
        if command not in self._cache:
            self._cache[command] = self._run_ssh(target, command)
        return self._cache[command]

    def _run_ssh(self, target: Target, command: tuple[str, ...]) -> SshSettings:
        try:
            printed = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=QUERY_DEADLINE_S,
                check=False,
            )
        except FileNotFoundError:
            raise InputError("`ssh` is not installed here", remedy="install the OpenSSH client") from None
        except subprocess.TimeoutExpired:
            raise CsdctlError(
                f"{target.name}: `ssh -G {target.host}` did not end in {QUERY_DEADLINE_S:.0f} s",
                remedy="a `Match exec` in an ssh_config may hang",
            ) from None
        if printed.returncode:
            lines = printed.stderr.strip().splitlines()[:1] or ["no message"]
            raise InputError(f"{target.name}: `ssh -G {target.host}` failed: {lines[0]}")
        return parse_settings(printed.stdout)


def _hop_target(hop: Hop, target: Target) -> Target:
    """Return the target of a ProxyJump hop: OpenSSH passes only the configuration file on to it."""
    files = [file for flag, file in pairwise(target.arguments) if flag == "-F"]
    arguments = ["-F", files[0]] if files else []
    arguments += ["-p", str(hop.port)] if hop.port else []
    arguments += ["-l", hop.user] if hop.user else []
    return Target(hop.name, hop.address, tuple(arguments))
