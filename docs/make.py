# SPDX-License-Identifier: Apache-2.0
"""MkDocs hooks that generate pages from the code, and checks of the built site.

mkdocs serve                      # build the site and serve it on port 8000
python docs/make.py               # strict build into site/, and checks
python docs/make.py --external    # also request every external link
"""

import argparse
import html
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from urllib.request import Request, urlopen

import griffe

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGE = "src/quadtree_attention"
COPIED = {  # pages that are files outside docs/
    "changelog.md": "CHANGELOG.md",
    "conduct.md": "CODE_OF_CONDUCT.md",
    "contributing.md": "CONTRIBUTING.md",
    "mathematics.md": "src/quadtree_attention/ops/README.md",
    "measuring.md": "benchmarks/README.md",
    "security.md": "SECURITY.md",
    "weights.md": "src/quadtree_attention/weights/README.md",
}
MODULES = {  # API pages, in this order; a name is on the first page whose module exports it
    "": "Operators and layers",
    "tasks": "Tasks",
    "models": "Networks",
    "nn": "Baseline attentions",
    "inspect": "Recording",
    "export": "Export",
    "synthetic": "Synthetic scenes",
    "sfm": "Reconstruction",
    "integrations.kornia": "kornia",
    "errors": "Errors",
}
PHRASES = {  # refused phrases, and what to write instead
    r"rivals?": "baseline",
    r"moods? of": "host noise",
    r"comes? to nothing": "has no effect",
    r"taken for (its|their)": "equals",
    r"look(s)? like earlier": "per call signature",
    r"points that show the same": "corresponding points",
    r"how far to the left": "the horizontal shift",
    r"how near everything": "disparity",
    r"(is|are) not to be had": "raises",
    r"nobody (needs|asked|can|listens|sees)": "not needed",
    r"speaks? (with|for)": "contributes",
    r"pass such": "the accepted range",
    r"must be from \S+ to below": "must be in [a, b)",
    r"the farther of the nearest": "the farther of the two nearest",
    r"what became of": "the result of",
    r"surest": "highest score",
    r"in its own good time|as it pleases|of its own accord": "state when",
    r"give the pose of": "recovers N of M poses",
    r"knows? nothing of": "is independent of",
}
IN_DOCS = {  # refused in pages, and in help texts, messages and docstrings of the package
    r"looks? at|looked at": "candidates, compared with",
    r"asked for": "requested",
    r"anew": "again",
    r"stands? for": "represents",
    r"told apart": "distinguished",
    r"gives? \w+ \w+ back|gives? back": "returns, restores",
    r"(is|are) told": "receives",
    r"mended": "fixed",
    r"that remembers?|remembers": "stores",
    r"what it costs": "cost",
    r"what is (there|left)": "name it",
    r"walks? down": "candidates per level",
    r"hands? \w+ \w+( \w+)? down": "multiplies, passes",
    r"near enough|next to nothing": "approximately, almost no",
    r"so that (they|it) travels?": "for a single copy",
    r"(as|which) it pleases": "any",
    r"is held against": "is tested against",
    r"you (have|run|get|want|use) \|": "input, command, output",
    r"in silence": "silently",
    r"what (stood|stands) in the way": "problem",
}
UNCHECKED = ("CONTRIBUTING.md", "docs/make.py", "tests/docs/test_site.py")  # quote them
TEXTS = ("*.md", "*.py", "*.yaml", "*.toml", "*.js", "*.html", "*.cff")
LINK = re.compile(r"(\]\()([^)\s:#]+)(#[^)\s]*)?(\))")  # of files, not of URLs or of this page
HIDDEN = {  # beside a page, for wide tables
    "benchmarks.md": ["toc"],
    "index.md": ["navigation", "toc"],
    "models.md": ["toc"],
}
EXAMPLE = re.compile(r"^ *Example:\n", flags=re.M)
# "    q, k, v: ..." and the lines that continue it
TOGETHER = re.compile(r"^( +)([a-z_]\w*(?:, [a-z_]\w*)+): (.*(?:\n|\Z)(?:\1 +.*(?:\n|\Z))*)", re.M)
CELL = re.compile(r"<td([^>]*)>(.*?)</td>", flags=re.S)
LENGTHS = {60: "long", 20: "medium"}  # characters of a cell, by its class in site.css
HEAD = "---\nsearch: {boost: 2}\n---\n\n"


