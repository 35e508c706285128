"""Codecs: there and back, and clear words for what is not theirs."""

import sys
from typing import Any

import pytest

from tests.memory_bombs import NESTED_LISTS, refused_in_little_memory
from tfmq import codecs
from tfmq.errors import BadRequest, DecodeFailed


@pytest.mark.parametrize("codec", [codecs.json, codecs.msgpack])
@pytest.mark.parametrize("value", [{"n": 1, "text": "Zürich"}, [1, None, True], "x", 5])
def test_values_come_back(codec: codecs.Codec[object], value: object) -> None:
    assert codec.decode(codec.encode(value)) == value


@pytest.mark.parametrize("codec", [codecs.json, codecs.msgpack])
@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01", b"\xff\xff"])
def test_what_cannot_be_decoded_says_so(codec: codecs.Codec[object], data: bytes) -> None:
    with pytest.raises(DecodeFailed, match="The payload is not"):
        codec.decode(data)


def test_msgpack_that_announces_too_much_takes_no_memory() -> None:
    with refused_in_little_memory("The payload is not msgpack: it ends in the middle", DecodeFailed):
        codecs.msgpack.decode(NESTED_LISTS)


def test_json_is_compact_and_strict() -> None:
    assert codecs.json.encode({"a": [1, 2], "b": "ü"}) == '{"a":[1,2],"b":"ü"}'.encode()
    with pytest.raises(ValueError, match="JSON compliant"):
        codecs.json.encode(float("nan"))
    with pytest.raises(TypeError):
        codecs.json.encode(object())


def test_codecs_say_their_names() -> None:
    assert [repr(codecs.json), repr(codecs.msgpack)] == ["tfmq.codecs.json", "tfmq.codecs.msgpack"]


def test_pydantic_validates_both_ways() -> None:
    codec = codecs.pydantic(int)
    assert codec.decode(codec.encode(5)) == 5
    with pytest.raises(DecodeFailed, match="not a valid int"):
        codec.decode(b'"x"')


def test_pydantic_takes_a_type_without_a_name() -> None:
    codec: codecs.Codec[Any] = codecs.pydantic(int | str)  # type: ignore[arg-type]
    assert codec.decode(b"7") == 7
    assert repr(codec) == "tfmq.codecs.pydantic(int | str)"
    with pytest.raises(DecodeFailed, match=r"not a valid int \| str"):
        codec.decode(b"[1]")


def test_without_pydantic_its_codec_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(ImportError, match=r'needs pydantic: pip install "tfmq\[pydantic\]"'):
        codecs.pydantic(int)


def test_what_pydantic_knows_no_schema_of_is_refused_in_a_sentence() -> None:
    pytest.importorskip("pydantic")
    with pytest.raises(BadRequest, match="takes a model or a type, not 5"):
        codecs.pydantic(5)  # type: ignore[arg-type]
