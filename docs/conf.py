"""Sphinx configuration: `sphinx-build -W docs build/docs` (extra `docs`)."""

project = "beatrice"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "beatrice"
html_show_copyright = False
myst_heading_anchors = 3
# Links out of docs/ lead to other folders of the repository, which have no page; the
# tables that `beatrice report` writes begin with headings of the third level.
suppress_warnings = ["myst.xref_missing", "myst.header"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