# Pages of the API ----------------------------------------------------------------------------


def api() -> dict[str, list[str]]:
    """The public names of every API page, by module."""
    package, seen, found = "quadtree_attention", {"__version__"}, {}
    for name in MODULES:
        module = import_module(f"{package}.{name}" if name else package)
        public = getattr(module, "__all__", None) or [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        exceptions = {key for key in public if key.endswith("Error")} if name != "errors" else set()
        found[name] = sorted(set(public) - seen - exceptions, key=str.lower)
        seen |= set(found[name])
    return found


def api_pages() -> Iterator[tuple[str, str]]:
    table = ["| page | contents |", "| --- | --- |"]
    for name, public in api().items():
        module = f"quadtree_attention.{name}".rstrip(".")
        page = f"api/{(name or 'ops').replace('.', '-')}.md"
        links = ", ".join(f"[`{x}`]({Path(page).name}#{module}.{x})" for x in public)
        table.append(f"| [{MODULES[name]}]({Path(page).name}) | {links} |")
        blocks = "\n\n".join(f"::: {module}.{x}\n\n{example(name, x)}" for x in public)
        summary = (import_module(module).__doc__ or "").partition("\n\n")[0]
        yield page, f"{HEAD}# {MODULES[name]}\n\n`{module}`: {summary}\n\n{blocks}\n"
    yield "api/index.md", "# API reference\n\n" + "\n".join(table) + "\n"


def example(module: str, name: str) -> str:
    """An example of a public name whose own docstring has none: one of the code beside it."""
    value = getattr(import_module(f"quadtree_attention.{module}".rstrip(".")), name)
    if not callable(value) or EXAMPLE.search(value.__doc__ or "") or name.endswith("Error"):
        return ""
    home = sys.modules[value.__module__]
    others = [home.__name__, f"{home.__package__}.predictor", home.__package__]
    modules = [import_module(other) for other in others if find_spec(other)]
    beside = [text for one in modules for text in (one.__doc__, *(x.__doc__ for x in defined(one)))]
    texts = [text for text in beside if text and EXAMPLE.search(text)]
    best = sorted(texts, key=lambda text: not re.search(rf"\b{name}\b", EXAMPLE.split(text)[-1]))
    if not best:
        return ""
    return code(EXAMPLE.split(best[0])[-1])


def code(text: str) -> str:
    """The text of an example as Markdown."""
    lines = inspect.cleandoc("\n" + text)
    language = "pycon" if ">>>" in lines else "python"
    return f"**Example**\n\n```{language}\n" + re.sub(r"  # doctest:.*", "", lines) + "\n```\n"


class CodeOfExamples(griffe.Extension):
    """Examples of docstrings are code; arguments described together have one row each."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            *before, last = EXAMPLE.split(obj.docstring.value)
            text = "".join(before) + code(last) if before else last
            obj.docstring.value = TOGETHER.sub(_one_by_one, text)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace constants in signatures by their values."""
        for parameter in func.parameters:
            name = str(parameter.default)
            if name.isupper() and name.isidentifier():
                value = getattr(import_module(func.module.path), name, None)
                if isinstance(value, int | float | str | tuple):
                    parameter.default = repr(value)


def _one_by_one(match: re.Match[str]) -> str:
    indent, names, text = match.groups()
    return "".join(f"{indent}{name}: {text}" for name in re.split(", ", names))


def defined(module: Any) -> list[Any]:
    """Functions and classes of a module, imported ones excluded."""
    return [x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__]


# The page of the commands --------------------------------------------------------------------


def commands() -> str:
    """The page of the command line, from the parameters of the program."""
    import typer

    from quadtree_attention.cli.main import app

    root = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "`quadtree COMMAND --help` prints the same. Exit codes: 0, success; 1, some inputs failed "
        "and are listed; 2, wrong options or unusable files; 130, interrupted.",
        "",
    ]
    names = sorted(root.commands)
    lines += ["| command | |", "| --- | --- |"]
    for name in names:
        lines.append(f"| [`{name}`](#{name}) | {_first(root.commands[name])} |")
    for name in names:
        lines += ["", f"## {name}", "", *_command(f"quadtree {name}", root.commands[name])]
    return HEAD + "\n".join(lines) + "\n"


