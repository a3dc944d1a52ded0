"""Files: what is read, and what is refused before the schema sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache.config.document import MAX_BYTES, parse_document, parse_value, preset_names, read_document
from hicache.errors import ConfigError


def problems(raw: bytes) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_document(raw, "f.yaml")
    return caught.value.problems


def test_every_key_and_entry_knows_its_line() -> None:
    document = parse_document(b"# note\nmodel:\n  name: m\nstores:\n  - kind: disk\n  - {kind: redis}\n", "f")
    assert document.data == {"model": {"name": "m"}, "stores": [{"kind": "disk"}, {"kind": "redis"}]}
    assert document.lines == {
        ("model",): 2,
        ("model", "name"): 3,
        ("stores",): 4,
        ("stores", 0): 5,
        ("stores", 0, "kind"): 5,
        ("stores", 1): 6,
        ("stores", 1, "kind"): 6,
    }


def test_dates_and_a_byte_order_mark_are_no_surprise() -> None:
    assert parse_document("\ufeffname: 2024-01-31".encode(), "f").data == {"name": "2024-01-31"}


def test_an_alias_gives_an_independent_copy() -> None:
    data = parse_document(b"a: &x {k: 1}\nb: *x\n", "f").data
    assert data == {"a": {"k": 1}, "b": {"k": 1}}
    assert data["a"] is not data["b"]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "f.yaml: is empty"),
        (b"# only a note\n", "f.yaml: is empty"),
        (b"- a\n- b\n", "f.yaml: holds a list"),
        (b"hello\n", "f.yaml: holds a single value"),
        (b"a: 1\nb: 2\na: 3\n", "a (f.yaml:3): given twice, first in line 1"),
        (b"m:\n  n: {k: 1, k: 2}\n", "m.n.k (f.yaml:2): given twice"),
        (
            b"m: !!python/object:os.system {}\n",
            "m (f.yaml:1): the tag !!python/object:os.system is not allowed",
        ),
        (b"m: !!python/name:os.system\n", "m (f.yaml:1): the tag !!python/name:os.system is not allowed"),
        (b"m: !mine 3\n", "m (f.yaml:1): the tag !… is not allowed"),
        (b"m: !!set {a}\n", "m (f.yaml:1): the tag !!set is not allowed"),
        (b"1: x\n", "f.yaml:1: the key 1 is not text"),
        (b"[a]: x\n", "f.yaml:1: the key a collection is not text"),
        (b"a: &x {k: 1}\nb:\n  <<: *x\n", "b (f.yaml:3): merge keys"),
        (b"a: &x [*x]\n", "a.0 (f.yaml:1): an alias that contains itself"),
        (b"a: 1\n---\nb: 2\n", "f.yaml:2:1: not valid YAML: but found another document"),
        (b"a: [1\nb: 2\n", "f.yaml:2:2: not valid YAML"),
        (b"a:\n\tb: 1\n", "f.yaml:2:1: not valid YAML"),
        (b"a: x\nb: \x01\n", "f.yaml:2: not valid YAML"),
        (b"a: x\nb: \xff\n", "f.yaml:2: byte 8 is not UTF-8"),
        ("a: x".encode("utf-16"), "f.yaml:1: byte 0 is not UTF-8"),
        (b"[" * 100_000, "f.yaml: nested too deeply"),
        (b"a: " + b"9" * 5000, "a (f.yaml:1): a number that cannot be read"),
        (b" " * (MAX_BYTES + 1), f"f.yaml: over {MAX_BYTES} bytes"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)
def test_what_is_not_plain_yaml_is_refused_with_its_place(raw: bytes, expected: str) -> None:
    assert problems(raw)[0].startswith(expected)


def test_all_duplicates_and_tags_are_told_at_once() -> None:
    assert len(problems(b"a: 1\na: 2\nb: !x 1\nc: {d: 1, d: 2}\n")) == 3


def test_a_nest_of_aliases_stops_early() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    found = problems("\n".join(lines).encode())
    assert len(found) == 1
    assert "more than 10000 values" in found[0]


def test_a_syntax_error_does_not_quote_the_file() -> None:
    assert "hunter2" not in str(problems(b"password: hunter2: [\n"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "a:\n\tb: 1",
            r"found character '\t' that cannot start any token; indent by spaces, not by tabs",
        ),
        (
            "a: 1\n---\nb: 2",
            "but found another document; expected one: remove the line --- and what belongs to the other",
        ),
        (
            "a: 'hunter2",
            "found unexpected end of stream; a quote or a bracket before it is not closed",
        ),
        ("a: @x", "found character '@' that cannot start any token"),
        ("a: `x", "found character '`' that cannot start any token"),
        ("a: {b: 1", "expected ',' or '}', but got '<stream end>'"),
        ("a: [b: 1}", "expected ',' or ']', but got '}'"),
        ("a: &'x", 'expected alphabetic or numeric character, but found "\'"'),
        ("a: &\u2028x", r"expected alphabetic or numeric character, but found '\u2028'"),
        ('a: "\\q"', "found unknown escape character 'q'"),
        ("a: *hunter2", "found undefined alias '…'"),
        ("a: [&hunter2 1, &hunter2 2]", "second occurrence"),
        ("a: !b!hunter2 x", "found undefined tag handle '…'"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_syntax_error_shows_the_parsers_punctuation_and_no_word_of_the_file(text: str, reason: str) -> None:
    (line,) = problems(text.encode())
    assert line.endswith(f": not valid YAML: {reason}")
    assert "hunter2" not in line


def test_a_preset_name_means_the_preset_even_beside_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cpu").write_text("model: mine\n")
    Path("cpu.yaml").write_text("model: mine, too\n")
    assert read_document("cpu").data["model"] != "mine"
    assert read_document("./cpu").data == {"model": "mine"}
    assert read_document("cpu.yaml").data == {"model": "mine, too"}


def test_there_are_four_presets() -> None:
    assert preset_names() == ("cpu", "cuda", "hybrid", "redis")


def test_a_missing_file_names_the_nearest_preset() -> None:
    with pytest.raises(
        ConfigError, match=r"cdua: no such file.*cpu, cuda, hybrid, redis \(did you mean cuda\?\)"
    ):
        read_document("cdua")


def test_a_folder_is_refused_as_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory"):
        read_document(tmp_path)


def test_a_file_without_permission_is_refused_as_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(ConfigError, match=r"cannot be read \(Permission denied"):
        read_document(tmp_path / "f.yaml")


@pytest.mark.parametrize("number", ["10:20:30", "1:30"])
def test_a_number_to_base_60_is_refused(number: str) -> None:
    """YAML 1.1 would make 37,230 of it."""
    with pytest.raises(ConfigError, match=rf"{number} is a number to base 60.*quote it"):
        parse_document(f"tiers:\n  host: {{capacity: {number}}}\n".encode(), "f.yaml")


@pytest.mark.parametrize(
    "word", ["*hunter2", "!hunter2", "&hunter2 {", "[*hunter2", "!<hunter2> x", "!a!hunter2 x"]
)
def test_a_password_that_reads_as_yaml_is_not_repeated(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document(f"stores:\n  - password: {word}\n".encode(), "f.yaml")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        parse_value(word)
    assert "hunter2" not in str(caught.value)
