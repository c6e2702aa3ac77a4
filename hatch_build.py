"""The project's addresses (`project.urls`), all derived from the address of its repository.

The repository's address is `CSDCTL_REPOSITORY` in the environment or else `repository` in pyproject.toml's
`[tool.hatch.metadata.hooks.custom]`. Without one, nothing is added.
"""

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):
    """Adds Repository, Documentation, Changelog and Issues to `project.urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the addresses to `metadata`; raises ValueError when the repository's is not https."""
        repository = os.environ.get("CSDCTL_REPOSITORY") or self.config.get("repository", "")
        if not repository:
            return
        if not repository.startswith("https://"):
            raise ValueError(f"the repository's address must begin with https://, not be {repository!r}")
        base = repository.removesuffix(".git").rstrip("/")
        metadata["urls"] = {
            **metadata.get("urls", {}),
            "Repository": base,
            "Documentation": f"{base}/blob/main/docs/README.md",
            "Changelog": f"{base}/blob/main/CHANGELOG.md",
            "Issues": f"{base}/issues",
        }
