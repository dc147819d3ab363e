"""What no file that is handed on may hold: passwords, keys, and addresses that are as good as one.

What is written is chosen (nothing of the environment but a few names, of URLs no more than the
place). On top of that, whatever the environment calls a secret is looked for in all of it.
"""

import os
import re
from collections.abc import Mapping

REMOVED = "removed"

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://([^\s\"'\\,\]})]*)")
_WORDS = (
    r"(?:secrets?|passw(?:or)?d|passphrase|credentials?|api_?keys?|access_?keys?|auth|webhooks?)"
)
_NAME = rf"(?:\w+[_-])?(?:{_WORDS}(?:[_-]\w+)?|tokens?)"
_SETTING = re.compile(
    rf"""(?<![\w-])(["']?{_NAME}["']?\s*[=:]\s*)("(?:[^"\\]|\\.)*"|'[^']*')""", re.IGNORECASE
)
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[opsu]_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|xox[abp]-[\w-]{8,}"
    r"|AKIA[A-Z0-9]{12,}|glpat-[\w-]{16,})"
)
_SHORT = 6  # characters; what is shorter is no secret, and found in every text


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """A text without secrets.

    Of URLs, user, password, query and fragment go, and of those of the web (`https://`), which name
    no data, the path, too. Settings whose names say that they are secret become empty. So do keys
    that are known by their looks, and the values of variables that are named like secrets.

    Args:
        text: as it stands in TOML or JSON.
        environment: of this process.
    """
    text = _URL.sub(_place, text)
    text = _SETTING.sub(lambda found: f'{found[1]}""', text)
    text = _KNOWN.sub(REMOVED, text)
    for name, value in environment.items():
        if _SECRET_VARIABLE.search(name) and len(value) >= _SHORT:
            text = text.replace(value, REMOVED)
    return text


def _place(url: re.Match) -> str:
    scheme, rest = url.groups()
    rest = re.split(r"[?#]", rest)[0]
    host, slash, path = rest.partition("/")
    host = host.rpartition("@")[2]
    of_web = scheme.lower() in ("http", "https", "ws", "wss")
    return f"{scheme}://{host}{'' if of_web else slash + path}"
