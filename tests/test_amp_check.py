"""check_amp_loop names each planted fault, and lets every right way of writing the step pass (AMP-01, -02, -04)."""

import copy
import inspect
import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from course_utils import amp_trial
from course_utils.amp_check import FAULTS, check_amp_loop, reference_step
from course_utils.amp_faults import TOLERANCE
from course_utils.runtime import amp_dtype

SOURCE = inspect.getsource(reference_step)
LOSS = "scaler.scale(loss / len(micro_batches)).backward()  # outside autocast"
UNSCALE = "scaler.unscale_(optimizer)  # once, after the last backward and before the clipping"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
STEP = "scaler.step(optimizer)  # skips optimizer.step() if a gradient is inf or nan"
UPDATE = "scaler.update()  # and then lowers the scale"
MOVE = "if scaler.get_scale() >= scale:  # the step was taken\n        scheduler.step()"
ZERO = "optimizer.zero_grad()"
AUTOCAST = "torch.autocast(inputs.device.type, dtype=torch.float16)"
LOOP = SOURCE[SOURCE.index("for inputs") : SOURCE.index(f"    {UNSCALE}")]
TAIL = SOURCE[SOURCE.index(f"    {UNSCALE}") :]


def edited(*changes):
    """reference_step with pieces of its source replaced: (old, new) pairs, where each old text occurs once."""
    source = SOURCE
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = {"torch": torch, "nn": nn, "functional": functional}
    exec(compile(source, "<a learner's cell>", "exec"), names)
    return names["reference_step"]


MANUAL = """inverse = 1 / scaler.get_scale()
    for parameter in model.parameters():
        parameter.grad.mul_(inverse)"""
BY_HAND = """finite = all(parameter.grad.isfinite().all() for parameter in model.parameters())
    if finite:
        optimizer.step()
        scheduler.step()
    else:
        scaler.update(scaler.get_scale() / 2)"""
NORM_BY_HAND = """total = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad.mul_((max_norm / (total + 1e-6)).clamp(max=1.0))"""
HOOKED = f"hook = optimizer.register_step_post_hook(lambda *_: scheduler.step())\n    {STEP}\n    hook.remove()"
ONE_BACKWARD = """losses = []
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype=torch.float16):
            losses.append(functional.cross_entropy(model(inputs), targets))
    scaler.scale(sum(losses) / len(losses)).backward()
"""
WHOLE = """gradients = [0.0] * len(list(model.parameters()))
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype=torch.float16):
            loss = functional.cross_entropy(model(inputs), targets)
        parts = torch.autograd.grad(scaler.scale(loss), list(model.parameters()))
        gradients = [so_far + part / len(micro_batches) for so_far, part in zip(gradients, parts)]
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient
"""
DIVIDE_LATER = f"{UNSCALE}\n    for parameter in model.parameters():\n        parameter.grad /= len(micro_batches)"

RIGHT = {
    "the reference": [],
    "zeros are kept": [(ZERO, "optimizer.zero_grad(set_to_none=False)")],
    "model.zero_grad": [(ZERO, "model.zero_grad()")],
    "gradients cleared after the step": [(ZERO, ""), (UPDATE, UPDATE + "\n    optimizer.zero_grad()")],
    "clipped to the scaled norm": [(UNSCALE, ""), (CLIP, CLIP.replace("max_norm)", "max_norm * scaler.get_scale())"))],
    "unscaled and skipped by hand": [
        (UNSCALE, MANUAL),
        (STEP, BY_HAND),
        (UPDATE, ""),
        (MOVE, ""),
    ],
    "norm by hand": [(CLIP, NORM_BY_HAND)],
    "scheduler moved by a hook": [(STEP, HOOKED), (MOVE, "")],
    "scheduler asks the norm": [(CLIP, f"norm = {CLIP}"), (MOVE, "if norm.isfinite(): scheduler.step()")],
    "scheduler asks the scaler": [
        (UPDATE, f"inf = sum(it.item() for it in scaler._found_inf_per_device(optimizer).values())\n    {UPDATE}"),
        (MOVE, "if not inf: scheduler.step()"),
    ],
    "scheduler asks for a smaller scale": [(MOVE, "if not scaler.get_scale() < scale: scheduler.step()")],
    "divided after the unscaling": [(LOSS, "scaler.scale(loss).backward()"), (UNSCALE, DIVIDE_LATER)],
    "one backward for all": [(LOOP, ONE_BACKWARD)],
    "torch.autograd.grad": [(LOOP, WHOLE)],
    "the loss outside autocast": [
        ("loss = functional.cross_entropy(model(inputs), targets)", "outputs = model(inputs)"),
        (LOSS, f"loss = functional.cross_entropy(outputs, targets)\n        {LOSS}"),
    ],
    "float32 logits": [("model(inputs), targets)", "model(inputs).float(), targets)")],
    "sum over samples": [("targets)\n", "targets, reduction='sum') / len(targets)\n")],
    "a value is returned": [(MOVE, MOVE + "\n    return loss.item()")],
    "backward under autocast": [("        " + LOSS, "            " + LOSS)],
}

