"""Traps of workers (cases DL-04, DL-08, DL-10), what workers die of (DL-01), and their memory; nothing may hang."""

import functools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info
from torchvision.transforms import v2

from course_utils import loader_checks, loader_feed, loader_workers
from course_utils.loader_needs import start_method_of
from course_utils.loading import Finding, check_dataset, explain_worker_error

ROOT = Path(__file__).resolve().parent.parent
SPAWNING = ("spawn", "forkserver")


class Images(Dataset):
    """Holds whatever a test gives it."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise AssertionError("a check reads no sample")


def kinds(dataset, **keywords):
    return [finding.kind for finding in check_dataset(dataset, **keywords)]


def plain_collate(samples):
    return samples


# --- DL-04: what a worker that starts afresh cannot import ----------------------------------------------------------

# Typed into a prompt, as in a notebook: __main__ has no file.
TYPED = """
import json, torch
from torch.utils.data import DataLoader, Dataset
from course_utils.loading import check_dataset, tune_loader

class Typed(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.zeros(2)

found = {how: [f.blocks_workers for f in check_dataset(Typed(), 2, how)] for how in ("fork", "spawn", "forkserver")}
found["text"] = repr(check_dataset(Typed(), 2, "spawn")[0])

def make_loader(num_workers, **keywords):
    context = "forkserver" if num_workers else None
    return DataLoader(Typed(), batch_size=4, num_workers=num_workers, multiprocessing_context=context, **keywords)

import multiprocessing
from course_utils.loader_needs import start_method_of
found["asked"] = [start_method_of(), multiprocessing.get_start_method(allow_none=True)]
multiprocessing.set_start_method("forkserver")  # what Python 3.14 does by default
found["set"] = start_method_of()
tuned = tune_loader(make_loader, lambda batch: None, workers=[1], budget_s=2, progress=False)
found["keywords"], found["row"] = tuned.keywords, [tuned.rows[-1].outcome, tuned.rows[-1].reason]
print(json.dumps(found))
"""


def test_a_class_typed_in_a_notebook_blocks_workers_that_start_afresh():
    command = [sys.executable, "-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=TYPED, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fork"] == [] and found["spawn"] == found["forkserver"] == [True]
    assert "'Typed'; it was typed in a notebook cell" in found["text"] and "use num_workers=0" in found["text"]
    assert found["keywords"] == {"num_workers": 0, "pin_memory": False}
    assert found["row"][0] == "refused" and "Typed" in found["row"][1]
    assert done.stderr == ""
    assert found["asked"] == [multiprocessing.get_all_start_methods()[0], None]  # asking does not settle it
    assert found["set"] == "forkserver"


def test_a_script_is_run_again_by_its_workers_and_is_no_trap(monkeypatch):
    typed = type("Typed", (Dataset,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    assert kinds(typed(), start_method="spawn") == []
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert kinds(typed(), start_method="spawn") == ["cannot be sent to a worker"]


@pytest.mark.parametrize(
    "dataset",
    [
        Images(transform=lambda image: image),
        Images(transform=v2.Compose([v2.Lambda(lambda image: image)])),
        Images(transforms=[functools.partial(lambda image: image)]),
        Subset(Images(transform=lambda image: image), [0]),
        DataLoader(Images(), collate_fn=lambda samples: samples),
        DataLoader(Images(), worker_init_fn=lambda worker: None),
        Images(inner=type("Local", (), {"__qualname__": "make.<locals>.Local"})()),
    ],
    ids=["transform", "torchvision", "partial", "subset", "collate", "init", "local class"],
)
def test_lambdas_and_local_classes_cannot_be_sent(dataset):
    for how in SPAWNING:
        (finding,) = check_dataset(dataset, 2, how)
        assert finding.kind == "cannot be sent to a worker" and finding.blocks_workers
    assert check_dataset(dataset, 2, "fork") == ()
    assert check_dataset(dataset, 0, "spawn") == ()


def test_what_can_be_imported_is_no_trap():
    dataset = Images(transform=v2.Compose([v2.RandomHorizontalFlip()]), table=np.zeros(9), names={"a": [1]})
    loader = DataLoader(dataset, collate_fn=plain_collate)
    for how in ("fork", *SPAWNING):
        assert check_dataset(loader, 2, how) == ()


def test_the_start_method_is_the_loaders():
    loader = DataLoader(Images(transform=lambda image: image), num_workers=1, multiprocessing_context="spawn")
    assert start_method_of(loader) == "spawn" and kinds(loader) == ["cannot be sent to a worker"]


# --- DL-08: random generators ---------------------------------------------------------------------------------------


class Drawn(Dataset):
    """Draws from a generator of its own (b), or from NumPy's global one (a)."""

    def __init__(self, own):
        self.rng = np.random.default_rng(0) if own else None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return int(self.rng.integers(10**9) if self.rng is not None else np.random.randint(10**9))


def fresh_generator(worker):
    get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())


