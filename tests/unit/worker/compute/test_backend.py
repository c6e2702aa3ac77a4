"""What is imported with TensorFlow."""

import subprocess
import sys

PROGRAM = """\
import sys
from csdctl.worker.compute.backend import FOR_PICTURES, load_backend

load_backend()
assert not [name for name in FOR_PICTURES if name in sys.modules], sorted(sys.modules)
import matplotlib.pyplot  # the user's own code may draw

assert matplotlib.pyplot.figure
"""


def test_packages_for_pictures_are_not_imported_with_keras_and_can_be_imported_later() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