FAULTY = {
    "clip before unscale": [(UNSCALE, "")],
    "clip before unscale, in full": [(UNSCALE, CLIP), (f"    {CLIP}\n    scale =", f"    {UNSCALE}\n    scale =")],
    "double unscale": [(UNSCALE, f"{UNSCALE}\n    scaler.unscale_(optimizer)")],
    "double unscale, by hand": [(UNSCALE, UNSCALE + "\n    " + MANUAL)],
    "double unscale, in the loop": [(LOSS, f"{LOSS}\n        scaler.unscale_(optimizer)"), (UNSCALE, "")],
    "missing update": [(UPDATE, "")],
    "missing update, no unscale_": [(UPDATE, ""), (UNSCALE, ""), (CLIP, "")],
    "missing update, where skipped": [
        (UPDATE, "if optimizer.param_groups[0]['params'][0].grad.isfinite().all(): scaler.update()")
    ],
    "missing update, all by hand": [
        (UNSCALE, MANUAL),
        (STEP, BY_HAND.split("    else")[0]),
        (UPDATE, ""),
        (MOVE, ""),
    ],
    "update before step": [(STEP, UPDATE), (f"    {UPDATE}\n    if", f"    {STEP}\n    if")],
    "update before step, no unscale_": [(UNSCALE, "scaler.update()"), (UPDATE, "")],
    "unscaled backward": [(LOSS, "(loss / len(micro_batches)).backward()")],
    "unscaled backward, undivided": [(LOSS, "scaler.scale(loss); loss.backward()")],
    "undivided accumulation": [(LOSS, "scaler.scale(loss).backward()")],
    "divided twice": [(UNSCALE, DIVIDE_LATER)],
    "gradients cleared in the loop": [(ZERO, ""), (LOSS, f"{ZERO}\n        {LOSS}")],
    "gradients cleared in the loop, kept": [(LOSS, f"optimizer.zero_grad(set_to_none=False)\n        {LOSS}")],
    "gradients not cleared": [(ZERO, "")],
    "gradients cleared before the step": [(STEP, f"optimizer.zero_grad(set_to_none=False)\n    {STEP}")],
    "gradients cleared before the step, None": [(UNSCALE, f"model.zero_grad()\n    {UNSCALE}"), (CLIP, "")],
    "a step for each micro-batch": [
        (TAIL, ""),
        (LOSS, "\n        ".join([LOSS, "scaler.unscale_(optimizer)", CLIP, STEP, UPDATE, ZERO, "scheduler.step()"])),
    ],
    "a step for each micro-batch, one update": [
        (LOSS, "\n        ".join([LOSS, "scaler.unscale_(optimizer)", CLIP, STEP])),
        (f"    {UNSCALE}\n    {CLIP}\n", ""),
        (f"    {STEP}\n    {UPDATE}", f"    {UPDATE}"),
    ],
    "optimizer.step instead of scaler.step": [(STEP, "optimizer.step()")],
    "optimizer.step instead of scaler.step, no unscale_": [
        (UNSCALE, ""),
        (STEP, "optimizer.step()"),
        (UPDATE, ""),
        (MOVE, "scheduler.step()"),
    ],
    "optimizer.step instead of scaler.step, no checks": [(UNSCALE, ""), (STEP, "optimizer.step()")],
    "no backward": [(LOSS, "scaler.scale(loss)")],
    "no optimizer step": [(STEP, "")],
    "unscale after step": [(UNSCALE, ""), (CLIP, ""), (STEP, f"{STEP}\n    {UNSCALE}")],
    "clipping missing": [(CLIP, "")],
    "clipping missing, no scaler.step": [(CLIP, ""), (STEP, "optimizer.step()")],
    "clipping missing, too late": [(CLIP, ""), (STEP, f"{STEP}\n    {CLIP}")],
    "clipping changes the direction": [(CLIP, "nn.utils.clip_grad_value_(model.parameters(), max_norm)")],
    "clipping changes the direction, each": [
        (CLIP, "[nn.utils.clip_grad_norm_([it], max_norm) for it in model.parameters()]")
    ],
    "no autocast": [(AUTOCAST, "torch.enable_grad()")],
    "no autocast, of the inputs": [(AUTOCAST, "torch.autocast('cuda', dtype=torch.float16)")],
    "no autocast, no scaler": [
        (AUTOCAST, "torch.enable_grad()"),
        (LOSS, "(loss / len(micro_batches)).backward()"),
        (UNSCALE, ""),
        (STEP, "optimizer.step()"),
        (UPDATE, ""),
        (MOVE, "scheduler.step()"),
    ],
    "unscaled backward, no scaler": [
        (LOSS, "(loss / len(micro_batches)).backward()"),
        (UNSCALE, ""),
        (STEP, "optimizer.step()"),
        (UPDATE, ""),
        (MOVE, "scheduler.step()"),
    ],
    "autocast in bfloat16": [(AUTOCAST, "torch.autocast(inputs.device.type)")],
    "half-precision weights": [("model(inputs)", "model.half()(inputs.half())")],
    "scheduler steps on a skipped step": [(MOVE, "scheduler.step()")],
    "scheduler misses a step when the scale grows": [(">= scale", "== scale")],
    "missing scheduler step": [(MOVE, "")],
    "scheduler before the optimizer, in the loop": [(LOSS, f"{LOSS}\n        scheduler.step()"), (MOVE, "")],
    "scheduler steps more than once": [(MOVE, MOVE + "\n        scheduler.step()")],
    "scheduler before the optimizer": [(STEP, f"scheduler.step()\n    {STEP}"), (MOVE, "")],
    "overflow reaches the weights": [
        (STEP, "[it.data.sub_(it.grad, alpha=scheduler.get_last_lr()[0]) for it in model.parameters()]")
    ],
    "overflow not skipped": [
        (UNSCALE, "[it.grad.nan_to_num_(1.0, 1.0, 1.0) for it in model.parameters()]\n    " + UNSCALE)
    ],
    "does not end": [("loss = ", "while True: loss = ")],
    "wrong step": [(LOSS, "scaler.scale(scaler.scale(loss)).backward()")],
    "raises": [(CLIP, CLIP.replace("max_norm)", "max_norm, error_if_nonfinite=True)"))],
    "raises, a mistake": [(MOVE, "schedule.step()")],
    "raises, not a tensor": [(LOSS, "scaler.scale(loss.item()).backward()")],
}


