"""``hicache config import``: which cache's settings these are, and ours made of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from hicache.config import foreign_lmcache, foreign_sglang
from hicache.config.document import parse_document
from hicache.config.fields import one_of
from hicache.config.foreign import begin
from hicache.config.load import load_config
from hicache.errors import ConfigError

ORIGINS = ("lmcache", "sglang")
MAX_FILE_BYTES = 1 << 20
_KEY = re.compile(r"""["']?[\w.-]+["']?\s*:(\s|$)""")


@dataclass(frozen=True, slots=True)
class Imported:
    """A configuration of ours.

    Args:
        text: as YAML; loads as it is.
        notes: (their key, one sentence): what has no counterpart or is not quite the same.
    """

    text: str
    notes: tuple[tuple[str, str], ...]


def import_config(file: str, *, origin: str | None = None, base: str = "cpu") -> Imported:
    """Read another cache's settings.

    Args:
        file: an LMCache YAML; SGLang's flags as a shell command, YAML or JSON; or its extra config.
        origin: ``lmcache`` or ``sglang``; None: by the keys that stand in it.
        base: configuration of ours that has the model and L1.

    Raises:
        ConfigError: the file cannot be read or is neither; a value makes no sense; what it comes to
            contradicts itself.
    """
    if origin is not None:
        try:
            one_of("an origin", ORIGINS)(origin)
        except ValueError as error:
            raise ConfigError([f"--from: {error}"]) from None
    text = _read(file)
    if not any(_told(text)):
        raise ConfigError(
            [f"{file}: is empty; expected an LMCache YAML, or SGLang's flags or storage extra config"]
        )
    is_command = _is_command(text)
    settings = foreign_sglang.flags_of(text, file) if is_command else _mapping(text, file)
    origin = origin or ("sglang" if is_command else _origin(settings, file))
    into = begin(file, load_config(base, environ={}))
    if origin == "lmcache":
        foreign_lmcache.translate(settings, into)
    else:
        foreign_sglang.translate(settings, into, Path(file).parent)
    into.note("model, tiers.device", f"are those of {base}; no other cache's settings tell them")
    into.finish()
    heading = [f"# made of {origin} settings by hicache config import", "#"]
    heading += [" ".join(f"# {key}: {note}".split()) for key, note in into.notes]
    body = yaml.safe_dump(into.tree, sort_keys=False, allow_unicode=True, width=1000)
    return Imported("\n".join([*heading, "", body]), tuple(into.notes))


def _read(file: str) -> str:
    try:
        raw = Path(file).expanduser().read_bytes()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([f"{file}: cannot be read: {reason}"]) from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError([f"{file}: {len(raw)} bytes are no settings; expected at most {MAX_FILE_BYTES}"])
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([f"{file}: is not text: {error.reason} at byte {error.start}"]) from None


def _told(text: str) -> list[str]:
    """Lines that say something."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#") and line not in ("---", "...")]


def _is_command(text: str) -> bool:
    """Whether this is a command with ``--flags`` and not ``key: value`` or an object."""
    told = _told(text)
    if not told or told[0].startswith("{") or _KEY.match(told[0]):
        return False
    return any(word.startswith("--") for line in told for word in line.split())


def _mapping(text: str, file: str) -> Mapping[str, object]:
    loaded = parse_document(text.encode(), file).data
    return {str(key): value for key, value in loaded.items()}


def _origin(settings: Mapping[str, object], file: str) -> str:
    if any(key in settings for key in foreign_lmcache.IDENTIFYING):
        return "lmcache"
    keys = [key.replace("-", "_") for key in settings]
    if foreign_sglang.is_extra_config(settings) or any(key.startswith("hicache_") for key in keys):
        return "sglang"
    raise ConfigError(
        [f"{file}: neither LMCache's nor SGLang's keys are in it; say --from if it is one of them"]
    )
