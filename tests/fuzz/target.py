"""A target of fuzzing: a function that takes bytes, the errors that it documents, and its seeds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


class Form(Enum):
    """Structure of a target's inputs, which decides how they are changed."""

    YAML = "yaml"
    JSON = "json"
    LINES = "lines"
    """Lines of text; JSON at the end of a line, also within a string, is changed as JSON."""
    BINARY = "binary"


@dataclass(frozen=True)
class Target:
    """One kind of input and csdctl's own entry point for it."""

    name: str
    form: Form
    take: Callable[[bytes, Path], None]
    """Reads the input, as csdctl does; a directory of its own is given, which is empty at first."""
    refusals: tuple[type[Exception], ...]
    """Errors that `take` documents for input that cannot be used; every other error is a defect."""
    build_seeds: Callable[[], list[bytes]]
    """Valid inputs, as csdctl or the other side writes them."""
    words: tuple[bytes, ...] = field(default=())
    """Words of this format."""

    @property
    def corpus(self) -> list[bytes]:
        """Inputs that are kept: those that showed a defect once, and some that no program here writes."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).glob("*"))]
