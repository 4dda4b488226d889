"""Sphinx configuration. The build needs no network."""

import inspect
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

sys.path.insert(0, str(Path(__file__).parent))
from config_reference import with_keys

project = "rlsync"
author = "rlsync contributors"
copyright = "rlsync contributors"
release = installed_version("rlsync")
version = release

# It reads Markdown as myst_parser does.
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# `make notebooks` runs them, and keeps what they print.
nb_execution_mode = "off"
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"rlsync {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Pages may link to files of the repository (../README.md) that are not pages of this site.
suppress_warnings = ["myst.xref_missing"]

# Show fields as part of the class. Otherwise dataclass fields are documented twice, which fails the build.
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_default_options = {"show-inheritance": True}


def serve_markdown(app: Sphinx, error: Exception | None) -> None:
    """Copy the source of each page next to its HTML, so that the links of llms.txt work on the site."""
    if error is None:
        for page in [*sorted(app.env.found_docs), "llms.txt"]:
            source = Path(app.srcdir, page if page.endswith(".txt") else f"{page}.md")
            if not source.is_file():  # a notebook
                continue
            Path(app.outdir, source.relative_to(app.srcdir)).write_text(
                with_keys(source.read_text())
            )


def write_keys(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the lists of config keys into the pages that ask for them."""
    source[0] = with_keys(source[0])


def own_signature(
    app: Sphinx, what: str, name: str, shown: object, *_: object
) -> tuple[str, None] | None:
    """Show the arguments of the class's own constructor, without private ones and those of metaclasses."""
    if not isinstance(shown, type) or "__init__" not in vars(shown):
        return None
    found = inspect.signature(shown.__init__)
    public = [
        p for p in found.parameters.values() if p.name != "self" and not p.name.startswith("_")
    ]
    signature = found.replace(parameters=public)
    return stringify_signature(signature, show_annotation=False, show_return_annotation=False), None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", own_signature)
    app.connect("source-read", write_keys)
    app.connect("build-finished", serve_markdown)
