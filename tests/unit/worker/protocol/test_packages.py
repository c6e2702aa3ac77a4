"""Versions of packages."""

import numpy as np

from csdctl.worker.protocol.packages import find_version


def test_version_is_that_of_the_first_package_that_is_installed() -> None:
    assert find_version("no-such-package", "numpy", "pip") == np.__version__
    assert find_version("no-such-package") == ""
