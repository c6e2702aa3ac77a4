"""Versions of the packages of this machine's Python."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

TENSORFLOW = "tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly"
"""The packages that have TensorFlow's libraries."""


def find_version(*packages: str) -> str:
    """Return the version of the first of these packages that is installed. '' without one."""
    for package in packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return ""
