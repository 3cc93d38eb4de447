"""Metadata hook of hatchling: project URLs and README's links, from the repository in which a release is built."""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface  # pyright: ignore[reportMissingImports]

PAGES = {"Source": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}


class RepositoryUrls(MetadataHookInterface):
    """`HKV_REPOSITORY_URL`, which the release workflow sets; a build without it names no URL."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fills in `urls`, and `readme` with links that lead somewhere outside the repository too."""
        url = os.environ.get("HKV_REPOSITORY_URL", "").rstrip("/")
        readme = (pathlib.Path(self.root) / "README.md").read_text(encoding="utf-8")
        if url:
            readme = re.sub(r"(!\[[^\]]*\]\()(?=\w+[/.])(?!\w+:)", rf"\1{url}/raw/main/", readme)
            readme = re.sub(r"((?<!!)\[[^\]]*\]\()(?=\w+[/.])(?!\w+:)", rf"\1{url}/blob/main/", readme)
        metadata["urls"] = {name: url + path for name, path in PAGES.items()} if url else {}
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
