"""How a progress code is written and read: the text between two notebooks, whatever it holds.

GPUCOURSE1:eNqL. holds the version of the format, then URL-safe base64 of the compressed payload and its CRC-32; the
full stop keeps what a learner copies behind it apart, and may be missing.
Reading survives what pasting does to a line: line breaks, spaces, quotes, zero-width characters, a phone's dashes.
The checksum finds damage. It is no signature: a code can be forged, and what it holds is checked by its reader.
Nothing in a code is ever run, and no text is so long or so packed that reading it takes long: both sizes are bounded.
"""

from __future__ import annotations

import base64
import functools
import itertools
import re
import unicodedata
import zlib
from typing import Literal

PREFIX = "GPUCOURSE"
VERSION = 1
LONGEST_CODE = 2000  # characters
_LONGEST_TEXT = 5 * LONGEST_CODE  # with all that pasting may add
_LONGEST_PAYLOAD = 20_000  # bytes: a "zlib bomb" with a right checksum is stopped here
_CRC_BYTES = 4

IMPOSSIBLE = "This code's checksum is right, but no lesson can have written what it holds."

Kind = Literal["empty", "foreign", "several", "oversized", "newer", "damaged", "impossible"]

_CODE = re.compile(rf"(?i:{PREFIX})([0-9]{{1,9}}):([A-Za-z0-9_\-–—]*)")
# Programs that beautify text make one dash of two or three hyphens, each by rules of its own.
_EM_DASHES = ("--", "-", "---")
_EN_DASHES = ("-", "--")


class ProgressError(ValueError):
    """A code that cannot be read or written: one sentence for the learner, and its kind for a list of many codes."""

    def __init__(self, kind: Kind, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def write(payload: str) -> str:
    """The code for `payload`, one line without spaces. How long it is depends on the payload."""
    packed = zlib.compress(payload.encode(), 9)
    # Little-endian behind the data it is one CRC codeword: every change within 32 bits is found, not just most.
    packed += zlib.crc32(packed).to_bytes(_CRC_BYTES, "little")
    return f"{PREFIX}{VERSION}:{_base64(packed)}."


def read(code: object) -> str:
    """The payload that `write` was given, out of a text that holds its code. Raises ProgressError for anything else."""
    if not isinstance(code, str):
        raise ProgressError("foreign", f"A progress code is text in quotes, not {type(code).__name__}.")
    if len(code) > _LONGEST_TEXT:
        raise ProgressError("oversized", f"A progress code is short, and this text has {len(code):,} characters.")
    version, body = _find(code)
    if version > VERSION:
        raise ProgressError(
            "newer",
            f"This code was made by a newer version of the course: it is of version {version}, and this copy reads "
            f"version {VERSION}. Update the course, or open the lesson from its newest link.",
        )
    if version < VERSION:
        raise ProgressError("foreign", f"No progress code has version {version}.")
    if len(body) > LONGEST_CODE:
        raise ProgressError("oversized", f"A progress code has at most {LONGEST_CODE:,} characters, not {len(body):,}.")
    for em_dash, en_dash in itertools.product(_EM_DASHES, _EN_DASHES):
        packed = _checked(body.replace("—", em_dash).replace("–", en_dash))
        if packed is not None:
            return _decompressed(packed)
    raise ProgressError(
        "damaged",
        f"This progress code is damaged or incomplete: copy it again, from {PREFIX}{VERSION}: to its last character.",
    )


def _find(code: str) -> tuple[int, str]:
    """The version and the base64 of the one code in a text."""
    text = "".join(_plain(character) for character in code)
    found = _CODE.findall(text)
    if not found:
        raise ProgressError(
            "foreign" if text else "empty",
            f"There is no progress code here: it starts with {PREFIX}{VERSION}: and stands at the end of a lesson.",
        )
    if len(found) > 1:
        raise ProgressError("several", f"There are {len(found)} progress codes here: paste just one, the newest.")
    return int(found[0][0]), found[0][1]


# One character at a time, and remembered: normalising a whole hostile text can take seconds.
@functools.lru_cache(maxsize=4096)
def _plain(character: str) -> str:
    """A character without what pasting made of it; "" for one that nobody sees, or that an e-mail's quoting adds."""
    category = unicodedata.category(character)
    if character.isspace() or category in ("Cc", "Cf", "Mn") or character == ">":
        return ""
    if character in "—―":
        return "—"
    if category == "Pd" or character == "−":
        return "–" if character == "–" else "-"
    return unicodedata.normalize("NFKC", character)


def _base64(packed: bytes) -> str:
    return base64.urlsafe_b64encode(packed).decode("ascii").rstrip("=")


def _checked(body: str) -> bytes | None:
    """The compressed payload if the checksum agrees."""
    try:
        packed = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except ValueError:
        return None
    # The last character may have bits to spare: only one way to write them is right.
    if len(packed) <= _CRC_BYTES or _base64(packed) != body:
        return None
    packed, crc = packed[:-_CRC_BYTES], packed[-_CRC_BYTES:]
    return packed if zlib.crc32(packed) == int.from_bytes(crc, "little") else None


def _decompressed(packed: bytes) -> str:
    unpacker = zlib.decompressobj()
    try:
        payload = unpacker.decompress(packed, _LONGEST_PAYLOAD)
        if unpacker.eof and not unpacker.unused_data:
            return payload.decode()
    except (zlib.error, UnicodeDecodeError):
        pass
    raise ProgressError("impossible", IMPOSSIBLE)
