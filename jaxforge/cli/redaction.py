"""Redaction of secrets in commands, configs, pages, logs and messages.

Writers select what they record, and record few environment variables. This module then removes
possible secrets: credentials in URLs, values of settings with secret-like names, tokens with known
formats, and values of secret-like environment variables.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus

from jaxforge.errors import printable

REMOVED = "removed"

# Names of settings. "Strong" names always mean a secret; a token may also be one of a text.
_BEFORE, _AFTER = r"[\w-]{0,64}", r"(?:[_-][\w-]{1,64})?"  # bounded, for hostile texts
_STRONG = (
    rf"{_BEFORE}(?:secret|passw(?:or)?d|passphrase|credential|webhook)s?{_AFTER}"
    rf"|(?:{_BEFORE}[_-])?(?:api|access|private|signing|encryption|ssh|master|account)[_-]?keys?{_AFTER}"
    rf"|(?:{_BEFORE}[_-])?(?:auth|authorization|cookies?|pwd|dsn|bearer|sas){_AFTER}"
    rf"|(?:{_BEFORE}[_-])?(?:pat|sas[_-]?ur[il])|{_BEFORE}sharedaccess(?:key|signature)"
    rf"|{_BEFORE}connection[_-]?strings?"
)
_TOKEN = (
    rf"(?:{_BEFORE}[_-])?tokens?"
    rf"|{_BEFORE}(?:access|auth|refresh|bearer|api|session|hub|hf|client)[_-]?tokens?{_AFTER}"
)
_SPECIAL = re.compile(  # text tokens, and counts of tokens
    r"(?:(?:additional_)?special|added|eos|bos|pad|unk|sep|cls|mask|image|eot|eod|stop|start|end"
    r"|begin|decoder_start|first|last|max|min|num|n|sample|prompt|new|total|valid)[_-]tokens?",
    re.IGNORECASE,
)
_NAME = re.compile(
    rf"""(?<![\w-])(?P<quote>\\?["'])?(?P<name>(?P<strong>{_STRONG})|{_TOKEN})"""
    r"""(?(quote)(?P=quote)|(?:\\?["'])?)"""  # in "hf.token" the first quote is further left
    r"(?P<separator>\s*[=:]\s*)",
    re.IGNORECASE,
)

# Values of settings in TOML, JSON and Python literals.
_VALUE = re.compile(
    r"""
      \"{3}.*?(?:\"{3}|\Z) | '{3}.*?(?:'{3}|\Z)    # text of several lines in TOML
    | \\".*?(?:\\"|\Z) | \\'.*?(?:\\'|\Z)          # text in JSON in a JSON string
    | "(?:\\(?:.|\Z)|[^"\\\n])*+"?                # text, up to the end of its line
    | '(?:\\'(?=[^'\n]*')|[^'\n])*+'?              # \' is an escape in Python, but not in TOML
    | [^\s,;&\]}"'\\]++                            # a word
    """,
    re.DOTALL | re.VERBOSE,
)
_BRACKET = re.compile(r"""["'\[\]{}]""")
_PLAIN = re.compile(r"true|false|null|none|\"\"|''", re.IGNORECASE)  # values that need no redaction
_SHORT = 6  # characters; shorter values are not secrets and occur in any text

# URLs. user:password@ extends to the last @ within double quotes, because a password may contain
# any character. A password with a double quote ends at its first @. host:8080 is not a password.
_PORT = r"""\d*(?:[/?#\s"'\\,\]})]|$)"""
_USER = (
    r"""[^\s/@:"']*:(?![\s"']|$)"""
    rf"""(?:(?:(?!://)(?:\\.|[^\n"\\]))*|(?!{_PORT})[^\n]*?)@"""
)
_URL = re.compile(
    r"(?<![a-zA-Z0-9+.-])(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]{0,64})://"
    rf"""(?P<rest>(?:{_USER})?(?:\[[0-9a-fA-F:.]+\])?[^\s"'\\,\]}})]*)"""
)
_HOST = re.compile(r"\[[0-9a-fA-F:.]+\](?::\d*)?|[^:]*(?::\d*)?")
_WEB = ("http", "https", "ws", "wss")
_HOOK = re.compile(r"hooks?\.|webhook", re.IGNORECASE)  # the path of such an address is the secret

# Secrets without a name: tokens with known formats, keys in PEM, headers of HTTP.
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9/+]{16,}|api_org_[A-Za-z0-9]{16,}|gh[oprsu]_[\w/+]{16,}"
    r"|github_pat_[\w/+]{8,}|npm_[A-Za-z0-9/+]{16,}|pypi-[\w/+-]{16,}|AIza[\w/+-]{16,}"
    r"|ya29\.[\w-]{16,}|GOCSPX-[\w-]{16,}|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}"
    r"|gl[a-z]{2,5}-[\w-]{16,}|sk-[\w/+-]{16,}|[sr]k_(?:live|test)_\w{16,}|xox[a-z]-[\w-]{8,}"
    r"|xapp-[\w-]{16,}|dapi[0-9a-f]{32}|dop_v1_[0-9a-f]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|r8_[A-Za-z0-9]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.S
)
_CARRIED = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{16,}", re.IGNORECASE)