def numbers(dataset, **keywords):
    return torch.cat(list(DataLoader(dataset, batch_size=1, num_workers=2, **keywords))).tolist()


def test_a_generator_in_the_data_set_is_found_and_really_draws_alike():
    own, shared = Drawn(True), Drawn(False)
    assert kinds(own) == ["same random numbers"] and kinds(shared) == []
    assert kinds(DataLoader(own, num_workers=2, worker_init_fn=fresh_generator)) == []
    assert kinds(own, num_workers=0) == []
    drawn = numbers(own)
    assert drawn[0::2] == drawn[1::2]  # worker 0 gives every second batch, worker 1 the others
    assert len(set(numbers(shared))) == 8  # torch seeds NumPy's global generator for each worker
    assert len(set(numbers(own, worker_init_fn=fresh_generator))) == 8


@pytest.mark.parametrize(
    "generator", [np.random.default_rng(0), np.random.RandomState(0), random.Random(0), torch.Generator()]
)
def test_every_kind_of_generator_is_found_wherever_it_is(generator):
    assert kinds(Images(augment=SimpleNamespace(rng=generator)), start_method="fork") == ["same random numbers"]
    (finding,) = check_dataset(Images(rng=generator), start_method="fork")
    assert ".rng is a random generator" in finding.problem and "torch.initial_seed()" in finding.cure


# --- streams --------------------------------------------------------------------------------------------------------


class Whole(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Shared(IterableDataset):
    def __iter__(self):
        yield from self.mine()

    def mine(self):
        info = get_worker_info()
        return range(info.id, 8, info.num_workers) if info else range(8)


class Inherited(Shared):
    def __iter__(self):
        return (number for number in self.mine())


def test_a_stream_that_does_not_ask_for_its_worker_is_found():
    (finding,) = check_dataset(Whole(), num_workers=3)
    assert finding.kind == "stream multiplied" and "its samples 3 times" in finding.problem
    assert not finding.blocks_workers  # one worker would do
    assert sorted(DataLoader(Whole(), batch_size=None, num_workers=2)) == sorted([*range(8)] * 2)


def test_streams_that_share_are_no_trap():
    for dataset in (Shared(), Inherited(), DataLoader(Whole(), num_workers=2, worker_init_fn=plain_collate)):
        assert kinds(dataset) == []
    assert kinds(Whole(), num_workers=1) == [] and kinds(DataLoader(Whole()), num_workers=0) == []
    assert kinds(DataLoader(Whole(), num_workers=1)) == []  # None: the loader's own number


# --- Drive, long lists, GPU tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset",
    [
        Images(root="/content/drive/MyDrive/images"),
        Images(root=PurePosixPath("/content/drive")),
        Images(samples=[("/content/gdrive/a.jpg", 0)]),
        Images(paths={"train": ["/content/drive/My Drive/a.jpg"]}),
    ],
)
def test_files_on_drive_are_found_also_without_workers(dataset):
    for workers in (0, 2):
        (finding,) = check_dataset(dataset, num_workers=workers)
        assert finding.kind == "files on Drive" and "/content/" in finding.problem


def test_other_folders_are_not_drive():
    assert kinds(Images(root="/content/driver/images", samples=[("/content/images/a.jpg", 0)])) == []


def test_long_lists_of_objects_are_found_and_arrays_are_not():
    names = [str(number) for number in range(100_000)]
    (finding,) = check_dataset(Images(names=names), num_workers=2)
    assert finding.kind == "many Python objects" and "100,000" in finding.problem
    assert kinds(Images(names=np.array(names))) == [] and kinds(Images(names=names[1:])) == []
    assert kinds(Images(names=names), num_workers=0) == []


def test_gpu_tensors_block_workers():
    tensor = torch.zeros(2)
    fake = torch.Tensor._make_subclass(OnGpu, tensor)
    (finding,) = check_dataset(Images(table=fake), start_method="fork")
    assert finding.kind == "GPU tensors" and finding.blocks_workers
    assert kinds(Images(table=tensor)) == []


class OnGpu(torch.Tensor):
    @property
    def device(self):
        return torch.device("cuda:0")


# --- bounded, and without side effects ------------------------------------------------------------------------------


class Endless(list):
    def __iter__(self):
        raise AssertionError("a check runs no code of the data set")

    __getitem__ = __len__ = __iter__


def test_a_check_runs_no_code_of_the_data_set_and_ends_in_loops():
    class Nosy(Images):
        @property
        def rng(self):
            raise AssertionError("a check reads no property")

    dataset = Nosy(data=Endless())
    dataset.self = dataset
    dataset.deep = deep = []
    for _ in range(50):
        deep.append([deep])
        deep = deep[0]
    assert kinds(dataset, start_method="fork") == []
    wide = Images(tree=[[[[object() for _ in range(20)] for _ in range(20)] for _ in range(20)] for _ in range(20)])
    begun = time.process_time()
    check_dataset(wide)
    assert time.process_time() - begun < 1.0
    assert multiprocessing.active_children() == []


