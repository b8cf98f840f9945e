"""Ask nvidia-smi, once and with a time limit, and get records instead of text.

    report = query()
    report.gpus[0].busy_percent, report.gpus[0].used_bytes      # or report.reason, where there is no GPU

1. `query` runs `nvidia-smi --query-gpu=… --format=csv`; `parse_query_csv` reads what it printed.
2. `query_summary` runs plain `nvidia-smi`; `parse_summary` reads its table and its process panel.

Nothing here raises because a GPU, the driver or the program is missing. Starting nvidia-smi costs from 14 ms to seconds
(aristocratos/bpytop#26, netdata/netdata#14522): for a series of samples use `course_utils.monitor`, which asks NVML.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread

from course_utils.nvidia_smi_parse import SmiGpu, SmiReport, parse_query_csv
from course_utils.nvidia_smi_summary import SmiProcess, SmiSummary, parse_summary
from course_utils.nvidia_smi_text import MAX_TEXT, clean_name

__all__ = [
    "DEFAULT_FIELDS",
    "EXAMPLE_QUERY_CSV",
    "EXAMPLE_SUMMARY",
    "SmiGpu",
    "SmiProcess",
    "SmiReport",
    "SmiSummary",
    "clean_name",
    "find_nvidia_smi",
    "parse_query_csv",
    "parse_summary",
    "query",
    "query_summary",
]

DEFAULT_FIELDS = (
    "index",
    "name",
    "uuid",
    "driver_version",
    "utilization.gpu",
    "utilization.memory",
    "memory.used",
    "memory.total",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks.sm",
    "fan.speed",
    "clocks_throttle_reasons.active",
)
WSL_PATH = Path("/usr/lib/wsl/lib/nvidia-smi")

# Example, not measured here: an idle T4 on Colab in August 2024, as shown in the public notebook
# PersonSpeedvision.ipynb of github.com/Heisnotanimposter/ObjectDetection_with_Server.
EXAMPLE_SUMMARY = """\
Wed Aug 21 14:26:37 2024
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 535.104.05             Driver Version: 535.104.05   CUDA Version: 12.2     |
|-----------------------------------------+----------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |         Memory-Usage | GPU-Util  Compute M. |
|                                         |                      |               MIG M. |
|=========================================+======================+======================|
|   0  Tesla T4                       Off | 00000000:00:04.0 Off |                    0 |
| N/A   53C    P8               9W /  70W |      0MiB / 15360MiB |      0%      Default |
|                                         |                      |                  N/A |
+-----------------------------------------+----------------------+----------------------+

