"""What the site's pages hold that is not written by hand: the reference of the configuration."""

from __future__ import annotations

import re
from typing import Any

from hicache.config.reference import configuration_page

MARK = "[the tables are made by `hicache config reference`]"


def on_page_markdown(markdown: str, **_: Any) -> str:  # Any: MkDocs' own objects
    """Put the tables in, and drop notes for the test of the blocks (tests/docs)."""
    return re.sub(r"^ *<!-- .* -->\n", "", markdown, flags=re.MULTILINE).replace(MARK, configuration_page())
