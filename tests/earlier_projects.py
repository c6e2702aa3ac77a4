"""Projects that released versions of csdctl have written, with `.csdctl`, for tests that read them for ever.

tests/data/project-VERSION.tar.gz has job, data, plan, measurements and two runs on an emulated fleet of one
node: one has finished, and the csdctl of the other was killed after two epochs, with its state in step.state.
Paths, host name and IDs of the machine are replaced. A version that writes something else adds a project.
"""

import tarfile
from pathlib import Path

ARCHIVES = sorted((Path(__file__).parent / "data").glob("project-*.tar.gz"))


def unpack(archive: Path, directory: Path) -> Path:
    """Return the project below `directory`, as if somebody had moved it there."""
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    return (directory / "project").rename(directory / "moved project")
