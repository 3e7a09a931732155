"""Sphinx configuration: pages in Markdown, the reference from the docstrings."""

import sys
from importlib.metadata import version as _version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "jchop"
copyright = "the jchop authors"
author = "the jchop authors"
release = _version("jchop")
version = ".".join(release.split(".")[:2])

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
extensions += ["reference", "outputs", "words", "gallery", "pictures"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
default_role = "code"

html_theme = "furo"
html_title = f"jchop {release}"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["jchop.css"]
html_js_files = ["versions.js"]
templates_path = ["_templates"]
sidebar = ["brand", "versions", "search", "scroll-start", "navigation", "scroll-end"]
html_sidebars = {"**": [f"sidebar/{part}.html" for part in sidebar]}
# With `-D html_theme_options.source_repository=URL`, as in CI, every page has a link to edit it.
html_theme_options = {"source_branch": "main", "source_directory": "docs/"}
exclude_patterns = ["_build", "_extensions", "_templates"]
