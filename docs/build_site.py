"""Builds the documentation site from README.md, CHANGELOG.md, docs/ and the docstrings: `make docs`.

    python docs/build_site.py                # build/site/index.html
    python docs/build_site.py --source-only  # build/site_source alone: the pages and the mkdocs.yml of the builder

The README is the front page. Its links, and those of other pages that leave docs/, are rewritten in a copy, so that the
files in the repository keep the links that work there. docs/site.yml has the appearance and the order of the pages.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCE = ROOT / "build" / "site_source"
SITE = ROOT / "build" / "site"
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}  # files beside docs/ that are pages too
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]*)(#[^)\s]*)?(\))")


def packages() -> dict[str, Path]:
    """Returns the packages that have a page from docstrings, with their files: interlayer and those inside it."""
    top = ROOT / "src" / "interlayer"
    inner = sorted(path for path in top.glob("*/__init__.py") if not path.parent.name.startswith("_"))
    return {"interlayer": top / "__init__.py"} | {f"interlayer.{path.parent.name}": path for path in inner}


def public_names(path: Path) -> list[str]:
    """Returns `__all__` of a package without importing it: functions, then classes and errors."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value), key=lambda name: (name[0].isupper(), "Error" in name, name))
    return []


def defined_in(package: str, name: str) -> str:
    """Returns the full name of an object that a package exports, where it is defined.

    `interlayer.hosts.attach` alone would name the file of the function `attach`.
    """
    for node in ast.walk(ast.parse((ROOT / "src" / package.replace(".", "/") / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            module = package.rsplit(".", node.level - 1)[0] + "." + (node.module or "")
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            if (ROOT / "src" / module.replace(".", "/") / "__init__.py").is_file():
                return defined_in(module, original)
            return f"{module}.{original}"
    return f"{package}.{name}"


def reference_page(package: str, path: Path) -> str:
    """Returns the Markdown of a page from docstrings: that of the package and of each public name."""
    summary = (ast.get_docstring(ast.parse(path.read_text())) or "").strip()
    entries = "\n\n".join(f"::: {defined_in(package, name)}" for name in public_names(path))
    return f"# {package}\n\n{summary}\n\n{entries}\n"


def for_site(text: str, folder: Path) -> str:
    """Returns the text of a page of this folder with links between pages as they are in the site."""

    def rewritten(match: re.Match[str]) -> str:
        before, target, anchor, after = match[1], match[2], match[3] or "", match[4]
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = (folder / target).resolve().relative_to(ROOT).as_posix()
        return f"{before}{OUTSIDE.get(path, path.removeprefix('docs/'))}{anchor}{after}"

    return LINK.sub(rewritten, text)


def navigation(entries: list[Any]) -> list[Any]:
    """Returns the entries of docs/site.yml whose pages exist; `reference/` becomes the pages from docstrings."""
    kept: list[Any] = []
    for entry in entries:
        if entry == "reference/":
            kept += [{package: f"reference/{package}.md"} for package in packages()]
            continue
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: navigation(target)})
        elif target in OUTSIDE.values() or (DOCS / target).is_file():
            kept.append({title: target})
    return kept


def with_example_sections(code: str) -> str:
    """Returns Python code whose docstrings have their `>>>` examples in a section, without which they are no code.

    In Markdown, `>>>` begins a quotation, and brackets in it are links.
    """
    lines: list[str] = []
    inside = False
    for line in code.splitlines():
        text = line.lstrip()
        if not inside and text.startswith(">>> ") and lines and not lines[-1].strip():
            lines.append(line.removesuffix(text) + "Examples:")
            inside = True
        elif not text or text.startswith('"""'):
            inside = False
        lines.append(f"    {line}" if inside else line)
    return "\n".join(lines) + "\n"


def write_code(folder: Path) -> None:
    """Writes the package with docstrings as the builder reads them."""
    for path in (ROOT / "src" / "interlayer").rglob("*.py"):
        copy = folder / path.relative_to(ROOT / "src")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(with_example_sections(path.read_text()))


def write_source(folder: Path) -> None:
    """Writes the pages, the package and the mkdocs.yml that the builder reads to a new folder."""
    pages = folder / "pages"
    (pages / "reference").mkdir(parents=True)
    shutil.copytree(DOCS / "images", pages / "images")
    shutil.copy(DOCS / "site.css", pages)
    for path in DOCS.glob("*.md"):
        (pages / path.name).write_text(for_site(path.read_text(), DOCS))
    for name, page in OUTSIDE.items():
        (pages / page).write_text(for_site((ROOT / name).read_text(), ROOT))
    for package, path in packages().items():
        (pages / "reference" / f"{package}.md").write_text(reference_page(package, path))
    settings = yaml.safe_load((DOCS / "site.yml").read_text())
    settings |= {"docs_dir": "pages", "site_dir": "site", "nav": navigation(settings["nav"])}
    for plugin in settings["plugins"]:
        if "mkdocstrings" in plugin:
            plugin["mkdocstrings"]["handlers"]["python"]["paths"] = [(folder / "code").resolve().as_posix()]
    write_code(folder / "code")
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False))


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the documentation site.")
    parser.add_argument("--source-only", action="store_true", help="write build/site_source and run no builder")
    arguments = parser.parse_args()
    shutil.rmtree(SOURCE, ignore_errors=True)
    write_source(SOURCE)
    if arguments.source_only:
        print(f"written: {SOURCE}")
        return
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", "mkdocs.yml"]
    if code := subprocess.run(command, cwd=SOURCE).returncode:
        sys.exit(code)
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.move(SOURCE / "site", SITE)
    print(f"written: {SITE / 'index.html'}; for the search: python -m http.server --directory {SITE}")


if __name__ == "__main__":
    main()
