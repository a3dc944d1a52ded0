"""Names of where a secret is, as messages may say them: somebody may have put the secret itself there."""

from __future__ import annotations

import re

_USUAL_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,47}")
"""Shorter than a key of 32 bytes in hexadecimal."""
_HIDDEN = "not shown, since it may be the secret itself"


def said_variable(name: str) -> str:
    """``the variable NAME``; without the name where it does not look like one."""
    if _USUAL_VARIABLE.fullmatch(name):
        return f"the variable {name}"
    return f"the variable that it names ({_HIDDEN})"


def said_file(path: str) -> str:
    """The path; one that does not look like a path is left out."""
    return path if path.startswith(("/", "~", "./", "../")) else f"the file that it names ({_HIDDEN})"