@pytest.mark.parametrize("changes", RIGHT.values(), ids=RIGHT)
def test_a_right_step_passes_however_it_is_written(changes):
    verdict = check_amp_loop(edited(*changes))
    assert (verdict.ok, verdict.fault) == (True, None), verdict


@pytest.mark.parametrize(("name", "changes"), FAULTY.items(), ids=FAULTY)
def test_a_planted_fault_is_named(name, changes):
    verdict = check_amp_loop(edited(*changes))
    fault = name.split(",")[0]
    assert (verdict.ok, verdict.fault) == (False, fault), verdict
    assert verdict.sentence == FAULTS[fault]


def test_every_fault_has_a_planted_case():
    planted = {name.split(",")[0] for name in FAULTY}
    assert planted == set(FAULTS) - {"wrong arguments"}  # which has a test of its own


def test_the_scenarios_leave_room_on_both_sides():
    """No right way of writing the step may overflow where it should not, or not overflow where it should."""
    largest = torch.finfo(torch.float16).max
    calls = list(amp_trial.calls(reference_step))
    assert [(call.scenario.name, call.overflow) for call in calls if call.overflow] == [("overflow", True)]
    for call in calls:
        pieces = call.scenario.micro_batches
        scaled = call.gradient.abs().max().item() * call.scale_before
        if call.overflow:
            assert scaled > 100 * largest
        else:
            assert scaled * pieces < largest / 4
            assert call.relative_error < TOLERANCE / 20
        if call.scenario.name == "clipping":
            assert call.gradient.norm() > 4 * call.scenario.max_norm
        elif not call.overflow and call.scenario.max_norm > 1:
            assert call.gradient.norm() * call.scale_before * pieces < call.scenario.max_norm


