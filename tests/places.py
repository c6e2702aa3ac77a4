"""Find modules of csdctl whose test is not where one looks for it: python -m tests.places

The test of csdctl/a/b.py is tests/unit/a/test_b.py. Otherwise, tests/unit/a/README.md has a line that says
where it is:

- `b.py`: test_c.py, emulated/test_d.py

A name without a directory is beside the README.md, any other one below tests/.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
CSDCTL = TESTS.parent / "csdctl"


def find_problems(package: Path) -> Iterator[str]:
    """Compare the modules of one package with its test directory."""
    directory = TESTS / "unit" / package.relative_to(CSDCTL)
    readme = directory / "README.md"
    text = readme.read_text() if readme.is_file() else ""
    lines = dict(re.findall(r"^- `(\w+\.py)`: (.+)$", text, re.MULTILINE))
    page = readme.relative_to(TESTS.parent)
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    for module in sorted(modules - lines.keys()):
        if not (directory / f"test_{module}").is_file():
            yield f"csdctl/{(package / module).relative_to(CSDCTL)}: no test_{module}, and no line in {page}"
    for module, places in lines.items():
        if module not in modules:
            yield f"{page}: {module} is no module of csdctl/{package.relative_to(CSDCTL)}"
        for name in re.findall(r"[\w./-]+\.py", places):
            if not (TESTS / name if "/" in name else directory / name).is_file():
                yield f"{page}: {module} is said to be tested by {name}, which does not exist"


if __name__ == "__main__":
    packages = sorted({path.parent for path in CSDCTL.rglob("*.py")})
    problems = [problem for package in packages for problem in find_problems(package)]
    print("\n".join(problems) or "every module has its test, or a line that says where it is")
    sys.exit(bool(problems))
