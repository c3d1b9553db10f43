"""Makes pages of some files beside docs/, and links that hold in the repository hold on the site, too.

A link of Markdown is relative to its own file. On the site there is docs/ alone, so that a link that leaves it needs
care: to a file that is a page it leads there, and of any other file of the repository only the words are left.
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

# Files of the repository that are pages as well, and as which.
PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "dcnet/kernels/README.md": "kernels.md",
}
SOURCES = {page: file for file, page in PAGES.items()}

FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?P<image>!?)\[(?P<words>[^\[\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that are pages as well."""
    for file, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page with its links as the site needs them."""
    return with_links(markdown, page.file.src_uri)


def with_links(markdown: str, page: str) -> str:
    """The same text with each link that leads out of docs/ or comes from there changed; code is left as it is."""
    # Every other part is a block of code, since the pattern is in parentheses.
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
        return found["words"]
    relative = posixpath.relpath(uri, posixpath.dirname(page) or ".")
    return f"{found['image']}[{found['words']}]({relative}{found['anchor'] or ''})"
