"""Reads the table that plain `nvidia-smi` prints, and tells a hidden process list from an empty one.

In a container (Colab, Kaggle) the process ids belong to the host, so the panel of processes is blank while a job runs
(NVIDIA/nvidia-docker#179, #759, #1460). Read memory and utilisation instead, or `torch.cuda.memory_allocated()`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from course_utils import views
from course_utils.nvidia_smi_parse import GPU_HEADERS, MAX_GPUS, SmiGpu, gpu_rows
from course_utils.nvidia_smi_text import clean_name, decode, explain, lines_of

_MIB = 2**20
_MAX_PROCESSES = 10_000
# Driver 610 says "KMD Version" and "CUDA UMD Version" (sgl-project/sglang#27487).
_VERSIONS = re.compile(
    r"(?:Driver|KMD) Version: ?([0-9][0-9.]{0,20})(?:.{0,40}CUDA (?:UMD )?Version: ?([0-9][0-9.]{0,20}))?"
)
_GPU = re.compile(r"\|\s{1,9}([0-9]{1,4})\s{1,9}(\S.*?)\s{1,40}(?:On|Off|N/A|ERR!|WDDM|TCC|MCDM)\s{0,9}\|")
_MEMORY = re.compile(r"([0-9]{1,9})MiB\s{0,9}/\s{0,9}([0-9]{1,9})MiB")
_BUSY = re.compile(r"\|\s{0,20}([0-9]{1,3})%")
_POWER = re.compile(r"([0-9]{1,6})W\s{0,9}/\s{0,9}([0-9]{1,6})W")
_TEMPERATURE = re.compile(r"\s([0-9]{1,3})C\s")
_STATE = re.compile(r"\s(P[0-9]{1,2})\s")
_PROCESS = re.compile(
    r"\|\s{1,9}([0-9]{1,4})\s{1,9}(?:\S{1,9}\s{1,9}\S{1,9}\s{1,20})?([0-9]{1,10})\s{1,9}([CGM+]{1,5})\s{1,9}(.*?)"
    r"\s{0,60}(?:([0-9]{1,9})MiB|N/A)?\s{0,9}\|"
)


@dataclass(frozen=True)
class SmiProcess:
    """One line of the process panel. `kind` is C (compute), G (graphics) or both."""

    gpu_index: int
    pid: int
    kind: str
    name: str | None
    used_bytes: int | None


@dataclass(frozen=True)
class SmiSummary:
    """What the table says. `reason` tells why there is no GPU.

    `processes_visible`: True if processes are listed or nvidia-smi says that none runs; False if the panel is blank
    although memory is in use: some process is there, out of sight; None if the text does not tell.
    """

    gpus: tuple[SmiGpu, ...] = ()
    processes: tuple[SmiProcess, ...] = ()
    processes_visible: bool | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    reason: str | None = None
    hint: str | None = None
    raw: str = field(default="", repr=False)

    def __repr__(self) -> str:
        if not self.gpus:
            return " ".join(text for text in (self.reason, self.hint) if text)
        return "\n".join([views.text_table(_HEADERS, _rows(self)), self._about_processes()])

    def _repr_html_(self) -> str:
        if not self.gpus:
            return f"<p>{html.escape(repr(self))}</p>"
        return views.html_table(_HEADERS, _rows(self)) + f"<p>{html.escape(self._about_processes())}</p>"

    def _about_processes(self) -> str:
        if self.processes:
            return f"{len(self.processes)} process(es) listed."
        if self.processes_visible is False:
            return (
                "No process is listed although memory is in use: here the process list is hidden, as in most "
                "containers. It does not mean that your job is not on the GPU."
            )
        return "No process is listed."


_COLUMNS = 7  # without the clock, which the summary table does not show, and the fan
_HEADERS = GPU_HEADERS[:_COLUMNS]


def _rows(summary: SmiSummary) -> list[list[str]]:
    return [row[:_COLUMNS] for row in gpu_rows(summary.gpus)]


def parse_summary(text: str | bytes) -> SmiSummary:
    """Read the output of plain `nvidia-smi`. Never raises; what it cannot read is None or missing."""
    whole = decode(text)
    lines = lines_of(whole)
    start_of_panel = next((number for number, line in enumerate(lines) if "Processes:" in line), len(lines))
    gpus = _gpus(lines[:start_of_panel])
    processes = _processes(lines[start_of_panel:])
    versions = next((found for line in lines if (found := _VERSIONS.search(line[:300]))), None)
    reason, hint = None, None
    if not gpus:
        known = next((told for line in lines if (told := explain(line))), None)
        reason, hint = known or ("The text has no table of nvidia-smi.", None)
    return SmiSummary(
        gpus=gpus,
        processes=processes,
        processes_visible=_visible(gpus, processes, lines[start_of_panel:]),
        driver_version=versions[1] if versions else None,
        cuda_version=versions[2] if versions else None,
        reason=reason,
        hint=hint,
        raw=whole[:20_000],
    )


def _gpus(lines: Sequence[str]) -> tuple[SmiGpu, ...]:
    """A GPU takes two lines or three: its name first, then its figures."""
    gpus: list[SmiGpu] = []
    header: re.Match[str] | None = None
    for line in (line[:300] for line in lines):
        found = _GPU.match(line)
        memory = _MEMORY.search(line)
        if found:
            header = found
        elif memory and len(gpus) < MAX_GPUS:
            left, power = line[: memory.start()], _POWER.search(line)
            busy, heat, state = _BUSY.search(line[memory.end() :]), _TEMPERATURE.search(left), _STATE.search(left)
            gpus.append(
                SmiGpu(
                    index=int(header[1]) if header else None,
                    name=clean_name(header[2]) if header else None,
                    busy_percent=float(busy[1]) if busy else None,
                    used_bytes=int(memory[1]) * _MIB,
                    total_bytes=int(memory[2]) * _MIB,
                    power_w=float(power[1]) if power else None,
                    power_limit_w=float(power[2]) if power else None,
                    temperature_c=float(heat[1]) if heat else None,
                    pstate=state[1] if state else None,
                )
            )
            header = None
    return tuple(gpus)


def _processes(panel: Sequence[str]) -> tuple[SmiProcess, ...]:
    found = [match for line in panel[:_MAX_PROCESSES] if (match := _PROCESS.match(line[:300]))]
    return tuple(
        SmiProcess(int(row[1]), int(row[2]), row[3], clean_name(row[4]), int(row[5]) * _MIB if row[5] else None)
        for row in found
    )


def _visible(gpus: Sequence[SmiGpu], processes: Sequence[SmiProcess], panel: Sequence[str]) -> bool | None:
    if processes or any("no running processes found" in line.lower() for line in panel):
        return True
    if any(gpu.used_bytes for gpu in gpus):
        return False
    return True if gpus and panel else None
