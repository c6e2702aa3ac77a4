"""Judge whether a machine has what a job's own code imports; pure."""

from collections.abc import Collection, Sequence

from csdctl.fleet.checks import Check, Status
from csdctl.fleet.model import HOST_NAME
from csdctl.job.imports import JobImports, Needed, describe_missing, remedy_of


def needs_of(name: str, imports: JobImports | None) -> tuple[tuple[Needed, ...], tuple[Needed, ...]]:
    """Return what one machine needs, and what it may need."""
    if imports is None:
        return (), ()
    return (imports.host, ()) if name == HOST_NAME else (imports.nodes, imports.perhaps)


def judge_imports(
    name: str,
    missing: Collection[str] | None,
    needed: Sequence[Needed],
    perhaps: Sequence[Needed],
    python: str,
) -> Check:
    """Return the check of one machine; `missing`: what its Python does not find, None if unknown."""
    if missing is None:
        return Check(name, "imports", Status.WARN, "unknown", "", "see the other checks of this machine")
    lacking, lacking_perhaps = (
        [need for need in needs if need.module in missing] for needs in (needed, perhaps)
    )
    if lacking:
        return Check(name, "imports", Status.FAIL, describe_missing(lacking), "", remedy_of(lacking, python))
    if lacking_perhaps:
        remedy = f"{remedy_of(lacking_perhaps, python)}; `csdctl prepare` finds out whether nodes need it"
        return Check(name, "imports", Status.WARN, describe_missing(lacking_perhaps), "", remedy)
    found = ", ".join(need.module for need in (*needed, *perhaps))
    return Check(name, "imports", Status.OK, found or "none besides the packages")
