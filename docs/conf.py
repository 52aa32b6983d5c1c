"""Sphinx: the site of docs/, with the reference from docstrings; `make docs` builds it.

Nothing is fetched, neither by a build nor by a page: no fonts, scripts or inventories from
elsewhere.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import graphshard
from graphshard.__main__ import parser

project = "graphshard"
release = graphshard.__version__
copyright = "the graphshard authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
highlight_language = "none"  # fences without a language are diagrams

html_theme = "furo"
html_title = "graphshard"
html_copy_source = html_show_sourcelink = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# Reference pages are the same wherever they are built: with no framework, or with all of them.
autodoc_mock_imports = ["accelerate", "lightning", "peft", "torchtitan", "transformers"]
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# References to graphshard have to lead somewhere; torch's pages are not here to link to.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!graphshard\b).*"),
    ("py:class", r"graphshard\.(cost|kinds|planning|show)\..*"),  # types in signatures
]


class CommandHelp(SphinxDirective):
    """Shows what ``python -m graphshard COMMAND --help`` prints."""

    required_arguments = 1
    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        (command,) = self.arguments
        (commands,) = (
            action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)
        )
        text = commands.choices[command].format_help()
        return [nodes.literal_block(text, text, language="none")]


def link_from_docs(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    """Make links of README.md to files outside of docs/ relative to docs/."""
    text = re.sub(r"(!\[.*?\]\()(?=benchmarks/)", r"\1../", content[0])
    content[0] = re.sub(r"\]\((?=benchmarks/|examples/|[A-Z]+\.md)", "](path:../", text)


def setup(app: Sphinx) -> None:
    """Register the directive and the links, when Sphinx loads this file."""
    app.add_directive("command-help", CommandHelp)
    app.connect("include-read", link_from_docs)
