"""How `make docs` builds the site: Markdown by MyST, the API from the docstrings; a warning is an error."""

from zbpipe import __version__

project = "zbpipe"
author = "zbpipe authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Source", "notes_style")]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"zbpipe {version}"
html_show_sphinx = False
copybutton_prompt_text = "$ "