def job(scale, enabled=True):
    """A model, optimizer, scaler, scheduler, and three micro-batches."""
    torch.manual_seed(1)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    batches = [(torch.randn(4, 5), torch.randint(3, (4,))) for _ in range(3)]
    return model, optimizer, scaler, scheduler, batches


def weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().double()


def test_clipping_scaled_gradients_shortens_the_step_by_the_scale():  # AMP-02
    lengths = {}
    for name, step in (("right", reference_step), ("wrong", edited((UNSCALE, "")))):
        arguments = job(scale=2.0**16)
        before = weights(arguments[0])
        step(*arguments, 0.1)
        lengths[name] = (weights(arguments[0]) - before).norm().item()
    assert lengths["right"] == pytest.approx(0.1, rel=1e-3)
    assert lengths["wrong"] == pytest.approx(0.1 / 65536, rel=0.1)  # near the last digit of a float32 weight

    verdict = check_amp_loop(edited((UNSCALE, "")))
    evidence = dict(verdict.evidence)
    assert evidence["where"].startswith("clipping: call 1")
    assert evidence["step expected"].startswith("length 0.1 x")
    assert "length 2.44e-05 x" in evidence["step taken"]
    assert "1/409" in evidence["step taken"]  # the scale, to the rounding of a float32 weight
    assert evidence["order of calls"].startswith("scale, backward, scaler.step")


def test_a_second_unscale_is_torchs_own_error():  # AMP-02
    verdict = check_amp_loop(edited(*FAULTY["double unscale"]))
    assert "RuntimeError: unscale_() has already been called" in dict(verdict.evidence)["error"]


