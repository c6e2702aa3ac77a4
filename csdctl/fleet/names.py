"""Allow-lists: names, addresses, users and groups end up in ssh_config files and command lines."""

import re

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:%_-]{0,253}")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,31}")
GROUP = re.compile(r"[^\s,\[\]\x00-\x1f-][^\s,\[\]\x00-\x1f]{0,99}")