# Variables of the environment.
_SECRET_VARIABLE = re.compile(
    r"KEY|TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|WEBHOOK|CONNECTION_?STRING|_PWD$"
    r"|(?:^|_)(?:PAT|PASS|SAS|DSN|BEARER|COOKIES?)(?:_|$)",
    re.IGNORECASE,
)
_PERCENT = re.compile("%[0-9A-F]{2}")


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a text without secrets.

    URLs keep scheme, host and path; web URLs (`https://`), which do not name data, also lose the
    path. Settings with secret-like names become empty. Tokens with known formats and the values of
    secret-like environment variables are removed.

    Args:
        text: TOML, JSON, a Python literal, or a command-line argument.
        environment: environment variables.
    """
    text = _without_values(text, environment)  # first: other patterns may change parts of them
    text = _URL.sub(lambda url: _shown_url(url, keeps_web_path=False), text)
    text = _CARRIED.sub(rf"\1 {REMOVED}", text)
    return _without_known(_without_settings(text))


def redacted_message(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return an error message or log line without secrets.

    Unlike `redacted`, it keeps text that looks like a setting, and the paths of web URLs except
    for webhooks.
    """
    text = _without_values(text, environment)
    return _without_known(_URL.sub(lambda url: _shown_url(url, keeps_web_path=True), text))


