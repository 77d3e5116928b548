"""The documentation's site: ``make docs``. Everything it needs comes with the package; warnings are errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sphinx.application import Sphinx

from hsx_dist import __version__

project = "hsx_dist"
author = "the hsx_dist authors"
copyright = author  # noqa: A001
version = release = __version__

#: A link to a file of the checkout that is no page of the site: its text, and the address.
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|configs|dashboards|tests|hsx_dist|scripts)/[^)\s]*)\)")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "reference_pages"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
# Importing them takes seconds, and the docs need no more than the names of their base classes.
autodoc_mock_imports = ["ray", "vllm"]
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

copybutton_exclude = ".linenos, .gp, .go"  # copy the code of an example without its prompts and results

html_theme = "furo"
html_title = f"hsx_dist {version}"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_sphinx = False


def setup(app: Sphinx) -> None:
    """Links to files of the checkout, which work where Git hosts show the pages, become the files' names."""

    def name_files(_: Sphinx, __: str, source: list[str]) -> None:
        source[0] = _OUTSIDE.sub(r"\1 (`\2`)", source[0])

    app.connect("source-read", name_files)
