"""A tokenizer's files as they travel through Redis.

`tm:tokenizer:<fingerprint>` holds the gzip of a JSON object, file name -> text (or
`{"base64": …}` where a file is not text), of a Hugging Face tokenizer's files. The
name `bytes` stands for a tokenizer of one token per byte, which has no files.
"""

import base64
import gzip
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from .errors import ModelLoadError, ProtocolError

BYTES: Final = "bytes"
"""Fingerprint of the tokenizer that needs no files."""
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""The files of a model's directory that a bundle may carry."""
MAX_BUNDLE_BYTES: Final = 256 * 1024 * 1024
"""Unpacked size beyond which a bundle is refused: far above any real tokenizer."""


def collect_tokenizer(directory: Path) -> dict[str, bytes]:
    """Returns the tokenizer files of a model's directory by name.

    Raises:
        ModelLoadError: There is none to be found.
    """
    found = {
        name: (directory / name).read_bytes()
        for name in TOKENIZER_FILES
        if (directory / name).is_file()
    }
    if not found.keys() & {"tokenizer.json", "vocab.json", "tokenizer.model"}:
        raise ModelLoadError(
            f"no tokenizer in {directory}: expected tokenizer.json (or vocab.json "
            "with merges.txt, or tokenizer.model) beside the weights"
        )
    return found


def pack_tokenizer(files: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Packs tokenizer files for `tm:tokenizer:<fingerprint>`.

    Args:
        files: Contents by plain file name.

    Returns:
        The fingerprint (32 hex digits, a function of names and contents alone) and
        the bundle.
    """
    contents: dict[str, object] = {}
    for name in sorted(files):
        try:
            contents[name] = files[name].decode()
        except UnicodeDecodeError:
            contents[name] = {"base64": base64.b64encode(files[name]).decode()}
    plain = msgspec.json.encode(contents)
    fingerprint = hashlib.sha256(plain).hexdigest()[:32]
    # A fixed time stamp: the same files give the same bytes on every worker.
    return fingerprint, gzip.compress(plain, compresslevel=6, mtime=0)


def unpack_tokenizer(bundle: bytes) -> tuple[str, dict[str, bytes]]:
    """Undoes `pack_tokenizer`.

    Returns:
        The fingerprint, computed anew, and the files.

    Raises:
        ProtocolError: Not a bundle.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(bundle)) as stream:
            plain = stream.read(MAX_BUNDLE_BYTES + 1)
        if len(plain) > MAX_BUNDLE_BYTES:
            raise ValueError(f"more than {MAX_BUNDLE_BYTES} bytes unpacked")
        contents = msgspec.json.decode(plain, type=dict[str, str | dict[str, str]])
        files = {name: _content(name, value) for name, value in contents.items()}
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise ProtocolError(
            f"a tokenizer bundle cannot be read ({error}); expected the gzip of a "
            "JSON object of files: start a worker of the model to publish it again"
        ) from error
    return hashlib.sha256(plain).hexdigest()[:32], files


def _content(name: str, value: str | dict[str, str]) -> bytes:
    if Path(name).name != name or name in {"", ".", ".."}:
        raise ValueError(f"'{name[:80]}' is not a plain file name")
    if isinstance(value, str):
        return value.encode()
    return base64.b64decode(value["base64"], validate=True)
