"""Sphinx configuration: `sphinx-build -W docs build/docs` (extra `docs`)."""

project = "beatrice"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "beatrice"
html_show_copyright = False
exclude_patterns = ["results/demo.md", "results/gemma.md", "results/smollm2.md"]
myst_heading_anchors = 3
# Links out of docs/ lead to other folders of the repository, which have no page.
suppress_warnings = ["myst.xref_missing"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
