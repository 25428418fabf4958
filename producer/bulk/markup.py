"""Text of documents: plain, Markdown, HTML."""

import re
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from ...shared.bulk.messages import Document
from ...shared.errors import InvalidRequest

if TYPE_CHECKING:
    from bs4 import BeautifulSoup
    from bs4.element import PageElement

_FRONT_MATTER: Final = re.compile(
    r"\A---\r?\n.*?\r?\n(?:---|\.\.\.)[ \t]*(?:\r?\n|\Z)", re.S
)
_TARGET: Final = r"\((?:[^()\n]|\([^()\n]*\))*+\)"
# No class holds the bracket that it starts with: a text of brackets alone takes time
# in proportion to its length.
_IMAGE: Final = re.compile(rf"!\[([^\[\]\n]*+)\]{_TARGET}")
_LINK: Final = re.compile(rf"\[([^\[\]\n]++)\]{_TARGET}")
_REFERENCE: Final = re.compile(r"^[ ]{0,3}\[[^\]\n]+\]:[ \t]+\S+.*$", re.M)
_HEADING: Final = re.compile(r"^#{1,6}[ \t]++(.+)$", re.M)
_FENCE: Final = re.compile(r"^[ ]{0,3}(```|~~~)[^\n]*$", re.M)
_BLANK_LINES: Final = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")
_SPACES: Final = re.compile(r"\s+")

_DROPPED: Final = ("script", "style", "noscript", "template", "svg", "head", "nav")
"""Elements whose text is not part of what is read."""
_BLOCKS: Final = (
    *("address", "article", "aside", "blockquote", "caption", "dd", "details", "div"),
    *("dl", "dt", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4"),
    *("h5", "h6", "header", "hr", "li", "main", "ol", "p", "pre", "section", "table"),
    *("tr", "ul"),
)
"""Elements that stand apart from what is around them."""
_AROUND: Final = {
    **dict.fromkeys(_BLOCKS, ("\n\n", "\n\n")),
    **dict.fromkeys(("td", "th"), ("", " ")),
    "br": ("\n", ""),
}
"""Element -> what stands for its start and its end."""


def read_markup(raw: bytes, suffix: str) -> Document:
    """Returns the text and title of a file.

    Args:
        raw: Its bytes.
        suffix: As `.html`; an unknown one is read as plain text.

    Raises:
        InvalidRequest: The encoding is another than it should be.
    """
    return READERS.get(suffix, read_text)(raw)


def read_text(raw: bytes) -> Document:
    """Reads plain text in UTF-8."""
    return Document(decode(raw))


def read_markdown(raw: bytes) -> Document:
    """Reads Markdown: words stay, addresses of links and the like go."""
    text = decode(raw).replace("\r\n", "\n")
    text = _without_comments(_FRONT_MATTER.sub("", text))
    first = _HEADING.search(text)
    title = _heading(first) if first else ""
    for pattern, put in (
        (_IMAGE, r"\1"),
        (_LINK, r"\1"),
        (_REFERENCE, ""),
        (_FENCE, ""),
    ):
        text = pattern.sub(put, text)
    text = _HEADING.sub(_heading, text)
    return Document(_tidy(text), _LINK.sub(r"\1", _IMAGE.sub(r"\1", title)))


def _without_comments(text: str) -> str:
    parts: list[str] = []
    kept = 0
    while (start := text.find("<!--", kept)) >= 0:
        end = text.find("-->", start + 4)
        if end < 0:
            break
        parts.append(text[kept:start])
        kept = end + 3
    return "".join((*parts, text[kept:]))


def _heading(found: re.Match[str]) -> str:
    """The words of a heading, without the marks that may close it."""
    words = found.group(1).rstrip(" \t")
    closed = words.rstrip("#")
    return closed.rstrip(" \t") if closed.endswith((" ", "\t")) or not closed else words


def read_html(raw: bytes) -> Document:
    """Reads what a person sees of an HTML page; its encoding as the page says."""
    from bs4 import BeautifulSoup  # late: only pages need it
    from bs4.exceptions import ParserRejectedMarkup

    try:
        with warnings.catch_warnings():
            # A page that is XML, or hardly markup at all, is read all the same.
            warnings.simplefilter("ignore")
            soup = BeautifulSoup(raw, "html.parser")
    except ParserRejectedMarkup as error:
        raise InvalidRequest(
            "text",
            f"cannot be read as HTML ({error}); repair the page, or name it .txt",
        ) from None
    if soup.contains_replacement_characters:
        raise InvalidRequest(
            "text",
            f"is not in the encoding that it names ({soup.original_encoding}); convert "
            "it to UTF-8, for example with iconv",
        )
    title = " ".join(soup.title.get_text(" ").split()) if soup.title else ""
    lines = (line.strip() for line in _seen(soup).splitlines())
    return Document(_tidy("\n".join(lines)), title)


def _seen(soup: "BeautifulSoup") -> str:
    """Text in the order of the page, blocks apart; in one pass, however deep it is."""
    from bs4.element import NavigableString, Tag

    parts: list[str] = []
    in_pre = 0
    ahead: list[tuple[PageElement, bool]] = [(soup, False)]
    while ahead:
        node, leaving = ahead.pop()
        if type(node) is NavigableString:
            parts.append(node if in_pre else _SPACES.sub(" ", node))
        if not isinstance(node, Tag) or node.name in _DROPPED:
            continue
        parts.append(_AROUND.get(node.name, ("", ""))[leaving])
        in_pre += (node.name == "pre") * (-1 if leaving else 1)
        if not leaving:
            ahead.append((node, True))
            ahead += [(child, False) for child in reversed(node.contents)]
    return "".join(parts)


def decode(raw: bytes) -> str:
    """Decodes UTF-8, with or without a mark at its start.

    Raises:
        InvalidRequest: It is not UTF-8; the message names the first bad byte.
    """
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            "text",
            f"byte {error.start} is 0x{raw[error.start]:02x}, which is not UTF-8 "
            f"({error.reason}); convert it first, for example with iconv",
        ) from None


def _tidy(text: str) -> str:
    return _BLANK_LINES.sub("\n\n", text).strip()


READERS: Final[Mapping[str, Callable[[bytes], Document]]] = {
    ".txt": read_text,
    ".text": read_text,
    ".rst": read_text,
    ".md": read_markdown,
    ".markdown": read_markdown,
    ".htm": read_html,
    ".html": read_html,
    ".xhtml": read_html,
}
"""Kind of file -> what reads it."""
