"""Where nodes come from: ranges of addresses, an Ansible inventory, ssh_config; and their fleet.yaml."""

import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from csdctl.documents import save_text
from csdctl.errors import InputError
from csdctl.fleet.ansible.config import load_config
from csdctl.fleet.ansible.files import load_inventory
from csdctl.fleet.ansible.targets import list_targets
from csdctl.fleet.model import HOST_NAME, Fleet, Node
from csdctl.fleet.names import NAME
from csdctl.fleet.openssh import Target
from csdctl.fleet.select import select_names, select_nodes
from csdctl.fleet.ssh_aliases import list_aliases
from csdctl.fleet.writing import render_fleet
from csdctl.workflows.discovery.scan import scan
from csdctl.workflows.discovery.ssh_targets import resolve_targets


@dataclass(frozen=True)
class FoundFleet:
    """A fleet from a source, its file's text, and what of the source csdctl does otherwise."""

    fleet: Fleet
    text: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoundNodes:
    """Nodes of a source, and what of it csdctl does otherwise."""

    nodes: tuple[Node, ...]
    warnings: tuple[str, ...] = ()
    network: str = ""


class NodeSource(Protocol):
    """Where nodes come from."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def origin(self) -> str:
        """The first line of the file that is written from it."""

    def find(self, directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> FoundNodes:
        """The nodes that `limit` and `exclude` leave; raises InputError or NoNodeReachableError."""


@dataclass(frozen=True)
class AddressRanges:
    """Machines that answer in some address ranges."""

    cidrs: tuple[str, ...]
    user: str = "root"
    key: Path | None = None
    port: int = 22
    interface: str = ""

    @property
    def name(self) -> str:
        """The ranges."""
        return ", ".join(self.cidrs)

    @property
    def origin(self) -> str:
        """How they were found."""
        return "Found by `csdctl discover" + "".join(f" --cidr {cidr}" for cidr in self.cidrs) + "`"

    def find(self, directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> FoundNodes:
        """Knock at all addresses; a single range is taken for the network of the fleet too."""
        nodes = scan(self.cidrs, user=self.user, key=self.key, port=self.port, interface=self.interface)
        chosen = select_nodes(Fleet(nodes, path=Path(self.name)), limit, exclude).nodes
        return FoundNodes(chosen, network=self.cidrs[0] if len(self.cidrs) == 1 else "")


@dataclass(frozen=True)
class AnsibleInventory:
    """The hosts of an Ansible inventory."""

    path: Path

    @property
    def name(self) -> str:
        """The file."""
        return str(self.path)

    @property
    def origin(self) -> str:
        """How it was read."""
        return f"Written by `csdctl discover --inventory {self.path}`"

    def find(self, directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> FoundNodes:
        """Its hosts, as Ansible and ssh would reach them."""
        inventory = load_inventory(self.path)
        inventory.defaults = load_config(directory)
        targets, warnings = list_targets(inventory, str(self.path), limit, exclude)
        return FoundNodes(*resolve_targets(targets, warnings, directory=directory))


@dataclass(frozen=True)
class SshConfig:
    """The aliases of an ssh_config."""

    path: Path

    @property
    def name(self) -> str:
        """The file."""
        return str(self.path)

    @property
    def origin(self) -> str:
        """How it was read."""
        return f"Written by `csdctl discover --ssh-config {self.path}`"

    def find(self, directory: Path, limit: Sequence[str], exclude: Sequence[str]) -> FoundNodes:
        """Its aliases, as ssh would reach them."""
        aliases = list_aliases(self.path)
        chosen = select_names(dict.fromkeys(aliases, ()), limit, exclude, where=str(self.path))
        usable = [
            alias for alias in chosen if NAME.fullmatch(alias) and alias not in (HOST_NAME, "localhost")
        ]
        if not usable:
            raise InputError(f"{self.path}: {', '.join(chosen)} cannot be the name of a node")
        left_out = [alias for alias in chosen if alias not in usable]
        # With -F, ssh does not read the system's configuration, which counts beside the user's own.
        arguments = () if self.path.resolve() == _user_config() else ("-F", str(self.path.absolute()))
        targets = [Target(alias, alias, arguments) for alias in usable]
        warnings = {"is no name for a node: left out": left_out} if left_out else {}
        return FoundNodes(*resolve_targets(targets, warnings, directory=directory))


def _user_config() -> Path:
    """The file that ssh reads without -F; it asks the user database, not $HOME."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir, ".ssh", "config").resolve()


def find_nodes(
    source: NodeSource, path: Path, *, directory: Path, limit: Sequence[str] = (), exclude: Sequence[str] = ()
) -> FoundFleet:
    """The fleet that `path` will hold; nothing is written yet. Raises InputError or NoNodeReachableError."""
    found = source.find(directory, limit, exclude)
    fleet = Fleet(found.nodes, network=found.network, path=path)
    return FoundFleet(fleet, render_fleet(fleet, origin=source.origin), found.warnings)


def write_fleet(found: FoundFleet, *, force: bool = False) -> None:
    """Write fleet.yaml; raises InputError when it is there already, unless `force`."""
    check_may_write(found.fleet.path, force=force)
    save_text(found.fleet.path, found.text)


def check_may_write(path: Path, *, force: bool) -> None:
    """Raise InputError when writing `path` would overwrite something."""
    if path.exists() and not force:
        raise InputError(
            f"{path} is there already", remedy="name another with --fleet, or overwrite it with --force"
        )
