"""Read an inventory, with the group_vars/ and host_vars/ beside it, from disk.

The format is chosen as in Ansible: YAML by extension, or if a file without extension is a mapping; else INI.
"""

import os
from pathlib import Path

from csdctl.documents import load_text
from csdctl.documents.text import MAX_JSON_BYTES, MAX_TEXT_BYTES
from csdctl.errors import InputError
from csdctl.fleet.ansible.ini import parse_ini
from csdctl.fleet.ansible.inventory import Inventory, Variables
from csdctl.fleet.ansible.tree import parse_list_output, parse_variables, parse_yaml

_YAML_ENDINGS = (".yaml", ".yml", ".json")
_VAULT = "$ANSIBLE_VAULT"


def load_inventory(path: Path) -> Inventory:
    """Read the static inventory at `path`; raises InputError with file and line.

    Formats that only Ansible can read are errors too; the remedy shows how to export them.
    """
    text = _read(path, MAX_JSON_BYTES)
    remedy = f"run `ansible-inventory -i {path} --list > inventory.json` and give that file"
    if text.startswith("#!") or (os.access(path, os.X_OK) and path.is_file()):
        raise InputError(f"{path} is an inventory program, which only Ansible can run", remedy=remedy)
    if text.startswith(_VAULT):
        raise InputError(f"{path} is encrypted with Ansible Vault", remedy=remedy)
    inventory = parse_list_output(text, str(path))
    if inventory:
        return inventory
    if len(text) > MAX_TEXT_BYTES:
        raise InputError(f"{path} has {len(text):,} characters, expected at most {MAX_TEXT_BYTES:,}")
    if path.suffix in (*_YAML_ENDINGS, ""):
        inventory = parse_yaml(text, str(path))
    if inventory is None and path.suffix in _YAML_ENDINGS:
        parse_variables(text, str(path))  # raises an error with the line if it is not YAML
        raise InputError(f"{path}: expected groups, as in `all: {{hosts: …}}`")
    inventory = inventory or parse_ini(text, str(path))
    for name in inventory.groups:
        inventory.group_files[name] = _beside(path, "group_vars", name, inventory)
    for name in inventory.hosts:
        inventory.host_files[name] = _beside(path, "host_vars", name, inventory)
    return inventory


def _read(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    if path.is_dir():
        raise InputError(
            f"{path} is a directory, expected one inventory file",
            remedy=f"run `ansible-inventory -i {path} --list > inventory.json` and give that file",
        )
    return load_text(path, max_bytes=max_bytes, remedy="give the inventory that Ansible uses")


def _beside(inventory_path: Path, directory: str, name: str, inventory: Inventory) -> Variables:
    """Return the variables of group or host `name` from a file or directory in `directory`."""
    variables: Variables = {}
    if "/" in name:  # it would lead out of the directory
        return variables
    base = inventory_path.resolve().parent / directory
    candidates = [base / f"{name}{ending}" for ending in ("", ".yml", ".yaml", ".json")]
    found = next((path for path in candidates if os.path.exists(path)), None) if base.is_dir() else None
    files = [found] if found else []
    if found and found.is_dir():
        files = sorted(file for file in found.rglob("*") if _is_variable_file(file, found))
    for file in files:
        text = _read(file)
        if text.startswith(_VAULT):
            inventory.warnings.append(f"{file} is encrypted with Ansible Vault and was not read")
        else:
            variables |= parse_variables(text, str(file))
    return variables


def _is_variable_file(file: Path, base: Path) -> bool:
    parts = file.relative_to(base).parts
    hidden = any(part.startswith(".") or part.endswith("~") for part in parts)
    return file.is_file() and not hidden and file.suffix in ("", *_YAML_ENDINGS)
