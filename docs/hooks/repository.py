"""Adds some files outside docs/ to the site as pages, and rewrites links so that they also work on the site.

Markdown links are relative to their file, and the site contains only docs/. A link to a file outside docs/ becomes a
link to its page if it has one, and plain text otherwise.
"""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
log = logging.getLogger("mkdocs.hooks.repository")

# Files of the repository that become pages, and the names of the pages.
PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "dcnet/kernels/README.md": "kernels.md",
}
SOURCES = {page: file for file, page in PAGES.items()}

FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\[\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that become pages."""
    for file, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page."""
    return with_links(markdown, page.file.src_uri)


def with_links(markdown: str, page: str) -> str:
    """The text with links that cross the border of docs/ rewritten; code blocks stay unchanged."""
    # The pattern is in parentheses, so every other part is a code block.
    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(lambda found: _link(found, page), part) for part in parts[::2]]
    return "".join(parts)


def _link(found: re.Match[str], page: str) -> str:
    target = found["target"]
    if re.match(r"[a-z]+:", target):
        return found[0]
    source = SOURCES.get(page, f"docs/{page}")
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    uri = PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
    if uri is None:
        if not (ROOT / file).exists():
            log.warning("%s has a link to %s, which is not in the repository", source, target)
        return found["text"]
    relative = posixpath.relpath(uri, posixpath.dirname(page) or ".")
    return f"{found['image']}[{found['text']}]({relative}{found['anchor'] or ''})"
