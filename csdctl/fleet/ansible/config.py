"""Connection settings of ansible.cfg: defaults for values that an inventory does not set."""

import configparser
import os
from collections.abc import Mapping
from pathlib import Path

from csdctl.documents import load_text
from csdctl.errors import InputError
from csdctl.fleet.ansible.inventory import Value, Variables
from csdctl.notify import shorten

MAX_PROBLEM = 500
"""Characters; the parser lists every line that it cannot read."""

_VARIABLES = {
    ("defaults", "remote_user"): "ansible_user",
    ("defaults", "remote_port"): "ansible_port",
    ("defaults", "private_key_file"): "ansible_private_key_file",
    ("ssh_connection", "ssh_args"): "ansible_ssh_args",
    ("ssh_connection", "ssh_common_args"): "ansible_ssh_common_args",
    ("ssh_connection", "ssh_extra_args"): "ansible_ssh_extra_args",
}


def load_config(directory: Path, environment: Mapping[str, str] = os.environ) -> Variables:
    """Return the variables set by the first ansible.cfg that Ansible finds when called in `directory`.

    Raises InputError for a file that cannot be read.
    """
    named = environment.get("ANSIBLE_CONFIG")
    candidates = [Path(named)] if named else []
    candidates += [directory, Path.home() / ".ansible.cfg", Path("/etc/ansible/ansible.cfg")]
    files = [path / "ansible.cfg" if path.is_dir() else path for path in candidates]
    path = next((file for file in files if file.is_file()), None)
    return _read(path) if path else {}


def _read(path: Path) -> Variables:
    parser = configparser.ConfigParser(inline_comment_prefixes=(";",), interpolation=None, strict=False)
    try:
        parser.read_string(load_text(path), source=str(path))
    except configparser.Error as error:
        problem = shorten(" ".join(str(error).split()), MAX_PROBLEM)
        raise InputError(f"{path} cannot be read: {problem}") from None
    return {
        variable: Value(_resolve(path, variable, parser[section][key]), str(path))
        for (section, key), variable in _VARIABLES.items()
        if parser.has_option(section, key) and parser[section][key]
    }


def _resolve(path: Path, variable: str, text: str) -> str:
    """Return a key's path relative to its ansible.cfg; other values unchanged."""
    if variable != "ansible_private_key_file" or text.startswith(("/", "~", "{")):
        return text
    return str(path.absolute().parent / text)
