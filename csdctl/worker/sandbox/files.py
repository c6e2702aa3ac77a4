"""Files: what Landlock admits, and the user that root becomes."""

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Iterable

from csdctl.worker.sandbox.system_calls import LIBC, PR_SET_KEEPCAPS, system_call

USER_ID = 1_907_000_000
"""The user that root becomes: outside of all ranges that systems give to accounts and containers."""
SYSTEM_PATHS = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/proc",
    "/sys",
    "/dev/urandom",
    "/dev/random",
    "/dev/zero",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/resolv.conf",
]
"""Read by every program. In /proc, Landlock hides the memory, files and environment of other processes."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY, _REFER, _TRUNCATE = 1, 2, 4, 8, 1 << 13, 1 << 14
_CHANGE_DIRECTORY = 0b1011110110000
"""Remove and make files, directories, sockets, pipes and links in a directory; no devices."""
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
READ = _EXECUTE | _READ_FILE | _READ_DIRECTORY
CHANGE = READ | _WRITE_FILE | _CHANGE_DIRECTORY | _REFER | _TRUNCATE
_FIRST_SCOPES = 6
_SCOPES = 0b11
"""Abstract Unix sockets and signals, since version 6 of Landlock; the supervisor guards both anywhere."""
_CAP_AMBIENT, _CAP_AMBIENT_RAISE, _DAC_READ_SEARCH = 47, 2, 2
_CAPABILITY_VERSION = 0x20080522


def landlock_version() -> int:
    """Return the version of Landlock that the kernel supports, 0 for none."""
    with contextlib.suppress(OSError):
        return system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    return 0


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Let this process and its children open nothing but these files and directories; raises OSError."""
    version = landlock_version()
    handled = (1 << 12 + min(version, 3)) - 1  # versions 2 and 3 added a right each
    attributes = struct.pack("=Q", handled)
    if version >= _FIRST_SCOPES:
        attributes = struct.pack("=QQQ", handled, 0, _SCOPES)
    ruleset = system_call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    for paths, rights in ((readable, READ), (writable, CHANGE)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _admit(ruleset, path, rights & handled)
    system_call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _admit(ruleset: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & _OF_A_FILE, place)
        arguments = ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0)
        system_call(_ADD_RULE, *arguments)
    finally:
        os.close(place)


def become_nobody(readable: Iterable[str]) -> None:
    """Become a user without an account; raises OSError.

    Where other users cannot read some of `readable`, such as a Python in root's home, this user may read
    everything: Landlock alone then decides what.
    """
    needs_search = not all(map(_is_open_to_all, readable))
    if needs_search:
        LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(USER_ID, USER_ID, USER_ID)
    os.setresuid(USER_ID, USER_ID, USER_ID)
    if needs_search:
        capability = 1 << _DAC_READ_SEARCH
        header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
        if LIBC.capset(header, struct.pack("=6I", capability, capability, capability, 0, 0, 0)):
            raise OSError(ctypes.get_errno(), "capset")
        LIBC.prctl(_CAP_AMBIENT, _CAP_AMBIENT_RAISE, _DAC_READ_SEARCH, 0, 0)


def _is_open_to_all(path: str) -> bool:
    """Return whether any user may enter the directories of `path`, if it exists."""
    path = os.path.realpath(path)
    if not os.path.exists(path):
        return True
    while path != "/":
        if os.path.isdir(path) and os.stat(path).st_mode & 0o5 != 0o5:
            return False
        path = os.path.dirname(path)
    return True


def python_paths() -> list[str]:
    """Return the parts of this Python, of environments whose packages it uses, and directories of modules.

    Never a whole prefix, nor a directory that contains a home: somebody's files may be there.
    """
    executables = {sys.executable, os.path.realpath(sys.executable)}
    prefixes = {os.path.dirname(os.path.dirname(path)) for path in executables}
    prefixes |= {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    home = os.path.realpath(os.path.expanduser("~"))
    modules = [path for path in map(os.path.realpath, filter(None, sys.path)) if not home.startswith(path)]
    prefixes |= {os.path.dirname(path.rpartition("/python")[0]) for path in modules if _is_site(path)}
    parts = ("bin", "lib", "lib64", "etc", "share", "include", "pyvenv.cfg")
    return [*(os.path.join(prefix, part) for prefix in sorted(prefixes) for part in parts), *modules]


def _is_site(path: str) -> bool:
    """Return whether `path` is PREFIX/lib/pythonX.Y/site-packages."""
    return os.path.basename(path) == "site-packages" and "/lib/python" in path
