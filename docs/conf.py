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

_TABLES = {
    "results/demo": "the demo",
    "results/gemma": "Gemma 3 270M",
    "results/smollm2": "SmolLM2-135M",
}


def _add_title(app, name, source):
    if name in _TABLES:
        source[0] = f"# Tables of {_TABLES[name]}\n\n{source[0]}"


def setup(app):
    """Give pages of tables a title: else each of their headings stands as a page."""
    app.connect("source-read", _add_title)