def test_the_reference_also_works_with_a_disabled_scaler():
    arguments, twin = job(scale=4096.0, enabled=False), job(scale=4096.0)
    before = weights(arguments[0])
    reference_step(*arguments, 1e5)
    reference_step(*twin, 1e5)
    assert arguments[2].get_scale() == 1.0
    assert arguments[3].last_epoch == 1
    assert not torch.equal(weights(arguments[0]), before)
    assert torch.allclose(weights(arguments[0]), weights(twin[0]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("capability", "counted", "native", "dtype"),
    [((7, 0), True, False, torch.float16), ((7, 5), True, False, torch.float16), ((8, 0), True, True, torch.bfloat16)],
    ids=["V100", "T4", "A100"],
)
def test_emulated_bfloat16_is_not_chosen(monkeypatch, capability, counted, native, dtype):  # AMP-01
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Gpu", (), {"major": capability[0]}))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)
    assert torch.cuda.is_bf16_supported() is counted
    assert torch.cuda.is_bf16_supported(including_emulation=False) is native
    assert amp_dtype(capability) is dtype


def test_the_check_itself_warns_of_nothing():  # AMP-04
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdict = check_amp_loop(reference_step)
    assert verdict.ok
    assert "warning" not in dict(verdict.evidence)


def test_a_deprecated_entry_point_shows_in_the_evidence():  # AMP-04
    verdict = check_amp_loop(edited((AUTOCAST, "torch.cpu.amp.autocast(dtype=torch.float16)")))
    assert verdict.ok
    assert "torch.cpu.amp.autocast(args...)` is deprecated" in dict(verdict.evidence)["warning"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_the_name_cuda_is_no_help_on_a_cpu():  # AMP-04
    with pytest.warns(UserWarning, match="CUDA is not available"), torch.autocast("cuda", dtype=torch.float16):
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype is torch.float32
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert not torch.amp.GradScaler("cuda").is_enabled()
    with torch.autocast("cpu"):
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype is torch.bfloat16
    verdict = check_amp_loop(edited(*FAULTY["no autocast, of the inputs"]))
    assert dict(verdict.evidence)["layers ran in"] == "float32"
    assert "CUDA is not available" in dict(verdict.evidence)["warning"]


def test_backward_under_autocast_is_right_and_noted():
    assert "note" not in dict(check_amp_loop(reference_step).evidence)
    assert (
        "backward() ran under autocast"
        in dict(check_amp_loop(edited(*RIGHT["backward under autocast"])).evidence)["note"]
    )


def misspelt(model, optimizer, scaler, scheduler, micro_batches, max_norm):
    reference_step(model, optimizer, scaler, scheduler, micro_batches, max_norm)
    raise KeyError("<b>lr</b>")


def test_an_error_is_told_with_its_line():
    verdict = check_amp_loop(misspelt)
    evidence = dict(verdict.evidence)
    assert (verdict.ok, verdict.fault) == (False, "raises")
    assert evidence["error"] == "KeyError: '<b>lr</b>'"
    assert evidence["line"].endswith(': raise KeyError("<b>lr</b>")')
    assert "&lt;b&gt;lr" in verdict._repr_html_()
    assert "<b>" not in verdict._repr_html_()


def test_a_swallowed_error_is_still_a_fault():
    def quiet(*arguments):
        try:
            misspelt(None, *arguments[1:])
        except AttributeError:
            return

    assert not check_amp_loop(quiet).ok


@pytest.mark.parametrize("step", [lambda model, optimizer: None, lambda **settings: None], ids=["too few", "keywords"])
def test_the_arguments_are_fixed(step):
    verdict = check_amp_loop(step)
    assert (verdict.ok, verdict.fault) == (False, "wrong arguments")
    assert verdict.evidence[0][0] == "message"


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"Give the function itself, not NoneType: check_amp_loop\(step\)"):
        check_amp_loop(None)


def test_a_step_without_a_signature_is_run():
    class Bound:
        def __call__(self, *arguments):
            return reference_step(*arguments)

    assert check_amp_loop(Bound()).ok


def test_it_can_be_interrupted_and_leaves_the_random_state():
    def interrupted(*arguments):
        torch.rand(3), random.random()
        raise KeyboardInterrupt

    def drawing(*arguments):
        torch.rand(3), random.random()
        reference_step(*arguments)

    state = torch.get_rng_state(), random.getstate()
    with pytest.raises(KeyboardInterrupt):
        check_amp_loop(interrupted)
    assert check_amp_loop(drawing).ok
    assert check_amp_loop(edited((UPDATE, ""))).fault == "missing update"
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


def test_the_defaults_of_the_notebook_do_not_matter():
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert check_amp_loop(reference_step).ok
    finally:
        torch.set_default_dtype(kept)


def test_gradients_switched_off_are_the_steps_own_error():
    with torch.no_grad():
        verdict = check_amp_loop(reference_step)
    assert verdict.fault == "raises"
    assert "does not require grad" in dict(verdict.evidence)["error"]


def test_a_verdict_reads_well():
    verdict = check_amp_loop(reference_step)
    assert repr(verdict).startswith("Right: Every step")
    assert [what for what, _ in verdict.evidence] == [scenario.name for scenario in amp_trial.SCENARIOS]
    assert "1 skipped" in dict(verdict.evidence)["overflow"]
    wrong = check_amp_loop(edited(*FAULTY["scheduler steps on a skipped step"]))
    assert repr(wrong).startswith("Fault: scheduler steps on a skipped step: The scaler skipped")
    assert dict(wrong.evidence)["scheduler steps"] == "1, expected 0"
    assert dict(wrong.evidence)["scale"] == "8192 before, 4096 after"
    assert copy.copy(wrong) == wrong


def test_the_check_starts_no_cuda(monkeypatch):
    def start():
        raise AssertionError("CUDA was started")

    monkeypatch.setattr(torch.cuda, "_lazy_init", start)
    assert check_amp_loop(reference_step).ok
