"""The one place that touches PyTorch's private FakeTensorMode and MemTracker.

A fake tensor has a shape, a dtype and a storage with a size, but no memory and no values: a training step on fake
tensors costs no memory and says what a real one would allocate. MemTracker adds that up, by what it is for
(torch/distributed/_tools/mem_tracker.py, read in torch 2.11 and 2.14).
"""

from __future__ import annotations

import gc
import importlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from course_utils.memory_step import MemoryModelError, NotAStep, Step
from course_utils.preserve import rng_preserved

_ADVICE = "Leave it out of the step that is predicted, or measure on the device: find_batch_size needs no prediction."
_OPERATIONS = {
    "_local_scalar_dense": ".item() (also float(), int(), bool(), tolist(), or an `if` on a tensor)",
    "item": ".item()",
    "nonzero": "nonzero() (also a boolean mask as an index, or where() with one argument)",
    "masked_select": "masked_select()",
    "equal": "torch.equal()",
    "unique": "unique()",
}


class FakeTraining:
    """Runs copies of one training step on fake tensors. It holds a fake copy of the step, and nothing of the real one.

    MemoryModelError where PyTorch's private parts have moved, or where the step cannot be copied.
    """

    def __init__(self, step: Step) -> None:
        self._private = _private_parts()
        # Real tensors that the code reads from elsewhere (a global constant) are taken by their shape.
        self._mode = self._private.FakeTensorMode(allow_non_fake_inputs=True)
        self._template = step.copied(self._faker())
        with self._mode:
            self._template = self._template.resized(step.batch_size)

    def peak(self, batch_size: int) -> dict[str, int]:
        """Bytes at the peak of two steps with `batch_size` samples: by MemTracker's kinds, and as "Total".

        Two steps, because the optimizer makes its state in the first.
        """
        kinds, failure = self._attempt(batch_size)
        # Outside the except block: a failed step's frames hold its tensors.
        kept_in = self._take_out_leftovers()
        if failure is not None:
            raise failure
        if kept_in:
            raise MemoryModelError(
                f"The step keeps tensors outside the model, in {kept_in}. They were taken out again; "
                "let forward() and the loss keep nothing outside the model."
            )
        return kinds

    def _attempt(self, batch_size: int) -> tuple[dict[str, int], Exception | None]:
        try:
            step = self._template.copied(self._faker())
            # In this order: a random state that is read in fake mode is fake, and cannot be put back.
            with rng_preserved(), _without_module_hooks(self._private.mod_tracker), self._mode:
                step = step.resized(batch_size).with_optimizer().in_its_mode()
                tracker = self._tracker(step)
                with tracker:
                    for _ in range(2):
                        tracker.reset_mod_stats()
                        # A dispatch mode sees layer_norm and the like whole in inference mode, and so misses what
                        # they make inside. What is allocated is the same.
                        step.run(torch.no_grad)
            return _added_up(tracker.get_tracker_snapshot("peak")), None
        except (NotAStep, MemoryModelError) as error:
            return {}, error.with_traceback(None)
        except Exception as error:  # noqa: BLE001 - the learner's code may raise anything: it is explained
            return {}, MemoryModelError(self._explained(error))

    def _tracker(self, step: Step) -> Any:
        class Tracker(self._private.MemTracker):  # type: ignore[misc,name-defined]
            def get_tracker_snapshot(self, type: str = "current") -> Any:
                found = self._peak_mem_snap if type == "peak" else self._curr_mem_snap
                return {device: dict(kinds) for device, kinds in found.items()}  # without deepcopy, for speed

        class Unlisted(self._private.WeakIdKeyDictionary):  # type: ignore[misc,name-defined]
            def values(self) -> Any:
                return []

        tracker = Tracker()
        # It would bring each module's own peak up to date at each operation, which takes five times as long.
        tracker.memory_tracking = Unlisted()
        for parameter in step.whole.parameters():
            if not parameter.requires_grad:  # else it registers a gradient hook, which raises on a frozen parameter
                tracker._param_to_grad_hook_handles[parameter] = (_NoHook, _NoHook)
        tracker.track_external(*step.tensors(), step.whole)
        return tracker

    def _faker(self) -> Callable[[torch.Tensor], torch.Tensor]:
        bases: dict[tuple[int, torch.dtype], tuple[Any, torch.Tensor]] = {}

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout is not torch.strided:
                raise TypeError(f"a tensor of layout {tensor.layout}: only dense ones can be predicted")
            storage = tensor.untyped_storage()
            # One base for all that share a storage: a view costs nothing, and keeps the whole alive. The storage stays
            # beside it, so that its address is not given to another.
            key = (storage._cdata, tensor.dtype)
            with self._mode, torch.no_grad():
                if key not in bases:
                    length = storage.nbytes() // tensor.element_size()
                    bases[key] = storage, torch.empty(length, dtype=tensor.dtype, device="cpu")
                return bases[key][1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()

        return fake

    def _explained(self, error: Exception) -> str:
        where = _where(error)
        if isinstance(error, self._private.needs_values):
            operation = str(getattr(error, "func", None) or error).removeprefix("aten.")
            name = _OPERATIONS.get(operation.split(".")[0], operation)
            return f"{name} needs values, and a prediction has only shapes{where}. {_ADVICE}"
        line = next(iter(str(error).strip().splitlines()), "no message")
        return f"The step does not run on fake tensors{where}: {type(error).__name__}: {line} {_ADVICE}"

    def _take_out_leftovers(self) -> str:
        """Take fake tensors out of the lists and dicts where the step left them; returns where, or ""."""
        left = self._alive()
        if left:
            del left  # this list holds them too
            gc.collect()  # what only refers to itself goes; it takes half a second where much is loaded
            left = self._alive()
        ids, places = {id(tensor) for tensor in left}, set()
        for holder in gc.get_referrers(*left) if left else []:
            if isinstance(holder, list) and holder is not left:
                holder[:] = [item for item in holder if id(item) not in ids]
                places.add("a list")
            elif isinstance(holder, dict):
                for key in [key for key, item in holder.items() if id(item) in ids]:
                    del holder[key]
                    places.add(repr(key) if isinstance(key, str) else "a dict")
        return " and ".join(sorted(places)) or ("an object" if left else "")

    def _alive(self) -> list[Any]:
        """The fake tensors of this training that still live, but for those of its template."""
        own, kind = {id(tensor) for tensor in self._template.tensors()}, self._private.FakeTensor
        fakes = [thing for thing in gc.get_objects() if type(thing) is kind]
        return [tensor for tensor in fakes if tensor.fake_mode is self._mode and id(tensor) not in own]


class _NoHook:
    @staticmethod
    def remove() -> None:
        """Nothing was registered."""


def _private_parts() -> SimpleNamespace:
    """MemTracker, FakeTensorMode and what belongs to them, or MemoryModelError that says which has moved."""
    found = SimpleNamespace()
    try:
        fake = importlib.import_module("torch._subclasses.fake_tensor")
        found.FakeTensor, found.FakeTensorMode = fake.FakeTensor, fake.FakeTensorMode
        found.needs_values = (fake.DataDependentOutputException, fake.DynamicOutputShapeException)
        found.mod_tracker = importlib.import_module("torch.distributed._tools.mod_tracker")
        found.mod_tracker.register_multi_grad_hook  # noqa: B018 - is it there?
        found.MemTracker = importlib.import_module("torch.distributed._tools.mem_tracker").MemTracker
        found.WeakIdKeyDictionary = importlib.import_module("torch.utils.weak").WeakIdKeyDictionary
        tracker = found.MemTracker()
        for name in ("_peak_mem_snap", "_curr_mem_snap", "_param_to_grad_hook_handles", "memory_tracking"):
            getattr(tracker, name)
        for name in ("track_external", "reset_mod_stats", "get_tracker_snapshot"):
            getattr(tracker, name)
    except (ImportError, AttributeError) as error:
        raise MemoryModelError(
            f"PyTorch {torch.__version__} has moved what predictions are made with ({error}): "
            "measure on the device instead, with find_batch_size."
        ) from error
    return found


@contextmanager
def _without_module_hooks(mod_tracker: Any) -> Iterator[None]:
    """Keep ModTracker, which MemTracker uses, from hooking each module's backward pass: no peak needs it.

    Its hooks refer to the graph that holds them, so that the graph and all parameters would stay alive for good. It
    also replaces warnings.formatwarning.
    """
    register, formatter = mod_tracker.register_multi_grad_hook, warnings.formatwarning
    mod_tracker.register_multi_grad_hook = lambda *args, **keywords: None
    try:
        yield
    finally:
        mod_tracker.register_multi_grad_hook, warnings.formatwarning = register, formatter


def _added_up(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for on_device in snapshot.values():
        for kind, size in on_device.items():
            name = getattr(kind, "value", kind)
            kinds[name] = kinds.get(name, 0) + size
    return kinds


def _where(error: BaseException) -> str:
    """The last line of the learner's own code on the way to the error."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(Path(traceback.__file__).parent) + "/")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    return f" (line {frames[-1].lineno}, in {frames[-1].name}: `{frames[-1].line}`)" if frames else ""
