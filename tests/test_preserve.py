"""Whatever happens in the block, training goes on as if it had not (BSF-06)."""

import copy
import gc
import random
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from course_utils.oom import SimulatedMemory
from course_utils.preserve import TrainingState, rng_preserved, training_preserved


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())
        self.head = nn.Linear(4 * 36, 2)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x):
        self.count = self.count + 1  # a new tensor under the old name
        return self.head(self.body(x))


def bits(value):
    """A copy of nested state in which equal means equal bit for bit, NaNs too."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        return (str(value.dtype), tuple(value.shape), value.stride(), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return copy.deepcopy(value)


def everything(model, optimizer=None, scaler=None, scheduler=None):
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        "values": bits(tensors),
        "objects": {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors.items()},
        "modes": [module.training for module in model.modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "grads": bits([parameter.grad for parameter in model.parameters()]),
        "optimizer": bits(optimizer.state_dict()) if optimizer else None,
        "scaler": bits(vars(scaler)) if scaler else None,
        "scheduler": bits(scheduler.state_dict()) if scheduler else None,
        "rng": (random.getstate(), bits(list(np.random.get_state()[1])), bits(torch.get_rng_state())),
    }


def step(model, optimizer, scaler=None, samples=4):
    model.train()
    optimizer.zero_grad()
    loss = model(torch.randn(samples, 3, 8, 8)).square().mean()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    random.random()
    np.random.rand()


OPTIMIZERS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "Adam, lr as a tensor": lambda p: torch.optim.Adam(p, torch.tensor(0.01), foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
}


@pytest.mark.parametrize("steps_before", [0, 2], ids=["new", "in the middle of training"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_part_is_back_bit_for_bit(make, steps_before):
    model = Net()
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    for _ in range(steps_before):
        step(model, optimizer)
    model.body.eval()  # one submodule differs from the others
    before = everything(model, optimizer)
    with training_preserved(model, optimizer):
        step(model, optimizer)
        model.frozen.requires_grad_(True)
        model.head.weight.requires_grad_(False)
        optimizer.param_groups[0]["lr"] = 5.0
        optimizer.add_param_group({"params": [model.frozen]})
        model.eval()
        assert everything(model, optimizer)["values"] != before["values"]
    assert everything(model, optimizer) == before


def test_training_goes_on_as_if_nothing_had_happened():
    def train(look_away):
        torch.manual_seed(3)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        step(model, optimizer)
        if look_away:
            with training_preserved(model, optimizer):
                for samples in (2, 7, 3):
                    step(model, optimizer, samples=samples)
        step(model, optimizer)
        return bits(model.state_dict())

    assert train(look_away=True) == train(look_away=False)


def test_an_lbfgs_with_its_lists_is_back():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    before = everything(model, optimizer)
    with training_preserved(model, optimizer):
        optimizer.step(closure)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("error", [RuntimeError("x"), torch.OutOfMemoryError("x"), KeyboardInterrupt(), SystemExit(2)])
def test_an_exception_passes_through_and_all_is_back(error):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    before = everything(model, optimizer)
    with pytest.raises(type(error)) as caught, training_preserved(model, optimizer):
        step(model, optimizer)
        raise error
    assert caught.value is error
    assert everything(model, optimizer) == before


def test_gradients_that_were_there_are_back_also_after_zero_grad_and_in_place():
    model = Net()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    before = everything(model)
    kept = model.head.weight.grad
    with training_preserved(model):
        model.zero_grad(set_to_none=True)
    assert everything(model) == before
    kept = model.head.weight.grad
    with training_preserved(model):
        kept.fill_(7.0)
    assert everything(model) == before
    assert model.head.weight.grad is kept


def test_a_dropped_gradient_does_not_stay_alive_in_the_block():
    """Its memory would be missing to the trial."""
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    with training_preserved(model):
        gradient = weakref.ref(model.weight.grad.untyped_storage())
        assert gradient() is not None
        model.zero_grad()
        gc.collect()
        assert gradient() is None


def test_a_scaler_is_back_also_from_the_middle_of_a_step():
    """After an error between unscale_ and update, the next unscale_ would say that it has been called already."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    before = everything(model, optimizer, scaler)
    with pytest.raises(MemoryError), training_preserved(model, optimizer, scaler):
        step(model, optimizer, scaler)
        assert scaler.get_scale() == 8.0
        scaler.scale(model(torch.randn(2, 3, 8, 8)).sum()).backward()
        scaler.unscale_(optimizer)
        raise MemoryError
    assert everything(model, optimizer, scaler) == before
    scaler.scale(model(torch.randn(2, 3, 8, 8)).sum()).backward()
    scaler.unscale_(optimizer)


