"""Loaders and devices with a clock of their own: tests of measuring that do not depend on this machine's speed."""

import random
from types import SimpleNamespace

import torch

from course_utils import loader_feed, loader_look, loader_run, loader_tuner


class Clock:
    """The time that all loader modules see: `now_s` moves only when a test moves it."""

    def __init__(self, monkeypatch):
        self.now_s = 100.0
        self.cpu_s = 0.0
        fake = SimpleNamespace(perf_counter=lambda: self.now_s, process_time=lambda: self.cpu_s)
        for module in (loader_feed, loader_look, loader_run, loader_tuner):
            monkeypatch.setattr(module, "time", fake)

    def work(self, seconds):
        """The CPU computes."""
        self.now_s += seconds
        self.cpu_s += seconds

    def sleep(self, seconds):
        """The CPU waits."""
        self.now_s += seconds


class FakeGpu:
    """A step only queues its work; synchronize() waits until all of it is done."""

    def __init__(self, clock, monkeypatch):
        self.clock, self.free_s, self.deepest = clock, 0.0, 0.0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.wait_until(self.free_s))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(self))

    def queue(self, work_s):
        self.free_s = max(self.free_s, self.clock.now_s) + work_s
        self.deepest = max(self.deepest, self.free_s - self.clock.now_s)

    def wait_until(self, at_s):
        self.clock.now_s = max(self.clock.now_s, at_s)


class FakeEvent:
    def __init__(self, gpu):
        self.gpu, self.at_s = gpu, None

    def record(self, stream=None):
        self.at_s = max(self.gpu.free_s, self.gpu.clock.now_s)

    def synchronize(self):
        self.gpu.wait_until(self.at_s)


class FakeLoader:
    """A DataLoader on a fake clock: workers prepare batches side by side, up to `prefetch_factor` ahead each.

    `load_s(number)` is what batch `number` takes. `workers_slow(workers)` is by how much workers hold each other up.
    """

    timeout = 0
    dataset = None

    def __init__(
        self,
        clock,
        load_s,
        batches=1000,
        samples=8,
        num_workers=0,
        prefetch_factor=None,
        persistent_workers=False,
        pin_memory=False,
        start_s=0.02,
        workers_slow=lambda workers: 1.0,
        computes=False,
    ):
        self.clock, self.load_s, self.batches, self.samples = clock, load_s, batches, samples
        self.num_workers, self.persistent_workers, self.pin_memory = num_workers, persistent_workers, pin_memory
        self.prefetch_factor = (prefetch_factor or 2) if num_workers else None
        self.start_s, self.slow = start_s, workers_slow(num_workers)
        self.batch_size = samples
        self.load = clock.work if computes else clock.sleep
        self.sampler = range(batches * samples)
        self.epochs = 0

    def __len__(self):
        return self.batches

    def __iter__(self):
        self.epochs += 1
        batch = (torch.zeros(self.samples, 3), torch.zeros(self.samples))
        if not self.num_workers:
            for number in range(self.batches):
                self.load(self.load_s(number))
                yield batch
            return
        if self.epochs == 1 or not self.persistent_workers:
            self.clock.sleep(self.start_s * self.num_workers)
        ahead = self.num_workers * self.prefetch_factor
        free = [self.clock.now_s] * self.num_workers
        asked = [self.clock.now_s] * ahead  # when the workers were told of each batch
        for number in range(self.batches):
            worker = number % self.num_workers
            ready = max(free[worker], asked[number]) + self.load_s(number) * self.slow
            free[worker] = ready
            self.clock.now_s = max(self.clock.now_s, ready)
            asked.append(self.clock.now_s)
            yield batch


def jitter(mean_s, share, seed=0):
    """Load times around a mean, the same for the same batch."""
    draws = random.Random(seed)
    table = [mean_s * (1 + share * draws.uniform(-1, 1)) for _ in range(997)]
    return lambda number: table[number % 997]
