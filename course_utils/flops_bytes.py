"""How many bytes a training step moves through memory, estimated from shapes: the other axis of a roofline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from course_utils.flops_counter import FakeRun
from course_utils.flops_units import percent, si
from course_utils.views import html_table, number, text_table

_MOST_ROWS = 6
_HEADERS = ("operation", "moved", "share")
_ONLY_WRITES = ("bernoulli_", "copy_", "fill_", "normal_", "uniform_", "zero_")  # the tensor they change is not read
_LOOK_UP = ("embedding", "gather", "index", "index_select")  # of the first input, they read what they give
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True, repr=False)
class BytesMoved:
    """Bytes between processor and memory in one forward and backward pass: two estimates, with the truth between them.

    `unfused_bytes`: each operation reads all its inputs from memory and writes all its outputs there, as eager PyTorch
    does with tensors that are larger than the caches. `least_bytes`: parameters and batch are read once, gradients
    written once, and all else stays in the caches; no program moves less. `operations` counts those that move anything;
    `by_operator` splits `unfused_bytes`, largest first.
    """

    unfused_bytes: int
    least_bytes: int
    operations: int
    by_operator: Mapping[str, int]

    def _rows(self) -> list[tuple[str, ...]]:
        parts = list(self.by_operator.items())
        rows = [("unfused", self.unfused_bytes), *((f"· {name}", size) for name, size in parts[:_MOST_ROWS])]
        if len(parts) > _MOST_ROWS:
            rows.append((f"· {len(parts) - _MOST_ROWS} others", sum(size for _, size in parts[_MOST_ROWS:])))
        rows.append(("at least", self.least_bytes))
        return [
            (name, si(size, "B"), percent(size / self.unfused_bytes if self.unfused_bytes else None))
            for name, size in rows
        ]

    def _line(self) -> str:
        return f"Bytes moved by {number(self.operations)} operations, estimated"

    def __repr__(self) -> str:
        return f"{self._line()}\n{text_table(_HEADERS, self._rows())}"

    def _repr_html_(self) -> str:
        return html_table(_HEADERS, self._rows(), self._line())


def bytes_moved(
    model: nn.Module, batch: Any, loss: Callable[..., Any] | None = None, *, autocast: torch.dtype | None = None
) -> BytesMoved:
    """Estimate the memory traffic of a training step's forward and backward pass from shapes; nothing is computed.

    Arguments and errors as `flops.count_flops`; the optimizer's step is left out, too. Views move nothing. An input
    that is broadcast counts what is stored of it, one that an operation takes twice counts once, of a table only the
    rows that are looked up count. What checkpointing does again counts again. What a kernel reads
    a second time, its workspace, and copies into another layout inside oneDNN or cuDNN are not seen.
    """
    run, traffic = FakeRun(model, batch, loss, autocast), _Traffic()
    run.watched_by(traffic, lambda: None)
    modules = [model, loss] if isinstance(loss, nn.Module) else [model]
    parameters = {id(each): each for module in modules for each in module.parameters()}.values()
    fixed = sum(map(_stored_bytes, parameters)) + sum(_stored_bytes(each) for each in tree_flatten(batch)[0])
    gradients = sum(_stored_bytes(each) for each in parameters if each.requires_grad and loss is not None)
    total = sum(traffic.moved.values())
    return BytesMoved(total, min(total, fixed + gradients), traffic.operations, dict(traffic.moved.most_common()))


class _Traffic(TorchDispatchMode):
    """Adds up what each operation reads and writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.moved: Counter[str] = Counter()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        inputs = _tensors((args, kwargs))
        held = {each.untyped_storage()._cdata for each in inputs}
        # What shares an input's memory is a view of it, or the input itself, changed in place.
        made = [each for each in _tensors(out) if each.untyped_storage()._cdata not in held]
        changed = _changed(func, args, kwargs or {})
        if name not in _UNWRITTEN and (made or changed):
            written = sum(map(_stored_bytes, [*made, *changed]))
            if name in _ONLY_WRITES:
                inputs = [each for each in inputs if not any(each is one for one in changed)]
            read = [_stored_bytes(each) for each in inputs]
            if name in _LOOK_UP:
                read[0] = min(read[0], written)
            self.moved[name] += sum(read) + written
            self.operations += 1
        return out


def _changed(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that the operation's schema says it writes into."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
    return written


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Each tensor in `tree`, once."""
    return list({id(leaf): leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)}.values())


def _stored_bytes(tensor: Any) -> int:
    if not isinstance(tensor, torch.Tensor):
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
