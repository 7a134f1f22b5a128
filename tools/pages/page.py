"""The frame of a page in one file: light or dark like the reader's system, without scripts, with nothing to fetch."""

from html import escape
from string import Template

from .charts import COLOURS

DARK = {
    "ink": "#e6eaef",
    "muted": "#9aa5b1",
    "line": "#39414b",
    "blue": "#6cb2ff",
    "orange": "#f0a25c",
    "violet": "#c79bff",
    "green": "#5fd07f",
    "grey": "#8a939e",
}
FRAME = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #ffffff; --card: #f5f7f9; $light }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --card: #1d232a; $dark } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.6rem; line-height: 1.25; }
h2 { margin: 0 0 .25rem; font-size: 1.1rem; }
p { margin: .25rem 0 1rem; }
.muted { color: var(--muted); }
@media (max-width: 30rem) { body { padding: 1.25rem 1rem 3rem; } h1 { font-size: 1.35rem; } }
$style
</style>
</head>
<body>
$body
</body>
</html>
""")


def page(title: str, style: str, body: str) -> str:
    """Frame a body of HTML and a style of CSS, whose makers have escaped what they quote."""
    light, dark = (" ".join(f"--{name}: {value};" for name, value in theme.items()) for theme in (COLOURS, DARK))
    return FRAME.substitute(title=escape(title), style=style, body=body, light=light, dark=dark)
