"""Sphinx configuration: pages in Markdown, the reference from the docstrings."""

from importlib.metadata import version as _version

project = "jchop"
copyright = "the jchop authors"
author = "the jchop authors"
release = _version("jchop")
version = ".".join(release.split(".")[:2])

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
default_role = "code"

html_theme = "furo"
html_title = f"jchop {release}"
exclude_patterns = ["_build"]
