"""Sphinx configuration. The build needs no network."""

from importlib.metadata import version as installed_version

project = "rlsync"
author = "rlsync contributors"
copyright = "rlsync contributors"
release = installed_version("rlsync")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"rlsync {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Pages may point at files of the repository (../README.md), which are no pages of this site.
suppress_warnings = ["myst.xref_missing"]

# Fields as part of the class: a dataclass field documented twice is a warning, hence an error.
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_default_options = {"show-inheritance": True}
