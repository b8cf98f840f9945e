"""What happens in a training step, operation by operation, told from shapes: the step runs once, on fake tensors.

`FakeRun` runs it and lets somebody watch; `OperationTally` is the watcher that adds up FLOPs with torch's FlopCounter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from course_utils.mem_tracker import _ADVICE, FakeTraining
from course_utils.memory_step import MemoryModelError, NotAStep, checked_step
from course_utils.preserve import rng_preserved

Shape = Sequence[int]
Phase = Literal["forward", "backward", "recompute"]


class FakeRun(FakeTraining):
    """Forward and backward pass of one training step on fake tensors, for a watcher of its operations.

    `batch` is (inputs, targets); without a `loss` only the forward pass runs, and a tensor or a dict of inputs will do.
    Raises what `memory_model.predict_memory` raises, for the same reasons.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[..., Any] | None, autocast: Any) -> None:
        self.trains = loss is not None
        if loss is None and not isinstance(batch, tuple | list):
            batch = batch, ()
        step = checked_step(model, batch, loss or _output_itself, _Idle, autocast)
        self.samples = step.batch_size
        super().__init__(step)

    def watched_by(self, watcher: AbstractContextManager[Any], after_forward: Callable[[], None]) -> None:
        """Run under `watcher`; `after_forward()` is called when the loss is there and the backward pass begins."""
        failure = self._watched(watcher, after_forward)
        self._take_out_leftovers()  # outside the except block: a failed step's frames hold its tensors
        if failure is not None:
            raise failure

    def _watched(self, watcher: AbstractContextManager[Any], after_forward: Callable[[], None]) -> Exception | None:
        try:
            step = self._template.copied(self._faker())
            # In this order: a random state that is read in fake mode is fake, and cannot be put back.
            with rng_preserved(), _known_operations(), self._mode:
                if not self.trains:
                    with watcher:
                        step.whole(step.inputs, step.targets)
                    return None
                step = step.with_optimizer()
                if not step.whole.model.training:
                    step.whole.train()  # checkpointing, for one, happens in train mode only
                step.whole.register_forward_hook(lambda *_: after_forward())
                with watcher:
                    step.run()
            return None
        except (NotAStep, MemoryModelError) as error:
            return error.with_traceback(None)
        except Exception as error:  # noqa: BLE001 - the learner's code may raise anything: it is explained
            return MemoryModelError(self._explained(error))

    def _explained(self, error: Exception) -> str:
        return super()._explained(error).replace(_ADVICE, "Leave it out of the step whose operations are counted.")


class OperationTally:
    """FLOPs by phase and operation. A product of matrices (m, k) and (k, n) is 2 m n k: a multiply-add is two.

    FlopCounterMode's formulas, with these of our own. As of torch 2.14 its backward pass of a grouped convolution is
    too large (by up to the number of groups), and the CPU's fused attention and matrix-vector products count nothing
    (pytorch/pytorch PR#183405, #195460).
    """

    def __init__(self) -> None:
        self.phase: Phase = "forward"
        self.flops: dict[Phase, Counter[str]] = {"forward": Counter(), "backward": Counter(), "recompute": Counter()}

    def counter(self) -> AbstractContextManager[Any]:
        """A FlopCounterMode that reports here."""
        from torch.utils.flop_counter import FlopCounterMode, flop_registry

        aten = torch.ops.aten
        # Formulas on shapes are decorated functions; the few that read the tensors belong to kernels that only GPUs
        # have, which fake CPU tensors never meet.
        formulas = {op: formula.__wrapped__ for op, formula in flop_registry.items() if hasattr(formula, "__wrapped__")}
        formulas[aten.convolution_backward] = _convolution_backward
        formulas[aten.mv] = formulas[aten.dot] = _product_with_vector
        formulas[aten._scaled_dot_product_flash_attention_for_cpu] = _attention
        mapping = {op: self._added(op, formula) for op, formula in formulas.items()}
        mapping[aten._scaled_dot_product_flash_attention_for_cpu_backward] = self._attention_backward
        return FlopCounterMode(display=False, custom_mapping=mapping)

    def now_backward(self) -> None:
        """What comes from here on belongs to the backward pass."""
        self.phase = "backward"

    def _added(self, operation: Any, formula: Callable[..., int]) -> Callable[..., int]:
        name = operation.__name__

        def add(*shapes: Any, out_shape: Any = None, **keywords: Any) -> int:
            flops = int(formula(*shapes, out_shape=out_shape, **keywords))
            self.flops[self._now()][name] += flops
            return flops

        return add

    def _now(self) -> Phase:
        # A backward pass runs without gradient mode; checkpointing turns it on to do the forward pass again.
        return "recompute" if self.phase == "backward" and torch.is_grad_enabled() else self.phase

    def _attention_backward(self, _gradient: Any, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        # The gradients of both products; before that the kernel computes the scores again, which it has not kept.
        name, scores = "_scaled_dot_product_flash_attention_for_cpu_backward", 2 * prod(query) * key[-2]
        gradients = 2 * _attention(query, key, value)
        self.flops[self._now()][name] += gradients
        self.flops["recompute"][name] += scores
        return gradients + scores


def _output_itself(output: Any, _targets: Any) -> Any:
    return output


class _Idle(torch.optim.Optimizer):
    """An optimizer that does nothing: its step has hardly any FLOPs, and is not what is looked at."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        """Leave the parameters as they are."""


@contextmanager
def _known_operations() -> Iterator[None]:
    """Keep away two fused kernels that no formula knows: oneDNN's LSTM, and the encoder layer's fast path."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    # Not mkldnn.flags(), which also sets what warns on a machine without an Intel GPU.
    one_dnn = torch.backends.mkldnn.set_flags(_enabled=False, _fp32_precision=None)[0]
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=one_dnn, _fp32_precision=None)
        torch.backends.mha.set_fastpath_enabled(fast)


def _convolution_backward(
    gradient: Any, inputs: Any, weight: Any, _bias: Any, _stride: Any, _padding: Any, _dilation: Any, transposed: bool,
    _output_padding: Any, _groups: Any, wanted: Any, out_shape: Any,
) -> int:  # fmt: skip
    # The gradients of inputs and weight each take as many multiply-adds as the forward pass: one for each weight and
    # sample, at each place of the output (transposed: of the input).
    places = (inputs if transposed else gradient)[2:]
    return int(2 * prod(weight) * gradient[0] * prod(places) * (bool(wanted[0]) + bool(wanted[1])))


def _product_with_vector(matrix: Shape, _vector: Any, out_shape: Any = None) -> int:
    return 2 * prod(matrix)


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    # query @ key and scores @ value: (N, heads, length, width). In full, also where a causal mask leaves half of it.
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
