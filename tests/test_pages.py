"""The pages tell what is there: every folder has its sentence, every link leads somewhere, every command parses."""

import contextlib
import io
import re
import shlex
import tomllib
from pathlib import Path

from reflex_runtime.cli import VERBS, build_parser

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "reflex_runtime"
BESIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "contract" / "PROMISES.md"]
PAGES = [*BESIDE, *sorted((ROOT / "docs").glob("*.md"))]


def folders() -> list[str]:
    return sorted({f"{path.parent.relative_to(SOURCE)}/" for path in SOURCE.rglob("*.py")} - {"./"})


def test_architecture_has_one_sentence_for_every_folder_and_none_for_others() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    described = re.findall(r"^\| `([\w/]+/)` \| .+ \|$", text, re.MULTILINE)
    assert sorted(described) == folders()


def anchors(page: Path) -> set[str]:
    """Of its headings, as code hosts and the site of `make docs` make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r"\[(.+?)\]\(.*?\)", r"\1", heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text) + re.findall(r'src="([^"]+)()"', text):
            there = page.parent / target if target else page
            if target.startswith(("http://", "https://")):
                continue
            if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
                broken += [f"{page.name}: {target}#{anchor}"]
    assert broken == []


def test_code_below_a_list_is_no_part_of_its_last_item() -> None:
    """Four spaces there continue the item: the page shows the command as text. Put it in the item, or fence it."""
    item = re.compile(r"^(?:[-*]|\d+\.) [^\n]*\n(?:[^\n]+\n)*\n {4}[^ ]", re.MULTILINE)
    unfenced = {page: re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL) for page in PAGES}
    assert [f"{page.name}: {found[0]}" for page, text in unfenced.items() for found in item.finditer(text)] == []


def test_files_that_are_named_are_there() -> None:
    """Those whose name begins with a folder of the package or of the repository; `my_wire.py` is the reader's."""
    places = [ROOT, SOURCE]
    tops = {path.name for place in places for path in place.iterdir() if path.is_dir()}
    missing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`((\w+)/[\w/.-]+\.(?:py|toml|yml|conf|proto|json|md))\b", text):
            if name[1] in tops and "my_" not in name[0] and not any((place / name[0]).exists() for place in places):
                missing += [f"{page.name}: {name[0]}"]
    assert missing == []


def test_the_index_has_every_page_once() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^- \[.+?\]\(([\w-]+\.md)\): ", index, re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")


def test_the_readme_is_a_screen_with_badges_that_are_true() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 65
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    said = {file: (ROOT / file).read_text(encoding="utf-8") for file in re.findall(r"docs/images/badge-\w+\.svg", text)}
    facts = {
        "python": project["project"]["requires-python"].removeprefix(">=") + " or newer",
        "licence": project["project"]["license"],
        "typed": "mypy --strict" if project["tool"]["mypy"]["strict"] else "",
    }
    for name, fact in facts.items():
        assert f": {fact}</title>" in said.pop(f"docs/images/badge-{name}.svg")
    assert said == {}


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = re.findall(r"^    (reflex .+?)(?:\s{2,}#.*|\s+#.*)?$", text, re.MULTILINE)
        found += [(page.name, line) for line in lines + re.findall(r"`(reflex [^`]+)`", text)]
    return found


def refusal(command: str) -> str:
    """What is wrong with a command, "" if it parses."""
    words = shlex.split(command)[1:]
    if any(word in ("…", "...") or word.startswith("[") for word in words):
        return "no command anyone can type"
    if not (words[0].startswith("-") or words[0] in VERBS):
        return "no such verb"
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parser = build_parser(words)
            if len(words) > 1 and words[1:] != ["--help"]:
                parser.parse_args(words)
    except SystemExit:
        return errors.getvalue()
    return ""


def test_commands_on_the_pages_parse() -> None:
    found = {(page, command): refusal(command) for page, command in commands()}
    assert {told: wrong for told, wrong in found.items() if wrong} == {}
