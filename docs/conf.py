"""The site of these pages, by Sphinx: `make docs` builds it from a copy of README.md, docs/ and what they link."""

import re
from typing import Any

project = "Reflex"
html_title = "Reflex"
extensions = ["myst_parser"]
root_doc = "README"
html_theme = "furo"
html_static_path, html_css_files = ["static"], ["site.css"]
html_show_copyright = False  # its line has no name
myst_heading_anchors = 4  # the anchors of a code host: a link to a heading that is not there fails the build
smartquotes = False
suppress_warnings = ["misc.highlighting_failure"]  # examples with "…" in them


def navigation(app: Any, document: str, source: list[str]) -> None:
    """The navigation is docs/README.md: its headings, and the pages below each."""
    if document != root_doc:
        return
    parts = (app.srcdir / "docs" / "README.md").read_text(encoding="utf-8").split("\n## ")[1:]
    trees = []
    for part in parts:
        pages = re.findall(r"^- \[.+?\]\(([\w-]+)\.md\): ", part, re.MULTILINE)
        trees.append((part.partition("\n")[0], [f"docs/{page}" for page in pages]))
    rest = ["docs/README", "CHANGELOG", "CONTRIBUTING", "SECURITY"]
    rest += ["clients/lerobot_policy_reflex/README", "tests/contract/PROMISES"]
    for heading, pages in [*trees, ("Project", rest)]:
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```", ""])


def setup(app: Any) -> None:
    app.connect("source-read", navigation)
