"""Command-line parsing: options, and config settings between them.

--section.key=value, --section.key value     a setting; --section.flag alone means true
--help [KEY]                                 options of the command, or help of a setting
"""

import argparse
import difflib
import math
import re
import sys
from collections.abc import Container, Iterable, Sequence
from typing import Any, NoReturn

from jaxforge.checkpoint.weights import WEIGHTS
from jaxforge.cli import suggestions
from jaxforge.cli.running import wide_console
from jaxforge.errors import UserError
from jaxforge.storage import trust

_SETTING = re.compile(r"--[a-zA-Z_]\w*(\.[^=.\s]+)+")
_CHOICE = re.compile(r"invalid choice: '(?P<said>.*)' \(choose from (?P<names>.*)\)")


class CommandParser(argparse.ArgumentParser):
    """`argparse` parser with suggestions for mistyped options, and with config settings.

    Args:
        command: name of the command.
        takes_settings: accept config settings.
        allows_unknown: return unknown options, which belong to another program.
        uses_runs: add `--trust-plugins`, which allows plugins of a run to be imported.
        options: options of `argparse.ArgumentParser`.
    """

    def __init__(
        self,
        command: str,
        *,
        takes_settings: bool = False,
        allows_unknown: bool = False,
        uses_runs: bool = False,
        **options: Any,  # noqa: ANN401  # argparse's own
    ) -> None:
        super().__init__(
            **{"prog": f"jaxforge {command}", "allow_abbrev": False, **options, "add_help": False}
        )
        self._takes_settings, self._allows_unknown = takes_settings, allows_unknown
        if uses_runs:
            self.add_argument(
                "--trust-plugins", action="store_true",
                help="import the modules in [plugins] of the run, which runs their code",
            )  # fmt: skip
        self._words: list[str] = []
        about = "show this help, or explain a section or key of the config; all: every key"
        self.add_argument(
            "-h", "--help", action=_Help, nargs="?" if takes_settings else 0,
            metavar="KEY", default=argparse.SUPPRESS,
            help=about if takes_settings else "show this help",
        )  # fmt: skip

    def parse(self, argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
        """Return the parsed options, and the settings as `--section.key=value`.

        With `allows_unknown`, unknown options precede the settings.

        Args:
            argv: arguments; by default those of this process.

        Raises:
            UserError: an argument is invalid.
            SystemExit: the arguments were `--help` (code 0).
        """
        settings, options = _split_settings(sys.argv[1:] if argv is None else argv)
        args, left = self.parse_known_args(options)
        # Before any config of a run is read.
        trust.grant_all(getattr(args, "trust_plugins", False))
        return args, [*left, *settings]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse like `argparse`, but refuse unknown arguments unless they are allowed."""
        # `error` looks for a misspelt option among all words.
        self._words = list(sys.argv[1:] if args is None else args)
        known, left = super().parse_known_args(self._words, namespace)
        if left and not self._allows_unknown:
            self.error(self._unknown(left[0]))
        return known, left

    def check_options(self, args: argparse.Namespace, names: Container[str], about: str) -> None:
        """Check that no option is given that has no effect.

        Args:
            args: the parsed command line.
            names: attributes of the options that have an effect.
            about: what they have an effect on, in words.

        Raises:
            UserError: another option is given.
        """
        for action in self._actions:
            value = getattr(args, action.dest, action.default)
            if action.option_strings and action.dest not in names and value != action.default:
                raise UserError(f"{action.option_strings[0]} does not apply to {about}. Remove it")

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with the message and a suggestion."""
        if match := _CHOICE.search(message):
            names = re.findall(r"[\w.-]+", match["names"])
            message += suggestions.hint(match["said"], names, quote="")
        if "required" in message:  # the required option may be misspelt
            options = {word.partition("=")[0] for word in self._words if word.startswith("--")}
            unknown = sorted(options - self._option_string_actions.keys())
            message = "; ".join([message, *map(self._unknown, filter(self._hint, unknown))])
        if "did you mean" not in message and re.search(r"required|^un(known|expected)", message):
            message += f"; `{self.prog} --help` lists the options"
        raise UserError(message)

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            takes_config = word.endswith(".toml") and "--config" in self._option_string_actions
            is_setting = self._takes_settings and _SETTING.fullmatch(f"--{word.partition('=')[0]}")
            meant = f"--config {word}" if takes_config else f"--{word}" if is_setting else ""
            return f"unexpected argument {word}" + (f"; did you mean {meant}?" if meant else "")
        option = word.partition("=")[0]
        return f"unknown option {option}{self._hint(option)}"

    def _hint(self, option: str) -> str:
        """Return a suggestion of similar options or settings, or ""."""
        name = option.strip("-").replace("-", "_")
        meant = {x.strip("-").replace("-", "_"): [x] for x in self._option_string_actions}
        if self._takes_settings:
            from jaxforge.config.reading import foreign_names  # as slow as the schema

            if name not in meant and (foreign := foreign_names.advice((name,), "--")):
                return foreign
            meant |= _settings_by_name()
        close = difflib.get_close_matches(name, meant, n=1, cutoff=suggestions.ALIKE)
        return f"; did you mean {' or '.join(meant[close[0]])}?" if close else ""


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    """Add `--weights`, which chooses the weights of a checkpoint of a run."""
    parser.add_argument(
        "--weights", choices=WEIGHTS, default=WEIGHTS[0],
        help="ema: the average of the parameters, which a run keeps with train.ema_decay "
        "(default: raw, the parameters)",
    )  # fmt: skip


def positive_int(text: str) -> int:
    """Parse an option value that is an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def positive_float(text: str) -> float:
    """Parse an option value that is a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


class _Help(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if isinstance(values, str):
            from jaxforge.config.reading import help  # imported here, because it is slow

            wide_console().print(help.topic(values))
        else:
            parser.print_help()
        parser.exit()


def _split_settings(argv: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the settings, each as one word, and all other words."""
    settings: list[str] = []
    options: list[str] = []
    words = list(argv)[::-1]
    while words:
        word = words.pop()
        name, equals, _ = word.partition("=")
        if word == "--":
            # All words after `--` are arguments, even those that look like settings.
            options += [word, *reversed(words)]
            break
        # Settings contain a dot, options never do.
        if not _SETTING.fullmatch(name):
            options.append(word)
        elif not equals and words and words[-1].startswith("="):
            raise UserError(f"{word} {words[-1]}: write {word}=VALUE, without spaces")
        elif not equals and words and _is_value(words[-1], name[2:]):
            settings.append(f"{word}={words.pop()}")
        else:
            settings.append(word)
    return settings, options


def _is_value(word: str, key: str) -> bool:
    """Return whether the word after a key is its value; flags need no value."""
    from jaxforge.config.reading.schema import node_at  # imported here, because it is slow

    if word.startswith("--"):
        return False
    is_flag = (node_at(tuple(key.split("."))) or {}).get("type") == "boolean"
    return not is_flag or word.lower() in ("true", "false")


def _settings_by_name() -> dict[str, list[str]]:
    """Return the options that set a key, by the name of the key as an option."""
    from jaxforge.config.reading.schema import keys_by_name

    return {
        name: [f"--{key}" for key in keys if "." in key]
        for name, keys in keys_by_name().items()
        if any("." in key for key in keys)
    }
