# SPDX-License-Identifier: BSD-3-Clause
"""Sphinx's configuration for the site (`make site`). tools/site.lua writes the pages and the file sources.txt.

Two things are added to Sphinx: the directive `lua-function` for entries of the API reference, which the search finds
by name, and a page with numbered lines for each source file in sources.txt. Debian 12's package furo has three
defects in pages that are opened as files, which mend_theme repairs.
"""
import html
import re
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.directives import ObjectDescription
from sphinx.util.nodes import make_id

project = "psluajit"
copyright = "the authors of psluajit, BSD-3-Clause"
extensions = ["myst_parser"]
myst_heading_anchors = 4
exclude_patterns = []
html_theme = "furo"
html_title = "psluajit"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5fa5", "color-brand-content": "#0b5fa5"},
    "dark_css_variables": {"color-brand-primary": "#6cb6ff", "color-brand-content": "#6cb6ff"},
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_use_index = False
# A page opened as a file cannot read other files, so search results are titles without text.
html_show_search_summary = False
pygments_style = "tango"
pygments_dark_style = "native"
primary_domain = None
highlight_language = "none"


class Function(ObjectDescription):
    """An entry of the API reference: its signature, then Markdown."""

    def handle_signature(self, sig, signode):
        name, _, rest = sig.partition("(")
        signode += addnodes.desc_name(name, name)
        if rest:
            signode += nodes.inline("", "(" + rest, classes=["sig-rest"])
        signode["fullname"] = name
        return name

    def add_target_and_index(self, name, sig, signode):
        signode["ids"].append(make_id(self.env, self.state.document, "", name))
        std = self.env.get_domain("std")
        # If the name occurs on several pages (optimizer:step), the first page keeps it, and the others get their page's
        # name.
        if ("function", name) in std.objects:
            name = "%s (%s)" % (name, self.env.docname.rpartition("/")[2])
        if ("function", name) not in std.objects:
            std.note_object("function", name, signode["ids"][-1], location=signode)

    def _object_hierarchy_parts(self, signode):
        return (signode["fullname"],)

    def _toc_entry_name(self, signode):
        return signode["fullname"]


def source_pages(app):
    """Yields a page for each file in sources.txt, with an anchor L<number> at each line."""
    root = Path(app.config.source_root)
    for path in (Path(app.srcdir) / "sources.txt").read_text().split("\n"):
        if not path:
            continue
        file = root / path
        if file.is_dir():
            entries = sorted(entry for entry in file.iterdir() if entry.is_file() and entry.name[0] not in "._")
            body = "<ul>%s</ul>" % "".join('<li><a href="%s/%s.html">%s</a></li>' % (
                html.escape(file.name), html.escape(entry.name), html.escape(entry.name)) for entry in entries)
        else:
            text = file.read_text(errors="replace")
            try:
                lexer = get_lexer_for_filename("x.c" if path.endswith(".def") else path, stripnl=False)
            except ClassNotFound:
                lexer = TextLexer(stripnl=False)
            body = highlight(text, lexer, HtmlFormatter(
                linenos="inline", lineanchors="L", anchorlinenos=True, cssclass="highlight source"))
            body = body.replace('name="L-', 'name="L')
            body = body.replace('id="L-', 'id="L').replace('href="#L-', 'href="#L')
        title = html.escape(path)
        yield "source/" + path, {"title": path, "body": "<h1>%s</h1>%s" % (title, body)}, "page.html"


def without_menu(app, pagename, templatename, context, doctree):
    """Omits the menu of all pages from the pages of source files, since it would take half of the time."""
    if pagename.startswith("source/"):
        context["toctree"] = lambda **options: ""


def mend_theme(app, exception):
    """Mends furo 2022.12.07+dfsg-1 in the built pages. A furo without these defects stays as it is.

    1. furo.css imports normalize.css by an absolute path of a web server. The file is copied next to it.
    2. furo.css lacks the dark colours for browsers whose user prefers dark pages.
    3. furo.js imports a module, which pages opened as files may not. Both files become one script.
    """
    if exception:
        return
    static = Path(app.outdir) / "_static"
    sheet = static / "styles" / "furo.css"
    css = sheet.read_text()
    served = re.search(r"@import url\((/javascript/[^)]*)\);", css)
    if served:
        css = css.replace(served.group(0), '@import url("normalize.css");', 1)
        (static / "styles" / "normalize.css").write_text(Path("/usr/share" + served.group(1)).read_text())
    if "prefers-color-scheme" not in css:
        dark = re.search(r'body\[data-theme="dark"\] (\{[^}]*--color-background-primary[^}]*\})', css)
        css += "\n@media not print {\n@media (prefers-color-scheme: dark) {\n"
        css += 'body:not([data-theme="light"]) %s\n}\n}\n' % dark.group(1)
    sheet.write_text(css)
    script = static / "scripts" / "furo.js"
    first, _, rest = script.read_text().partition("\n")
    if first.startswith("import Gumshoe from"):
        script.write_text((static / "scripts" / "gumshoe-patched.js").read_text() + rest)


def setup(app):
    app.add_config_value("source_root", "", "env")
    std = app.registry.domains["std"]
    std.object_types = dict(std.object_types, function=type(std.object_types["doc"])("function"))
    app.add_directive("lua-function", Function)
    app.connect("html-collect-pages", source_pages)
    app.connect("html-page-context", without_menu, priority=1)
    app.connect("build-finished", mend_theme)
    return {"parallel_read_safe": True}