def test_others_are_back_schedulers_generators_and_further_modules():
    model, average = Net(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    generator = torch.Generator().manual_seed(1)
    before = everything(model, optimizer, None, scheduler), everything(average), bits(generator.get_state())
    with training_preserved(model, optimizer, None, scheduler, average, generator):
        step(model, optimizer)
        scheduler.step()
        average.weight.data.zero_()
        torch.rand(3, generator=generator)
    after = everything(model, optimizer, None, scheduler), everything(average), bits(generator.get_state())
    assert after == before


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = []

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls = state


def test_a_modules_extra_state_is_back():
    model = nn.Sequential(Counter())
    with training_preserved(model):
        model[0].calls.append(1)
    assert model[0].calls == []


def test_restore_may_be_called_for_each_of_several_trials():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    before = everything(model, optimizer)
    with training_preserved(model, optimizer) as state:
        for _ in range(3):
            step(model, optimizer)
            state.restore()
            assert everything(model, optimizer) == before
    assert everything(model, optimizer) == before


def test_what_the_block_moved_cast_or_replaced_is_back():
    model = Net()
    before = everything(model)
    with training_preserved(model):
        model.half()
        model.head.weight = nn.Parameter(torch.zeros(1))
    assert everything(model) == before
    with training_preserved(model):
        model.to(memory_format=torch.channels_last)
    assert everything(model) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.int8])
def test_any_dtype_and_memory_format(dtype):
    model = nn.Module()
    model.register_buffer("table", torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last).to(dtype))
    model.register_buffer("empty", torch.empty(0, 3, dtype=dtype))
    model.register_buffer("none", None)
    before = bits(model.state_dict())
    with training_preserved(model):
        model.table.zero_()
        model.none = torch.ones(1)
    assert bits(model.state_dict()) == before
    assert model.none is None


def test_not_a_number_keeps_its_bits():
    odd = torch.tensor([0x7FC12345, -1], dtype=torch.int32).view(torch.float32)
    model = nn.ParameterList([nn.Parameter(odd)])
    before = everything(model)
    with training_preserved(model):
        odd.zero_()
    assert everything(model) == before


def test_the_copy_does_not_count_as_memory_of_the_trial():
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with SimulatedMemory(None) as memory:
        TrainingState(model, optimizer)
        assert memory.peak_bytes < 1000


def test_nothing_warns():
    model = Net()
    model.register_buffer("derived", model.head.weight * 2)  # no leaf: asking for its .grad warns
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with training_preserved(model, torch.optim.AdamW(model.head.parameters()), torch.amp.GradScaler("cpu")):
            pass


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: TrainingState(lambda x: x), TypeError, "torch.nn.Module, not function"),
        (lambda: TrainingState(nn.LazyLinear(3)), ValueError, "run one batch"),
        (lambda: TrainingState(nn.Linear(2, 2), None, None, 3), TypeError, "int cannot be preserved"),
    ],
)
def test_what_cannot_be_preserved_is_said_before_the_block(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_sparse_gradient_is_named():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="dense"):
        TrainingState(table)


# Random numbers


def draw():
    return random.random(), np.random.rand(), torch.rand(2).tolist()


def test_random_numbers_go_on_where_they_were():
    with rng_preserved():
        expected = draw()
    with pytest.raises(KeyError), rng_preserved():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        draw()
        raise KeyError
    assert draw() == expected


def test_cuda_is_asked_only_where_it_runs(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: asked.append("get") or ["state 0", "state 1"])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: asked.append(states))
    with rng_preserved():
        pass
    assert asked == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with rng_preserved():
        assert asked == ["get"]
    assert asked == ["get", ["state 0", "state 1"]]