def _command(path: str, command: Any) -> Iterator[str]:
    context = command.make_context(path.split()[-1], [], resilient_parsing=True)
    text = (command.help or "").replace("\b", "")
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if block.strip().startswith("Examples:"):
            examples = "\n".join(line.strip() for line in block.strip().splitlines()[1:])
            yield from ("```bash", examples, "```", "")
        else:
            yield from (_escaped(" ".join(block.split())), "")
    if getattr(command, "commands", None):
        for name, inner in sorted(command.commands.items()):
            yield from (f"### {path.split()[-1]} {name}", "", *_command(f"{path} {name}", inner))
        return
    yield from ("| option | meaning | default |", "| --- | --- | --- |")
    for parameter in command.get_params(context):
        if (row := _row(parameter, context)) is not None:
            yield row
    yield ""


def _row(parameter: Any, context: Any) -> str | None:
    record = parameter.get_help_record(context)
    if parameter.param_type_name == "argument":
        shown, text = (parameter.metavar or parameter.name.upper()), getattr(parameter, "help", "")
        return f"| `{shown}` | {_escaped(text or '')} | |"
    if record is None or "--help" in parameter.opts:
        return None
    flags, text = record
    text, _, default = text.partition("[default: ")
    default = _escaped(default.rstrip("] ").strip("()"))
    return f"| `{flags}` | {_escaped(' '.join(text.split()))} | {default} |"


def _first(command: Any) -> str:
    text = (command.help or "").strip().split("\n\n")[0]
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    return re.sub(r"([|<*_\[\]])", r"\\\1", text)


# Hooks of MkDocs -----------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    def add(uri: str, **content: Any) -> None:
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, **content))

    for uri, source in COPIED.items():
        add(uri, content=(ROOT / source).read_text())
    for uri, text in api_pages():
        add(uri, content=text)
    add("commands.md", content=commands())
    for path in linked():
        add(_uri(path), abs_src_path=str(path))
    return files


