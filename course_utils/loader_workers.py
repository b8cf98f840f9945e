"""The worker processes of a DataLoader: end them for sure, ask for their memory, and explain what they die of."""

from __future__ import annotations

import re
from typing import Any

import psutil
from torch.utils.data import _utils


def end_workers(loader: Any, iterator: Any, grace_s: float = 5.0) -> None:
    """End the workers behind `iterator`, and let `loader` start new ones. Nothing happens where there are none.

    Each worker gets `grace_s` seconds to end by itself; then it is terminated. torch has no public way to end workers,
    and waits 5 s for each (`_MultiProcessingDataLoaderIter._shutdown_workers`, read in torch 2.11 and 2.14).
    """
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is None:
        return
    if getattr(loader, "_iterator", None) is iterator:
        loader._iterator = None  # a persistent loader would go on using the dead workers
    usual = _utils.MP_STATUS_CHECK_INTERVAL
    _utils.MP_STATUS_CHECK_INTERVAL = min(usual, grace_s)
    try:
        shut_down()
    finally:
        _utils.MP_STATUS_CHECK_INTERVAL = usual
    for worker in getattr(iterator, "_workers", ()):
        worker.join(grace_s)
        if worker.is_alive():
            worker.kill()  # SIGTERM was not enough
            worker.join(grace_s)


def worker_bytes(iterator: Any) -> int | None:
    """The memory that is the workers' own: it would be free without them. None where there are none, or it is unknown.

    It is the unique set size (USS); where the system does not tell that, the resident set size, which counts pages
    that are shared with the training process once for each worker.
    """
    workers = getattr(iterator, "_workers", None)
    if not workers:
        return None
    try:
        infos = [psutil.Process(worker.pid).memory_full_info() for worker in workers if worker.is_alive()]
    except (psutil.Error, OSError):
        return None
    return sum(int(getattr(info, "uss", info.rss)) for info in infos) if infos else None


# In the order in which to try them (case DL-01). The third is what many threads advise; torch's maintainers doubt it
# (pytorch/pytorch#45728), and on Linux its files lie in /dev/shm as well (seen with torch 2.14).
SHM_REMEDIES = (
    "fewer workers, or a smaller prefetch_factor",
    "a smaller dtype: uint8 in the batch, made float on the device",
    "torch.multiprocessing.set_sharing_strategy('file_system'): worth a try, though it takes /dev/shm too",
    "a larger /dev/shm, such as docker run --shm-size=2g",
)

# What torch and Python say when workers die, and what is behind it. The first that fits counts.
_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"Bus error|shared memory \(shm\)|unable to (open|write|mmap|allocate) shared memory|No space left on device",
        "The workers have used up the shared memory (/dev/shm) in which they hand batches over; free RAM is no help. "
        f"Try, in this order: {'; '.join(SHM_REMEDIES)}.",
    ),
    (
        r"killed by signal: Killed",
        "The system ended a worker, most likely because the RAM was used up. Use fewer workers, a smaller "
        "prefetch_factor or batch, and NumPy arrays or tensors instead of long Python lists in the data set: "
        "each worker copies a list bit by bit (pytorch/pytorch#13246).",
    ),
    (
        r"Can't get attribute|<module '__main__'|__mp_main__",
        "A worker could not find a class or function that was typed in a notebook cell: with the start methods spawn "
        "and forkserver it starts afresh and imports everything. Put it into a .py file and import it, or use "
        "num_workers=0.",
    ),
    (
        r"[Cc]an't pickle|cannot pickle|PicklingError|local object",
        "The data set, its collate_fn or its worker_init_fn cannot be sent to a worker that starts afresh (spawn, "
        "forkserver). Replace lambdas and functions inside functions by functions in a .py file, open files in "
        "__getitem__ instead of __init__, or use num_workers=0.",
    ),
    (
        r"Cannot re-initialize CUDA in forked subprocess",
        "The data set used the GPU inside a forked worker. Keep its tensors on the CPU and copy each batch in the "
        "training loop.",
    ),
    (
        r"DataLoader timed out",
        "No worker gave a batch in time: one hangs, or a batch takes longer than the limit. Run the loader with "
        "num_workers=0 to see where it stays; locks, open files and network connections made before the workers "
        "start are the usual causes.",
    ),
    (
        r"Too many open files",
        "Each tensor that a worker hands over keeps a file open. Return one tensor a sample instead of many, raise "
        "`ulimit -n`, or call torch.multiprocessing.set_sharing_strategy('file_system') first.",
    ),
    (
        r"killed by signal|exited unexpectedly|Pin memory thread exited",
        "A worker process died without a Python error. What it printed stands above this message, if anything; "
        "num_workers=0 shows the error itself. A class typed in a notebook cell cannot be found by workers that "
        "start afresh (spawn, forkserver).",
    ),
)


def explain_worker_error(error: BaseException) -> str | None:
    """What is behind an exception of a loader with workers, and what to do, or None if it is not of that kind.

    The exceptions that it was raised from are looked at too. An error of your own data set is None: it is its own
    explanation.
    """
    if not isinstance(error, BaseException):
        raise TypeError(f"explain_worker_error takes the exception itself, not {error!r:.80}.")
    texts: list[str] = []
    link: BaseException | None = error
    while link is not None and len(texts) < 10:
        texts.append(f"{type(link).__name__}: {link}")
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    for pattern, sentence in _CAUSES:
        for text in texts:
            # "exited unexpectedly" and the like mean a loader only where the message says so.
            if re.search(pattern, text) and _is_of_a_worker(text):
                return sentence
    return None


def _is_of_a_worker(text: str) -> bool:
    inside = re.match(r"\w+: Caught \w+ in DataLoader worker", text)
    if inside is not None:
        return "CUDA" in text or "shared memory" in text or "No space left" in text or "Too many open" in text
    return bool(
        re.search(r"DataLoader|worker|pickle|Pickl|__main__|__mp_main__|shared memory|Pin memory|open files", text)
    )
