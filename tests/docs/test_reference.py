"""The reference has every public name, the settings page every setting, and all links lead on."""

import ast
import inspect
import re
import sys
from importlib import import_module
from itertools import pairwise
from types import ModuleType

import pytest
from docs_pages import PAGES, ROOT, text_of

import hpcdist
from hpcdist.config import Config
from website import names as all_names

REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))


def public_names():
    """Return what `import hpcdist` gives: its own functions and classes, `stream` and `launch`."""
    return sorted(
        name
        for name in dir(hpcdist)
        if not name.startswith("_") and (name in ("stream", "launch") or _is_ours(value_of(name)))
    )


def value_of(name):
    """Return what a dotted name below `hpcdist` means, or where torch is missing a class for it."""
    value, path = hpcdist, "hpcdist"
    for part in name.split("."):
        hidden = sys.modules.get(path)  # the module, where its package has a function of this name
        path += f".{part}"
        try:
            owner = value if hasattr(value, part) else hidden
            value = getattr(owner, part) if hasattr(owner, part) else import_module(path)
        except ImportError:
            return _NeedsTorch
    return value


class _NeedsTorch:
    """What is made of torch modules."""

    __module__ = "hpcdist.torch"


def _is_ours(value):
    module = getattr(value, "__module__", None) or ""
    return not isinstance(value, ModuleType) and module.startswith("hpcdist")


def referenced_names():
    return re.findall(r"^::: hpcdist\.(\S+)$", "\n".join(map(_read, REFERENCE)), re.M)


def _read(path):
    return path.read_text()


def test_every_public_name_is_in_the_reference_once():
    assert sorted(name for name in referenced_names() if "." not in name) == public_names()


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_a_docstring(name):
    assert value_of(name).__doc__


def test_every_page_of_the_reference_is_in_its_index():
    index = _read(ROOT / "docs/reference/index.md")
    assert [path.name for path in REFERENCE if f"({path.name})" not in index] == ["index.md"]


def test_the_page_of_all_names_is_as_it_is_written_today():
    assert all_names.PAGE.read_text() == all_names.page(), "run python -m website.names"


# ---- settings


def settings():
    """Return the row that the settings page has for each field, made from the source."""
    source = ast.parse((ROOT / "hpcdist/config.py").read_text())
    classes = {node.name: node.body for node in source.body if isinstance(node, ast.ClassDef)}
    meaning = {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(classes["Config"])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    return [
        f"| `HPCDIST_{name.upper()}` | `{default}` | {meaning[name]} |"
        for name, default in Config()._asdict().items()
    ]


@pytest.mark.parametrize("row", settings())
def test_every_setting_has_its_row(row):
    assert row in text_of("docs/settings.md").splitlines()


def test_every_variable_of_hpcdist_is_a_setting_or_explained_there():
    used = {f"HPCDIST_{name.upper()}" for name in Config._fields}
    for path in (ROOT / "hpcdist").rglob("*.py"):
        used |= set(re.findall(r"HPCDIST_[A-Z_]+[A-Z]\b", path.read_text()))
    told = set(re.findall(r"HPCDIST_[A-Z_]+\b", text_of("docs/settings.md")))
    assert used == told


# ---- links


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_every_link_leads_to_a_file_and_a_heading(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def headings(path):
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


# ---- what a docstring says of arguments

MADE_BY_US = re.compile(r"[Mm]ade by|makes of|returns it\b|Arguments as of|[Ss]ee `")
"""Said of what no user makes, and of what has the arguments of something else."""

FOR_AUTHORS_OF_TRANSPORTS = ("transport.", "testing.")
"""What nobody calls who only uses hpcdist."""

REFERS = re.compile(r"[Ss]ee `|[Aa]lias of|[Rr]efuse: |Raise `UsageError`: |what `\w+` does")
"""Said of methods that have the arguments of another one, or always fail."""


def described():
    """Yield what the reference describes, by name; of a module, what is shown of it."""
    for page in REFERENCE:
        for name, options in re.findall(
            r"^::: hpcdist\.(\S+)\n((?: +.*\n)*)", _read(page) + "\n", re.M
        ):
            value = value_of(name)
            if not isinstance(value, ModuleType):
                yield name, value
                continue
            only = re.search(r"members: (false|\[[^\]]*\])", options)
            chosen = set(re.findall(r"\w+", only[1])) if only else vars(value).keys()
            for member in sorted(chosen & vars(value).keys()):
                of_module = getattr(vars(value)[member], "__module__", "") == value.__name__
                if of_module and not member.startswith("_"):
                    yield f"{name}.{member}", vars(value)[member]


def _arguments(value):
    try:
        names = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in names if name != "self"]


def test_what_takes_arguments_describes_them():
    silent = [
        name
        for name, value in described()
        if (inspect.isfunction(value) or _is_made(value)) and _arguments(value)
        if "Args:" not in value.__doc__ and not MADE_BY_US.search(value.__doc__)
    ]
    assert silent == []


def methods():
    """Yield the public methods of what the reference describes: name, function and arguments."""
    for name, value in described():
        for member, found in vars(value).items() if inspect.isclass(value) else ():
            method = getattr(value, member)
            if inspect.isroutine(method) and not member.startswith("_"):
                is_bound = inspect.ismethod(method) or isinstance(found, staticmethod)
                arguments = [*inspect.signature(method).parameters]
                yield f"{name}.{member}", method, arguments[not is_bound :]


def test_what_users_call_has_an_example():
    silent = [
        name
        for name, value in described()
        if "Example:" not in value.__doc__ and not name.startswith(FOR_AUTHORS_OF_TRANSPORTS)
        if (inspect.isroutine(value) and not REFERS.search(value.__doc__))
        or (_is_made(value) and not MADE_BY_US.search(value.__doc__))
    ]
    assert silent == []


def test_methods_that_take_arguments_describe_them():
    silent = [
        name
        for name, method, arguments in methods()
        if arguments and method.__doc__ and "Args:" not in method.__doc__
        if not REFERS.search(method.__doc__)
    ]
    assert sorted(silent) == []


def _is_made(value):
    """Return whether users make instances: not of exceptions, values of enums, or records."""
    return inspect.isclass(value) and "__init__" in vars(value) and not issubclass(value, Exception)


def test_sections_of_arguments_name_what_the_signature_has():
    unknown = []
    given = [(name, value, _arguments(value)) for name, value in described()]
    given += [
        (name, method, [*inspect.signature(method).parameters]) for name, method, _ in methods()
    ]
    for name, value, names in given:
        section = re.search(r"^Args:\n((?: {4,}.*\n| *\n)*)", f"{inspect.getdoc(value)}\n", re.M)
        if section and names:
            told = re.findall(r"^ {4}([\w*][\w, *]*):(?: |$)", section[1], re.M)
            told = [each for line in told for each in re.findall(r"\w+", line)]
            unknown += [f"{name}: {each}" for each in told if each not in names]
    assert unknown == []
