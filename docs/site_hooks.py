"""Hooks of mkdocs: the pages of the repository's root become pages of the site, links out of docs/ become
text, and the reference lists the public names of the package."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import holdfast

#: Pages outside of docs/, by their name on the site.
ROOT_PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of `ROOT_PAGES` to the site."""
    root = Path(config.config_file_path).parent
    for name, source in ROOT_PAGES.items():
        files.append(File.generated(config, name, content=(root / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make links relative to the page on the site; a link to a file that is not on the site becomes its text."""
    if page.file.src_uri == "reference.md":
        markdown += "".join(f"::: {home}.{name}\n\n" for name, home in sorted(holdfast._HOME_OF.items()))
    source = ROOT_PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    on_site = {path: name for name, path in ROOT_PAGES.items()}

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        name = on_site.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if name is None:
            return text
        return f"[{text}]({os.path.relpath(name, os.path.dirname(page.file.src_uri) or '.')}{anchor})"

    return re.sub(r"\[([^\]]*)\]\(((?![a-z]+:)[^)\s#]+)(#[^)\s]*|)\)", link, markdown)
