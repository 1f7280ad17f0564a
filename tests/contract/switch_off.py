"""Switch each option off in code, one at a time, and see whether the test of its effect fails.

    python tests/contract/switch_off.py                      every option
    python tests/contract/switch_off.py "serve --trace" slo     those whose flag holds one of these words
    python tests/contract/switch_off.py --missing            those without a row in OPTIONS.md

In a temporary copy of src the option is read as its default, whatever it was set to. Only the tests read what it was
set to, and settings/declare.py, which checks and shows settings: it is taken, checked and shown, and has no effect. An
option of a command line alone is taken, and its default is given to the command. The verdicts go to OPTIONS.md. Not
part of the test run: it takes half an hour. Exit code 1 when a test passes without its option.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from argparse import SUPPRESS
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from contract.effects import COMMANDS, EFFECTS, OF_VERBS, SHARED, options_of  # noqa: E402
from reflex_runtime.settings.declare import flag  # noqa: E402

PAGE = HERE / "OPTIONS.md"
HEAD = """# What becomes of each option's test when the option is switched off

`python tests/contract/switch_off.py` writes this table. The last column is where the test fails then, or SURVIVED.

| option | test | without the option |
| --- | --- | --- |
"""
OFF = """

class _Off:
    def __init__(self, slot, default):
        self.slot, self.default = slot, default  # of a class without slots the slot is the default

    def __set__(self, config, value):
        self.slot.__set__(config, value) if hasattr(self.slot, "__set__") else config.__dict__.update({name}=value)

    def __get__(self, config, kind=None):
        import sys
        if config is None:
            return self.default
        reader = sys._getframe(1).f_code
        file = reader.co_filename
        value = self.slot.__get__(config) if hasattr(self.slot, "__set__") else config.__dict__[{name!r}]
        if (
            value == self.default
            or file.endswith(("/dataclasses.py", "/reflex_runtime/settings/declare.py"))
            or file.startswith({tests!r})
        ):
            return value
        with open({reads!r}, "a") as reads:
            reads.write(f"{{file}} {{reader.co_name}}\\n")
        return self.default

{kind}.{name} = _Off({kind}.{name}, {kind}.__dataclass_fields__[{name!r}].default)
"""
READ_AS_TYPED = {("trace", "sweep"), ("trace", "slo")}  # not from their class, which only declares them
OFF_OF_VERB = """

_run_with_it = run

def run(args):
    if getattr(args, {name!r}, {default!r}) != {default!r}:
        with open({reads!r}, "a") as reads:
            reads.write("run\\n")
        if {default!r} == "==SUPPRESS==":
            delattr(args, {name!r})
        else:
            setattr(args, {name!r}, {default!r})
    return _run_with_it(args)
"""


def places() -> dict[str, str]:
    """Test -> its file and name, as pytest takes them."""
    found = {}
    for file in sorted(HERE.parent.rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            found[name] = f"{file.relative_to(ROOT)}::{name}"
    return found


def switches(reads: Path) -> Iterator[tuple[str, str, str, str]]:
    """(option, its test, the module to change, what to append to it) of every option."""
    for kind, effects in EFFECTS.items():
        for name, test in effects.items():
            if COMMANDS[kind] == "serve FUNCTION" and name in SHARED:
                continue
            if (COMMANDS[kind], name) in READ_AS_TYPED:
                code = OFF_OF_VERB.format(name=name, default=SUPPRESS, reads=str(reads))
                yield f"{COMMANDS[kind]} {flag(name)}", test, f"reflex_runtime.cli.{COMMANDS[kind]}", code
                continue
            code = OFF.format(kind=kind.__name__, name=name, tests=str(HERE.parent), reads=str(reads))
            yield f"{COMMANDS[kind]} {flag(name)}", test, kind.__module__, code
    for verb, effects in OF_VERBS.items():
        actions = options_of(verb)
        for name, test in effects.items():
            action = actions[name]
            code = OFF_OF_VERB.format(name=action.dest, default=action.default, reads=str(reads))
            yield f"{verb} {name}", test, f"reflex_runtime.cli.{verb}", code


def verdict(folder: Path, module: str, code: str, test: str) -> str:
    """Run a test with an option switched off; where it fails."""
    place, reads = Path("src", *module.split(".")).with_suffix(".py"), folder / "reads"
    reads.unlink(missing_ok=True)
    (folder / place).write_text((ROOT / place).read_text() + code)
    try:
        return outcome(folder, reads, test)
    finally:
        shutil.copy2(ROOT / place, folder / place)


def outcome(folder: Path, reads: Path, test: str) -> str:
    """Run a test; where it fails, and whether anything read the option."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", "--timeout=150", test],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(folder / "src")}, cwd=ROOT, check=False,
    )  # fmt: skip
    if not reads.exists():
        return "SURVIVED: nothing reads it" if done.returncode == 0 else "UNCLEAR: fails, and nothing reads it"
    if done.returncode != 1:
        return f"SURVIVED (status {done.returncode})"
    lines = re.findall(r"^E +(\S.*)", done.stdout, re.MULTILINE) or ["?"]
    line = re.sub(r"/tmp/\S*/", "", lines[0].replace(sys.executable, "python"))
    return line[:100].replace("|", "\\|").replace("`", "'")


def rows() -> dict[str, str]:
    """The rows of OPTIONS.md by option."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return {found[1]: found[0] for found in re.finditer(r"^\| `([^`]*)` \|.*\n", text, re.MULTILINE)}


def main() -> int:
    words, known, tests = sys.argv[1:], rows(), places()
    survived = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copytree(ROOT / "src", folder / "src")  # with what is compiled
        every = list(switches(folder / "reads"))
        if words and "--missing" not in words and not any(word in option for word in words for option, *_ in every):
            print(f"no option holds {' or '.join(words)}; write flags, such as --max-queue", file=sys.stderr)
            return 2
        table = {option: known.get(option, "") for option, *_ in every}
        for option, test, module, code in every:
            wanted = option not in known if "--missing" in words else not words or any(word in option for word in words)
            if not wanted:
                continue
            said = verdict(folder, module, code, tests[test])
            survived += said.startswith("SURVIVED")
            print(f"{option:45} {said}", flush=True)
            table[option] = f"| `{option}` | `{test}` | `{said}` |\n"
            PAGE.write_text(HEAD + "".join(table.values()), encoding="utf-8")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
