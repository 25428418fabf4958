"""Tokenizer bundles and the encoding of requests."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tokenmill.shared.errors import (
    ControlTokensInText,
    InvalidRequest,
    ModelLoadError,
    PromptTooLong,
    ProtocolError,
)
from tokenmill.shared.messages import JobRequest, Message
from tokenmill.shared.tokens import (
    BYTES,
    collect_tokenizer,
    ids_from_bytes,
    ids_to_bytes,
    load_tokenizer,
    pack_tokenizer,
    unpack_tokenizer,
)
from tokenmill.shared.tokens_bytes import EOS_TOKEN_ID


def test_a_bundle_comes_back_as_it_went():
    files = {"tokenizer.json": b'{"a": "\xc3\xa9"}', "tokenizer.model": b"\x00\xff\x01"}
    fingerprint, bundle = pack_tokenizer(files)
    assert unpack_tokenizer(bundle) == (fingerprint, files)


def test_the_fingerprint_depends_on_contents_alone():
    one = pack_tokenizer({"a": b"1", "b": b"2"})
    assert one == pack_tokenizer({"b": b"2", "a": b"1"})
    assert one[0] != pack_tokenizer({"a": b"1", "b": b"3"})[0]


@pytest.mark.parametrize("bundle", [b"", b"not gzip", pack_tokenizer({})[1][:-9]])
def test_a_broken_bundle_is_named_as_such(bundle):
    with pytest.raises(ProtocolError, match="tokenizer bundle"):
        unpack_tokenizer(bundle)


def test_a_bundle_cannot_write_outside_its_directory():
    _, bundle = pack_tokenizer({"../evil": b"x"})
    with pytest.raises(ProtocolError, match="plain file name"):
        load_tokenizer(bundle)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        collect_tokenizer(tmp_path)


def test_token_ids_travel_as_little_endian_int32():
    assert ids_to_bytes([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert ids_from_bytes(ids_to_bytes([0, 7, 2**31 - 1])) == [0, 7, 2**31 - 1]
    with pytest.raises(ProtocolError, match="multiple of 4"):
        ids_from_bytes(b"\x01\0\0")


def test_byte_tokens_are_bytes():
    tokenizer = load_tokenizer(BYTES)
    ids = tokenizer.encode_request(JobRequest(text="hé"))
    assert ids == list("hé".encode())


def test_byte_tokenizer_has_a_control_token_with_the_three_policies():
    tokenizer = load_tokenizer(BYTES)
    with pytest.raises(ControlTokensInText, match="<eos>"):
        tokenizer.encode_request(JobRequest(text="a<eos>b"))
    allowed = JobRequest(text="a<eos>b", control_tokens="allow")
    assert tokenizer.encode_request(allowed)[1] == EOS_TOKEN_ID
    as_text = JobRequest(text="a<eos>b", control_tokens="as_text")
    assert len(tokenizer.encode_request(as_text)) == 7


def test_byte_tokenizer_renders_messages_and_names_the_field_of_an_error():
    tokenizer = load_tokenizer(BYTES)
    turns = (Message("system", "be brief"), Message("user", "<eos>"))
    with pytest.raises(ControlTokensInText) as caught:
        tokenizer.encode_request(JobRequest(messages=turns))
    assert caught.value.field == "messages[1].content"
    ids = tokenizer.encode_request(JobRequest(messages=turns[:1]))
    text = bytes(ids).decode()
    assert text == "system: be brief\nassistant: "


def test_one_bad_request_leaves_its_neighbours_alone():
    tokenizer = load_tokenizer(BYTES)
    requests = [JobRequest(text=t) for t in ("ok", "<eos>", "x" * 40, "fine")]
    first, second, third, fourth = tokenizer.encode_requests(requests, 40)
    assert isinstance(second, InvalidRequest)
    assert isinstance(third, PromptTooLong)
    assert "40 tokens" in str(third)
    assert "holds 40" in str(third)
    assert isinstance(first, list)
    assert isinstance(fourth, list)


def test_importing_costs_no_model_stack():
    code = """
        import sys
        import tokenmill.shared.tokens
        heavy = {"torch", "transformers", "numpy", "tokenizers"} & set(sys.modules)
        assert not heavy, heavy
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
