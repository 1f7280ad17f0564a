"""The command `reflex`. A verb's module is imported only if that verb was given, so that `reflex --help` is quick."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, NoReturn

from reflex_runtime.cli.console import status_of
from reflex_runtime.core.errors import ConfigError
from reflex_runtime.version import __version__

_MISSING = "the following arguments are required: "  # argparse's words

VERBS = {
    "serve": "serve a robot policy (POST /act), a language model (the OpenAI API) or your own function over HTTP",
    "top": "watch a running server in the terminal: its batches, clients, queues and processes",
    "probe": "send a server one request on each wire, and show what the wires expect",
    "feeds": "run many cameras and videos on one processor",
    "demo-export": "write the bundled demo policy to a directory",
    "trace": "show a trace of batches as a table and a picture",
    "simulate": "run the scheduler on a simulated load and device, in virtual time",
    "tune": "find the settings that suit a recorded load, and predict what they bring",
    "replay": "replay a recording through a model or the scheduler",
    "report": "sum up recordings, and compare versions a and b",
    "export": "write an export directory from a LeRobot checkpoint",
    "doctor": "check an export directory before serving it",
    "worker": "a runtime process: runs language models for a server in another process",
}
"""Every verb, with its line in `reflex --help`."""
_TOGETHER = {  # verbs that share a file
    "doctor": "exports", "export": "exports", "demo-export": "exports", "replay": "recordings", "report": "recordings",
    "simulate": "simulation", "tune": "simulation", "worker": "serve_llm",
}  # fmt: skip


def _words() -> Any:
    """`settings.declare`, imported late: only errors need it."""
    return import_module("reflex_runtime.settings.declare")


class Parser(argparse.ArgumentParser):
    """An argparse parser whose usage errors are one line with a hint, and exit status 2.

    anywhere: name of the list of words that may also follow options. elsewhere: hints for options of other commands.
    """

    def __init__(
        self, *args: Any, anywhere: str = "", elsewhere: Mapping[str, str] = MappingProxyType({}), **more: Any
    ) -> None:
        more.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        more["allow_abbrev"] = False  # with each new option an abbreviation could change its meaning
        super().__init__(*args, **more)
        self._anywhere, self._elsewhere = anywhere, elsewhere

    def error(self, message: str) -> NoReturn:
        if message.startswith(_MISSING):
            message = f"missing: {message.removeprefix(_MISSING)}; {self._form()}"
        if found := re.fullmatch(r"argument (\S+): ignored explicit argument .*", message):
            message = f"{found[1].replace('/', ' or ')}: takes no value"
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse an unknown option here, because argparse would do so in the top parser, which knows no options."""
        found, rest = super().parse_known_args(args, namespace)
        if self._anywhere:
            words = [word for word in rest if not word.startswith("-")]
            setattr(found, self._anywhere, [*getattr(found, self._anywhere), *words])
            rest = [word for word in rest if word.startswith("-")]
        unknown = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
        if unknown is not None:
            longer = [name for name in self._option_string_actions if name.startswith(unknown)]
            near = f"; write {' or '.join(longer)}"
            near = near if longer else _words().did_you_mean(unknown, self._option_string_actions)
            hint = self._elsewhere.get(unknown) or near
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        if rest:
            self.error(f"unrecognized arguments: {' '.join(map(_words().one_line, rest))}; {self._form()}")
        return found, rest

    def _form(self) -> str:
        """Usage without options."""
        formatter = self._get_formatter()
        formatter.add_usage(None, [action for action in self._actions if not action.option_strings], [], "")
        return f"write {' '.join(formatter.format_help().split())}; {self.prog} --help shows all options"

    # for these values argparse's errors name all flags of an option, but not its choices

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            words = _words()
            self.error(f"{_named(action)}={words.one_line(value)}: {words.one_of(str(value), action.choices)}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if isinstance(error.__context__, ConfigError):
                self.error(error.__context__.message)
            if action.type not in (int, float):
                raise
            kind = "a whole number" if action.type is int else "a number"
            self.error(f"{_named(action)}={_words().one_line(arg_string)}: must be {kind}")

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            if not action.option_strings or action.nargs is not None:
                raise
            name = _named(action)
            self.error(f"{name}: expected one argument; write {name} {action.metavar or action.dest.upper()}")


def _named(action: argparse.Action) -> str:
    """An option by its long flag; a positional argument by its name."""
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all verbs, with the options of the verb that is the first of `words`."""
    parser = Parser(
        prog="reflex",
        description="Decide which requests share the next forward pass, serve them, and watch every batch.",
    )
    parser.add_argument("--version", action="version", version=f"reflex {__version__}")
    verbs = parser.add_subparsers(title="commands", dest="verb", metavar="COMMAND", required=True, parser_class=Parser)
    verb = words[0] if words else ""
    for name, text in VERBS.items():
        if name != verb:
            verbs.add_parser(name, help=text)
    if verb in VERBS:
        _adds(verb, words[1:])(verbs)
    elif verb.startswith("-") and verb not in ("-h", "--help", "--version"):
        near = _words().did_you_mean(verb, ("--help", "--version"))
        parser.error(f"{_words().one_line(verb)}: no such option{near}")
    elif verb and not verb.startswith("-"):
        near = _words().did_you_mean(verb, VERBS)
        parser.error(f"{_words().one_line(verb)}: no such command{near}; there are {', '.join(VERBS)}")
    return parser


def _adds(verb: str, words: Sequence[str]) -> Callable[[Any], None]:
    """The function that registers a verb. For `serve` it depends on the kind of the sources: each has other options."""
    module, function = _TOGETHER.get(verb, verb), "add_parser"
    if verb in _TOGETHER:
        function = f"add_{verb.replace('-', '_')}"
    elif verb == "serve":
        from reflex_runtime.cli.serving import kind_of

        module = {"model": "serve_llm", "functions": "serve_functions"}.get(kind_of(words), "serve")
    adds: Callable[[Any], None] = getattr(import_module(f"reflex_runtime.cli.{module}"), function)
    return adds


def _prepare(verb: str) -> None:
    """Set up the process before a library is imported or starts a thread; forked processes inherit it."""
    from reflex_runtime.run.process import prepare_memory, telemetry_off

    telemetry_off()  # before the user's code imports libraries that have some
    if verb in ("serve", "worker"):
        prepare_memory()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb and return its exit status. An error that a user can fix is one line on standard error."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it: /dev/null gets its number, the lowest that is free
            os.set_inheritable(nowhere := os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(nowhere, "r+"))
    prefix = ["reflex"]

    def run() -> int:
        words = sys.argv[1:] if argv is None else argv
        if words and words[0] in VERBS:
            _prepare(words[0])
        parser = build_parser(words)
        if not words:
            parser.print_help(sys.stderr)
            return 2
        args = parser.parse_args(words)
        prefix.append(args.verb)
        return int(args.run(args))

    return status_of(run, prefix)
