"""Names of where a secret is, as messages may say them: somebody may have put the secret itself there."""

from __future__ import annotations

import re

_USUAL_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,47}")
"""Shorter than a key of 32 bytes in hexadecimal."""
HIDDEN = "not shown, since it may be the secret itself"


def said_variable(name: str) -> str:
    """``the variable NAME``; without the name where it does not look like one."""
    if _USUAL_VARIABLE.fullmatch(name):
        return f"the variable {name}"
    return f"the variable that it names ({HIDDEN})"


def is_doubtful(key: str, value: str) -> bool:
    """Whether the value of a key that names where a secret is may be the secret itself."""
    match key.rpartition(".")[2], key.rpartition(".")[0].rpartition(".")[2]:
        case ("password_env" | "key_env", _):
            return _USUAL_VARIABLE.fullmatch(value) is None
        case ("password_file", _) | ("key_file", "codec"):
            return not _looks_like_path(value)
    return False


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", "~", "./", "../"))


def said_file(path: str) -> str:
    """The path; one that does not look like a path is left out."""
    return path if _looks_like_path(path) else f"the file that it names ({HIDDEN})"