def on_config(config: Any) -> Any:
    """The navigation of the API has one page per module."""
    pages = ["api/index.md", *(f"api/{(x or 'ops').replace('.', '-')}.md" for x in MODULES)]
    for entry in config.nav:
        if entry.get("API") == "api/":
            entry["API"] = pages
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links of files outside docs/ lead to their pages, or to copies of the files."""
    uri = page.file.src_uri
    page.meta.setdefault("hide", HIDDEN.get(uri, []))
    source = ROOT / COPIED[uri] if uri in COPIED else DOCS / uri

    def new(match: re.Match[str]) -> str:
        path = (source.parent / unquote(match[2])).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            return match[0]
        target = os.path.relpath(_uri(path), Path(uri).parent)
        return f"{match[1]}{target}{match[3] or ''}{match[4]}"

    return outside_code(lambda text: LINK.sub(new, text), markdown)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Formulas as MathML, which browsers show without a script."""
    from latex2mathml.converter import convert

    def block(match: re.Match[str]) -> str:
        return convert(html.unescape(match[1]).strip(), display="block")

    def inline(match: re.Match[str]) -> str:
        return convert(html.unescape(match[1]).strip())

    content = re.sub(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', block, content, flags=re.S)
    content = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', inline, content, flags=re.S)
    return CELL.sub(_with_length, content)


def _with_length(match: re.Match[str]) -> str:
    """A table cell with a class by the length of its text."""
    length = len(" ".join(html.unescape(re.sub("<[^>]+>", "", match[2])).split()))
    name = next((name for least, name in LENGTHS.items() if length >= least), None)
    return match[0] if name is None else f'<td class="{name}"{match[1]}>{match[2]}</td>'


def outside_code(change: Any, markdown: str) -> str:
    """Applies a function to the parts of a page that are no fenced code."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.S | re.M)
    return "".join(text if i % 2 else change(text) for i, text in enumerate(parts))


def linked() -> set[Path]:
    """Files of the repository that pages link to, and that are no pages."""
    sources = [*DOCS.rglob("*.md"), *(ROOT / source for source in COPIED.values())]
    found = set()
    for source in sources:
        for match in LINK.finditer(source.read_text()):
            path = (source.parent / unquote(match[2])).resolve()
            if path.is_file() and path.is_relative_to(ROOT) and path.suffix != ".md":
                found.add(path)
    return {path for path in found if not path.is_relative_to(DOCS) or path.suffix == ".html"}


def _uri(path: Path) -> str:
    """Return the path of a repository file in the site."""
    for uri, source in COPIED.items():
        if path == ROOT / source:
            return uri
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"files/{path.relative_to(ROOT).as_posix()}"


# Checks --------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Links and anchors of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("id", "name") and value:
                self.anchors.add(value)
            if key in ("href", "src") and value:
                self.links.append(value)


def broken(site: Path) -> list[str]:
    """Links of the built site without a target, and files that it loads from other hosts."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    pages = {path: page for path, page in pages.items() if path.name not in ("404.html",)}
    found = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            file = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            missing = not file.exists()
            if missing or (anchor and file in pages and unquote(anchor) not in pages[file].anchors):
                found.append(f"{path.relative_to(site)}: {link}")
        loaded = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]+(?:src|href)="(https?:[^"]+)',
            path.read_text(),
        )
        found += [f"{path.relative_to(site)} loads {link}" for link in loaded]
    return found


def external(site: Path) -> list[str]:
    """External links of the built site that cannot be opened."""
    links = {
        link.partition("#")[0]
        for path in site.rglob("*.html")
        for link in Page(path.read_text()).links
        if link.startswith(("http:", "https:"))
    }
    found = []
    for link in sorted(links):
        try:
            with urlopen(Request(link, headers={"User-Agent": "Mozilla/5.0"}), timeout=20):
                pass
        except OSError as error:
            found.append(f"{link}: {error}")
    return found


def phrases() -> list[str]:
    """Lines of the repository with a phrase that the word lists refuse."""
    listed = ["git", "ls-files", *TEXTS]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in files.split():
        if name in UNCHECKED or not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_text()
        found += [f"{name}:{problem}" for problem in refused(text, PHRASES)]
        if name.endswith(".md") or (name.endswith(".py") and name.startswith(f"{PACKAGE}/")):
            found += [f"{name}:{problem}" for problem in refused(text, IN_DOCS)]
    return found


def refused(text: str, listed: dict[str, str]) -> list[str]:
    """Line numbers of a text with phrases of a list, and what to write."""
    some = re.compile("|".join(rf"\b({old})" for old in listed), re.I)
    if not some.search(text):  # most texts
        return []
    phrases = {re.compile(rf"\b({old})(?!\w)", re.I): new for old, new in listed.items()}
    return [
        f"{number}: {match[0]!r}; write: {new}"
        for number, line in enumerate(text.splitlines(), start=1)
        for old, new in phrases.items()
        if (match := old.search(line))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--external", action="store_true", help="request external links, too")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="folder of the site")
    options = parser.parse_args()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d"]
    result = subprocess.run([*command, str(options.site.resolve())], cwd=ROOT)
    if result.returncode:
        return result.returncode
    problems = broken(options.site.resolve()) + phrases()
    if options.external:
        problems += external(options.site)
    print(*problems, sep="\n")
    print(f"{options.site}: {len(problems)} broken links and refused phrases")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
