"""What every reader of nvidia-smi's output needs: bounded, decoded text, clean names, and its error sentences."""

from __future__ import annotations

import re

MAX_TEXT = 1_000_000
_MAX_LINE = 4000

# What nvidia-smi says when it cannot list GPUs: a piece of its sentence, the reason, what to do.
_ON_COLAB = "on Colab: Runtime → Disconnect and delete runtime, then connect again"
_CHOOSE_GPU = "On Colab: Runtime → Change runtime type → T4 GPU → Save."
_SENTENCES: tuple[tuple[str, str, str], ...] = (
    ("no devices were found", "No devices were found: this machine has no NVIDIA GPU.", _CHOOSE_GPU),
    (
        "version mismatch",
        "Driver/library version mismatch: the driver's files were replaced while the old driver runs.",
        f"Restart the machine ({_ON_COLAB}).",
    ),
    (
        "communicate with the nvidia driver",
        "The NVIDIA driver is not loaded (driver not loaded), so there is no GPU to ask.",
        _CHOOSE_GPU,
    ),
    ("driver not loaded", "The NVIDIA driver is not loaded (driver not loaded).", _CHOOSE_GPU),
    (
        "insufficient permissions",
        "Insufficient permissions: this user may not ask the driver.",
        "Ask the administrator for access to /dev/nvidia*.",
    ),
    (
        "gpu access blocked by the operating system",
        "The operating system blocks access to the GPU.",
        "On WSL: update the Windows driver, and start WSL again.",
    ),
    ("is lost", "A GPU is lost: it has fallen off the bus.", f"Restart the machine ({_ON_COLAB})."),
    ("requires reset", "A GPU requires a reset.", f"Restart the machine ({_ON_COLAB})."),
    ("unable to determine the device handle", "A GPU does not answer.", f"Restart the machine ({_ON_COLAB})."),
    ("libnvidia-ml", "The driver's library (NVML) was not found.", _CHOOSE_GPU),
    ("nvml shared library not found", "The driver's library (NVML) was not found.", _CHOOSE_GPU),
    ("failed to initialize nvml", "NVML did not start.", f"Restart the container or the machine ({_ON_COLAB})."),
    ("not a valid field to query", "This driver's nvidia-smi does not know a field of the query.", "Leave it out."),
    ("command not found", "nvidia-smi was not found.", _CHOOSE_GPU),
)


def decode(text: str | bytes) -> str:
    """Text of at most MAX_TEXT characters; bytes that are no UTF-8 become "�"."""
    cut = text[:MAX_TEXT]
    return (cut.decode("utf-8", "replace") if isinstance(cut, bytes) else cut).removeprefix("\ufeff")


def clean_name(value: object) -> str | None:
    """A name that a driver gave as str or bytes, printable and at most 100 characters; None for no name.

    Bindings differ: some return bytes, and WSL once returned bytes that are no text at all (0xf8).
    """
    if not isinstance(value, (str, bytes)):
        return None
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return "".join(letter if letter.isprintable() else "�" for letter in text[:100]).strip() or None


def lines_of(text: str) -> list[str]:
    """The lines that are not empty, each at most 4,000 characters long."""
    return [line[:_MAX_LINE].strip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def explain(line: str) -> tuple[str, str] | None:
    """(reason, hint) where the line is one of nvidia-smi's error sentences, else None."""
    if "[" in line or "|" in line:
        return None  # a cell such as [GPU is lost], or the summary table, not a sentence about the whole machine
    lowered = line.lower()
    for piece, reason, hint in _SENTENCES:
        if piece in lowered:
            return reason, hint
    return None
