"""Allow-lists for names, addresses, users and groups, which are used in ssh_config and command lines."""

import re

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9.:%_-]{0,253}")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,31}")
GROUP = re.compile(r"[^\s,\[\]\x00-\x1f-][^\s,\[\]\x00-\x1f]{0,99}")
