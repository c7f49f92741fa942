"""Links of the pages, for mkdocs: what stands outside of docs/ is linked to in the
repository, and what is in docs/ but is no page or picture too."""

import os
import re

from mkdocs.exceptions import PluginError

SECTION = re.compile(r"^## ([^:]+)")  # "Guides: do something" is "Guides" in the navigation
CHECKBOX = re.compile(r"^(\s*- )\[ \]", re.MULTILINE)  # mkdocs has none
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

    return LINK.sub(link, CHECKBOX.sub("\\1☐", markdown))