+---------------------------------------------------------------------------------------+
| Processes:                                                                            |
|  GPU   GI   CI        PID   Type   Process name                            GPU Memory |
|        ID   ID                                                             Usage      |
|=======================================================================================|
|  No running processes found                                                           |
+---------------------------------------------------------------------------------------+
"""

# Example, not measured here: made up to match the card of EXAMPLE_SUMMARY while it trains. The columns are those that
# nvidia-smi prints for this query; a T4 has no fan, so that cell is always [N/A] (anderskm/gputil#5).
EXAMPLE_QUERY_CSV = """\
index, name, utilization.gpu [%], utilization.memory [%], memory.used [MiB], memory.total [MiB], power.draw [W], \
temperature.gpu, clocks.current.sm [MHz], fan.speed [%]
0, Tesla T4, 37 %, 14 %, 1893 MiB, 15360 MiB, 41.27 W, 61, 1245 MHz, [N/A]
"""

Runner = Callable[[Sequence[str], float], tuple[int, str | bytes]]
_FIELD = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*")
_UNKNOWN_FIELD = re.compile(r'Field "([^"\n]{1,100})" is not a valid field to query')


def query(fields: Sequence[str] = DEFAULT_FIELDS, timeout_s: float = 5.0, run: Runner | None = None) -> SmiReport:
    """Ask nvidia-smi once for `fields` (names as in `nvidia-smi --help-query-gpu`) of every GPU.

    Returns within about `timeout_s` seconds, even if nvidia-smi hangs. A field that this driver does not know is left
    out and reported in `problems`. `run(command, timeout_s) -> (exit status, output)` replaces the real program in
    tests; it may raise OSError or TimeoutError. ValueError if a field is no field name.
    """
    wanted = [field.strip() for field in ([fields] if isinstance(fields, str) else fields)]
    if not wanted or not all(_FIELD.fullmatch(field) for field in wanted):
        raise ValueError(
            f"fields must be names such as 'utilization.gpu', see nvidia-smi --help-query-gpu, not {fields!r}."
        )
    deadline = time.monotonic() + timeout_s
    unknown: list[str] = []
    while True:
        arguments = [f"--query-gpu={','.join(wanted)}", "--format=csv"]
        output = _ask(arguments, max(0.05, deadline - time.monotonic()), run)
        if isinstance(output, SmiReport):
            return output
        report = parse_query_csv(output[1])
        field = _UNKNOWN_FIELD.search(report.raw)
        if report.gpus or field is None or field[1] not in wanted or len(wanted) == 1:
            break
        wanted.remove(field[1])
        unknown.append(f"{field[1]}: this driver's nvidia-smi does not know this field.")
    if not report.gpus and output[0] != 0:
        report = replace(report, reason=f"{report.reason} (exit status {output[0]})")
    return replace(report, problems=(*unknown, *report.problems))


def query_summary(timeout_s: float = 5.0, run: Runner | None = None) -> SmiSummary:
    """Run plain nvidia-smi once and read its table; `reason` says why there is no GPU."""
    output = _ask([], timeout_s, run)
    if isinstance(output, SmiReport):
        return SmiSummary(reason=output.reason, hint=output.hint)
    return parse_summary(output[1])


def find_nvidia_smi() -> str | None:
    """Where nvidia-smi is: on PATH, else in WSL's own folder, which is not on root's PATH; None if nowhere."""
    return shutil.which("nvidia-smi") or (str(WSL_PATH) if WSL_PATH.is_file() else None)


def _ask(arguments: Sequence[str], timeout_s: float, run: Runner | None) -> tuple[int, str | bytes] | SmiReport:
    program = find_nvidia_smi() if run is None else "nvidia-smi"
    if program is None:
        return _NOT_FOUND
    try:
        return (run or _run)([program, *arguments], timeout_s)
    except FileNotFoundError:
        return _NOT_FOUND
    except (TimeoutError, subprocess.TimeoutExpired):
        return SmiReport(
            reason=f"nvidia-smi did not answer within {timeout_s:.3g} s.",
            hint="The driver may hang: try again; if it stays so, restart the machine.",
            timed_out=True,
        )
    except (OSError, ValueError) as error:  # not executable, wrong format, an impossible path
        return SmiReport(reason=f"nvidia-smi could not be started: {error}"[:300])


_NOT_FOUND = SmiReport(
    reason="nvidia-smi was not found: no NVIDIA driver here, or a runtime without a GPU.",
    hint="On Colab: Runtime → Change runtime type → T4 GPU → Save.",
)


def _run(command: Sequence[str], timeout_s: float) -> tuple[int, bytes]:
    """Exit status and at most 1 MB of output; TimeoutError after `timeout_s`.

    Not `subprocess.run`: after its timeout that waits, without limit, for a child that a hung driver keeps from dying,
    or whose own children hold the pipe.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "LC_ALL": "C"},
        start_new_session=True,
    )
    deadline = time.monotonic() + timeout_s
    chunks: list[bytes] = []

    def collect() -> None:
        with process.stdout as pipe:  # type: ignore[union-attr]
            chunks.append(pipe.read(MAX_TEXT))

    reader = Thread(target=collect, name="nvidia-smi output", daemon=True)
    reader.start()
    reader.join(timeout_s)
    try:
        if reader.is_alive():
            raise subprocess.TimeoutExpired(command, timeout_s)
        return process.wait(max(0.05, deadline - time.monotonic())), b"".join(chunks)
    except subprocess.TimeoutExpired:
        _end(process)
        raise TimeoutError(f"nvidia-smi did not answer within {timeout_s} s.") from None


def _end(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)  # its own session, so its children end with it
        except ProcessLookupError:
            return
    else:
        process.kill()
    try:
        process.wait(0.1)
    except subprocess.TimeoutExpired:
        return  # stuck in the driver; it ends when the driver lets it go
