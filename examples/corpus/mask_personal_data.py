"""Mask e-mail addresses, IP addresses and telephone numbers: `--map FILE:mask`.

    jaxforge prepare texts/ --output data --map examples/corpus/mask_personal_data.py:mask

Patterns find what has the form of such data. Names, postal addresses and numbers in unusual forms
stay, and some other numbers are masked, so this is not an anonymization. The replacements are
addresses and a number that are reserved for examples, so that a model still learns their form.
"""

import ipaddress
import re
from typing import Any

TEXT = "text"
"""Field of the text."""

EMAIL, IPV4, IPV6, PHONE = "email@example.com", "192.0.2.1", "2001:db8::1", "+1-202-555-0100"

_ASSIGNED_IPV6 = ipaddress.ip_network("2000::/3")  # a::b outside of it is C++
_EMAIL = re.compile(r"\b[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,63}\b")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:])[0-9A-Fa-f:]{2,39}:[0-9A-Fa-f:]{0,39}(?![\w:])")
# "+" and a country code, or an area code in parentheses or before a separator.
_PHONE = re.compile(
    r"(?<![\w.+-])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}"
    r"|\(\d{3}\)[ ]?\d{3}[ .-]\d{4}|\d{3}[.-]\d{3}[.-]\d{4})(?![\w-]|\.\d)"
)


def mask(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with personal data replaced."""
    text = _EMAIL.sub(EMAIL, record[TEXT])
    text = _IPV4.sub(lambda match: _public(match[0], IPV4), text)
    text = _IPV6.sub(lambda match: _public(match[0], IPV6), text)
    return {**record, TEXT: _PHONE.sub(PHONE, text)}


def _public(text: str, replacement: str) -> str:
    """Return the replacement of an address, or the text if it identifies no one."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # a version number, a time
        return text
    is_assigned = address.version == 4 or address in _ASSIGNED_IPV6
    return replacement if address.is_global and is_assigned else text
