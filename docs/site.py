"""Hook of mkdocs: links out of `docs/` lead to the repository that `repo_url` names, or are plain text without it."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"(?<!!)\[([^\]\n]+)\]\(((?:\.\./)+)((?!\.\./)[^)\s]+)\)")
"""A link that begins with `../`: its text, how far it goes up, and the path from there."""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Markdown of a page whose links all stay inside the site, or lead to the repository."""
    depth = page.file.src_uri.count("/")

    def followed(link: re.Match[str]) -> str:
        if link[2].count("../") <= depth:
            return link[0]
        return f"[{link[1]}]({config.repo_url.rstrip('/')}/blob/main/{link[3]})" if config.repo_url else link[1]

    return OUTSIDE.sub(followed, markdown)