def redacted_value(value: Any, environment: Mapping[str, str] = os.environ) -> Any:  # noqa: ANN401
    """Return a copy of a JSON value without secrets, which are recognised by keys and options.

    Args:
        value: objects, lists, strings and numbers.
        environment: environment variables.
    """
    if isinstance(value, Mapping):
        return {
            key: _emptied(item) if _is_secret(str(key), item) else redacted_value(item, environment)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        options = [False, *map(_is_secret_option, value)]  # whether the item before is one
        return [
            REMOVED if hidden and not _is_option(item) else redacted_value(item, environment)
            for hidden, item in zip(options, value, strict=False)
        ]
    return redacted(value, environment) if isinstance(value, str) else value


def redacted_command(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return a command line, quoted for a shell, without secrets.

    Args:
        words: unquoted arguments.
        environment: environment variables.
    """
    # `--token SECRET` are two words: the first one hides the second.
    shown, hides_next = [], False
    for word in words:
        name, equals, value = word.partition("=")
        is_secret = _is_option(name) and _is_secret(name.lstrip("-"), value or "x")
        if hides_next and not _is_option(name):
            shown.append(REMOVED)
        elif is_secret and equals:
            shown.append(f"{name}={REMOVED}")
        else:
            shown.append(redacted(word, environment))
        hides_next = is_secret and not equals
    return shlex.join(shown)


def _is_option(word: object) -> bool:
    return isinstance(word, str) and word.startswith("-")


def _is_secret_option(word: object) -> bool:
    """Return whether a word is an option whose value, the next word, is secret."""
    return isinstance(word, str) and _is_option(word) and _is_secret(word.lstrip("-"), "x")


def _is_secret(name: str, value: object) -> bool:
    """Return whether the value of a setting with this name is secret."""
    # Only the last part names the value: "tokenizer.path" is a path.
    name = name.rpartition(".")[2]
    match = _NAME.fullmatch(f"{name}=")  # the pattern includes the separator
    if match is None or value is None or isinstance(value, bool) or value == "":
        return False
    if match["strong"]:
        return True
    if _SPECIAL.fullmatch(name):
        return False
    is_number = isinstance(value, int | float) or str(value).isdecimal()
    if isinstance(value, list | tuple | Mapping):
        return any(isinstance(item, str) for item in value)
    # A number after a plural is a count, such as `max_new_tokens=128`.
    return not (is_number and name.lower().endswith("s"))


def _emptied(value: object) -> object:
    return type(value)() if isinstance(value, list | dict) else ""


def _shown_url(url: re.Match[str], *, keeps_web_path: bool) -> str:
    scheme, path = url["scheme"], url["rest"]
    first = path.partition("/")[0]
    if "@" in first or (":" in first and "@" in path):  # a password may contain / and @
        path = path.rpartition("@")[2]
    elif not _HOST.fullmatch(re.split(r"[?#]", first)[0]):  # possibly truncated by a message
        return f"{scheme}://{REMOVED}"
    # Queries carry signatures, for example those of presigned URLs.
    path = re.split(r"[?#]", path)[0]
    if scheme.lower() in _WEB and (not keeps_web_path or _HOOK.search(path)):
        path = path.partition("/")[0]
    return f"{scheme}://{path}"


def _without_settings(text: str) -> str:
    """Empty the values of settings with secret-like names."""
    parts, at, searched = [], 0, 0
    while match := _NAME.search(text, searched):
        # The search goes on within a value that is kept: it may hold another setting.
        start = searched = match.end()
        end = _value_end(text, start)
        if not _SPECIAL.fullmatch(match["name"].lstrip("-")) and _hides(match, text[start:end]):
            parts += [text[at:start], _empty_like(text[start:end])]
            at = searched = end
    return "".join([*parts, text[at:]])


def _hides(match: re.Match[str], value: str) -> bool:
    """Return whether the value after a name must be removed."""
    if not value or _PLAIN.fullmatch(value):
        return False
    if match["strong"]:
        return True
    name, kind = match["name"], value[0]
    if kind in "[{":
        return '"' in value or "'" in value
    if kind in "\"'\\":
        return True
    if name.lower().endswith("s") and value.replace(".", "").replace(",", "").isdecimal():
        return False
    # In prose, "token: " may introduce a sentence.
    is_prose = ":" in match["separator"] and not match["quote"]
    return not is_prose or (len(value) >= _SHORT and any(map(str.isdigit, value)))


def _empty_like(value: str) -> str:
    """Return an empty value of the same kind, valid in TOML and JSON."""
    return {"[": "[]", "{": "{}", "\\": '\\"\\"'}.get(value[0], '""')


def _value_end(text: str, start: int) -> int:
    """Return the end of a value: quoted text, a list, a table or a word."""
    if text[start : start + 1] in ("[", "{"):
        return _bracket_end(text, start)
    match = _VALUE.match(text, start)
    return match.end() if match else start


def _bracket_end(text: str, start: int) -> int:
    """Return the end of a list or table, or the end of its line if it is not closed."""
    depth, at = 0, start
    while match := _BRACKET.search(text, at):
        if match[0] in "\"'":
            at = _value_end(text, match.start())
            continue
        depth += 1 if match[0] in "[{" else -1
        at = match.end()
        if depth == 0:
            return at
    newline = text.find("\n", start)
    return len(text) if newline < 0 else newline


def _without_known(text: str) -> str:
    text = _PRIVATE_KEY.sub(REMOVED, text)
    return _KNOWN.sub(REMOVED, _CARRIED.sub(rf"\1 {REMOVED}", text))


def _without_values(text: str, environment: Mapping[str, str]) -> str:
    """Remove the values of secret environment variables, in any notation."""
    secrets = {
        value
        for name, value in environment.items()
        if _SECRET_VARIABLE.search(name) and len(value) >= _SHORT
    }
    for value in sorted(secrets, key=len, reverse=True):  # a secret may contain another
        for form in sorted(_notations(value), key=len, reverse=True):
            text = text.replace(form, REMOVED)
    return text


def _notations(value: str) -> set[str]:
    """Return the notations of a text in Python, JSON, TOML, a shell, messages and URLs."""
    in_json = json.dumps(value)[1:-1]
    encoded = value.encode("utf-8", "surrogateescape")
    quoted = {quote(encoded, safe="/"), quote(encoded, safe=""), quote_plus(encoded)}
    return {
        value, in_json, json.dumps(in_json)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1], repr(repr(value)[1:-1])[1:-1], ascii(value)[1:-1],
        repr(encoded)[2:-1], printable(value), shlex.quote(value), *quoted,
        *(_PERCENT.sub(lambda code: code[0].lower(), form) for form in quoted),
    }  # fmt: skip
