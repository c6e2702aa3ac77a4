"""Print what is at a path of this machine: directory, file, empty, missing or unreadable; no names."""

import os
import sys


def find(path: str) -> str:
    """Return what is at `path`, as this user can read it."""
    path = os.path.expanduser(path)
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                return "directory" if any(True for _ in entries) else "empty"
        with open(path, "rb") as file:
            return "file" if file.read(1) else "empty"
    except FileNotFoundError:
        return "missing"
    except OSError:
        return "unreadable"


if __name__ == "__main__":
    print(find(sys.argv[1]))
