"""What mkdocs needs to show the pages as GitHub does: links to what stands outside of
docs/, or is no page or picture, lead to the repository; lists are indented as its
Markdown needs it."""

import os
import re

from mkdocs.exceptions import PluginError

SECTION = re.compile(r"^## ([^:]+)")  # "Guides: do something" is "Guides" in the navigation
CHECKBOX = re.compile(r"^(\s*- )\[ \]", re.MULTILINE)  # mkdocs has none
ITEM = re.compile(r" *(?:[-*]|\d+\.) +")
LOST_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) .*", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_config(config):
    """Orders the navigation as the index does, docs/README.md: its sections, and in
    each the pages that it links to. A page that it leaves out fails the build."""
    root = config["docs_dir"]
    sections = [{"Documentation": "README.md"}]
    listed = {"README.md"}
    with open(os.path.join(root, "README.md"), encoding="utf-8") as index:
        for line in index:
            if heading := SECTION.match(line):
                sections.append({heading.group(1).strip(): []})
                continue
            for target in (m.group(2) for m in LINK.finditer(line)):
                if target.endswith(".md") and not target.startswith("..") and target not in listed:
                    listed.add(target)
                    next(iter(sections[-1].values())).append(target)
    for folder, _, names in os.walk(root):
        for name in names:
            page = os.path.relpath(os.path.join(folder, name), root)
            if name.endswith(".md") and page not in listed:
                raise PluginError("docs/README.md does not list %s" % page)
    config["nav"] = [s for s in sections if next(iter(s.values()))]
    return config


def on_files(files, config):
    """Leaves out what is for programs: tests, manual pages and their sources."""
    kept = (".md", ".svg", ".png", ".css", ".js")
    for file in list(files):
        if not file.src_path.endswith(kept) and file.src_path.startswith(("man/",)):
            files.remove(file)
        elif file.src_path.endswith(".go"):
            files.remove(file)
    return files


def on_page_markdown(markdown, page, config, files):
    root = config["docs_dir"]
    top = os.path.dirname(root)
    here = os.path.dirname(page.file.src_path)

    def link(match):
        target = match.group(2)
        if "://" in target or target.startswith("mailto:"):
            return match.group(0)
        path = os.path.normpath(os.path.join(here, target))
        if not path.startswith("..") and files.get_file_from_path(path):
            return match.group(0)
        absolute = os.path.normpath(os.path.join(root, path))
        if not os.path.exists(absolute):
            return match.group(0)  # mkdocs names the dead link
        kind = "tree" if os.path.isdir(absolute) else "blob"
        url = "%s/%s/main/%s" % (config["repo_url"].rstrip("/"), kind, os.path.relpath(absolute, top))
        return match.group(1) + url + (match.group(3) or "") + match.group(4)

    return LINK.sub(link, nest(CHECKBOX.sub("\\1☐", markdown)))


def nest(markdown):
    """Indents what is in a list item by four spaces a level, where GitHub wants no more
    than the width of the item's marker; and separates an item from one of several
    paragraphs."""
    lines, levels, fenced, blank, paragraphs = [], [], False, False, False
    for line in markdown.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        if not line.strip():
            lines.append(line)
            blank = paragraphs = True
            continue
        if line.lstrip().startswith("```"):
            fenced = not fenced
        item = None if fenced else ITEM.match(line)
        if item and levels and paragraphs and not blank:
            lines.append("")
        while levels and indent < levels[-1] and (item or blank) and not fenced:
            levels.pop()
        base = levels[-1] if levels else 0
        if indent >= base:
            lines.append(" " * (4 * len(levels) - base) + line)
        else:
            lines.append(line)
        if item and indent - base < 4:
            levels.append(len(item.group(0)))
            paragraphs = False
        blank = False
    return "\n".join(lines)


def on_page_content(html, page, config, files):
    """Fails if a list item is shown as text."""
    text = re.sub(r"<pre>.*?</pre>", "", html, flags=re.DOTALL)
    if lost := LOST_ITEM.search(text):
        raise PluginError("%s: not shown as a list: %s" % (page.file.src_path, lost.group(0)))
    return html