def test_bad_arguments_and_the_look_of_a_finding():
    with pytest.raises(ValueError, match="start_method='thread'"):
        check_dataset(Images(), start_method="thread")
    with pytest.raises(ValueError, match="num_workers"):
        check_dataset(Images(), num_workers=-1)
    assert repr(Finding("a kind", "It is so.", "Do this.")) == "a kind: It is so. Do this."


# --- what workers die of --------------------------------------------------------------------------------------------

PICKLE = "Can't pickle local object <function make.<locals>.collate at 0x7f>"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("DataLoader worker (pid 325) is killed by signal: Bus error. It is possible ..."), "/dev/shm"),
        (RuntimeError("unable to open shared memory object </torch_1> in read-write mode"), "/dev/shm"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "RAM was used up"),
        (AttributeError("Can't get attribute 'Typed' on <module '__main__' (built-in)>"), "typed in a notebook cell"),
        (AttributeError(PICKLE), "cannot be sent"),
        (TypeError("cannot pickle '_io.TextIOWrapper' object"), "cannot be sent"),
        (RuntimeError("DataLoader timed out after 5 seconds"), "No worker gave a batch in time"),
        (RuntimeError("DataLoader worker (pid(s) 12, 13) exited unexpectedly"), "died without a Python error"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Segmentation fault. "), "died without"),
        (
            RuntimeError(
                "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback ...\n"
                "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing ..."
            ),
            "used the GPU inside a forked worker",
        ),
        (RuntimeError("Too many open files. Communication with the workers is no longer possible."), "ulimit -n"),
    ],
)
def test_what_workers_die_of_is_explained(error, says):
    assert says in explain_worker_error(error)
    wrapped = ValueError("the run failed")
    wrapped.__cause__ = error
    assert explain_worker_error(wrapped) == explain_worker_error(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA out of memory. Tried to allocate 20 MiB"),
        RuntimeError("out of resource: shared memory, Required: 65538, Hardware limit: 65536"),
        KeyError("Caught"),
        RuntimeError("Caught KeyError in DataLoader worker process 0.\nOriginal Traceback ...\nKeyError: 'label'"),
        ValueError("the model exited unexpectedly"),
    ],
)
def test_other_errors_are_not_explained(error):
    assert explain_worker_error(error) is None


def test_explaining_takes_the_exception_and_ends_in_loops():
    with pytest.raises(TypeError, match="the exception itself"):
        explain_worker_error("Bus error")
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert explain_worker_error(first) is None


# --- worker processes -----------------------------------------------------------------------------------------------


class Sleepy(Dataset):
    def __init__(self):
        self.asleep = torch.zeros(2).share_memory_()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.asleep[get_worker_info().id] = 1
        time.sleep(60)


def test_workers_that_are_asleep_end_within_the_grace_and_torchs_patience_stays():
    dataset = Sleepy()
    loader = DataLoader(dataset, num_workers=2)
    iterator = iter(loader)
    until = time.monotonic() + 60
    while dataset.asleep.sum() < 2 and time.monotonic() < until:
        time.sleep(0.01)
    usual = loader_workers._utils.MP_STATUS_CHECK_INTERVAL
    begun = time.perf_counter()
    loader_workers.end_workers(loader, iterator, grace_s=0.2)
    assert time.perf_counter() - begun < 4
    assert multiprocessing.active_children() == []
    assert usual == loader_workers._utils.MP_STATUS_CHECK_INTERVAL
    loader_workers.end_workers(loader, iterator)  # twice is harmless
    loader_workers.end_workers(loader, None)


class Held(Dataset):
    """Case DL-10: names as a list of strings, or as an array; each sample reads them all."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return sum(1 for name in self.names if name is not None)


def workers_memory(dataset):
    loader = DataLoader(dataset, batch_size=1, num_workers=2)
    with loader_feed.Feed(loader, patience_s=30) as feed:
        for _ in range(4):
            feed.next()
        return loader_workers.worker_bytes(feed.iterator)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a forked worker's own pages apart")
def test_a_list_of_objects_is_copied_into_every_worker_and_an_array_is_not():
    names = [f"a rather long name of a file {number}.jpg" for number in range(200_000)]
    as_list, as_array = workers_memory(Held(names)), workers_memory(Held(np.arange(200_000)))
    assert as_list > as_array + 2 * 200_000 * 40  # two workers, at least 40 bytes a string
    assert loader_workers.worker_bytes(None) is None
    assert loader_workers.worker_bytes(iter(DataLoader(TensorDataset(torch.zeros(2))))) is None


def test_the_walk_looks_at_a_bounded_number_of_objects():
    found = list(
        loader_checks._walk([("the data set", Images(many=[[object() for _ in range(20)] for _ in range(20)]))])
    )
    assert 400 < len(found) < 500
    assert len(list(loader_checks._walk([(str(n), object()) for n in range(5000)]))) <= 2000
