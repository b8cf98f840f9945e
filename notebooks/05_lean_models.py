# ---
# jupyter:
#   accelerator: GPU
#   colab:
#     gpuType: T4
#     provenance: []
#     toc_visible: true
#   jupytext:
#     cell_metadata_filter: tags,cellView,jupyter,-all
#     notebook_metadata_filter: kernelspec,accelerator,colab,kaggle,-all
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kaggle:
#     accelerator: nvidiaTeslaT4
#     isGpuEnabled: true
#     isInternetEnabled: true
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · Leaner models
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/05_lean_models.ipynb) [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/your__account/gpu-utilisation-course/blob/main/notebooks/05_lean_models.ipynb)
#
# > What do AMP, channels_last, checkpointing and compile buy, alone and together?
#
# After this lesson you can
#
# - measure what each switch buys on your device, alone and together, and leave out what buys nothing;
# - write the mixed-precision step in the right order, and have it checked;
# - trade time for memory with checkpointing, and predict the memory before you try;
# - say when compiling pays, and how far your model is from the ceiling of your device.
#
# **Time**: 35 minutes to read and run, 25 minutes for the exercises. **Needs**: lesson 04. Every switch runs on a CPU
# too. What it buys there is often nothing, or less; the tables say so, and the text says what a GPU has for it.

# %% cellView="form" jupyter={"source_hidden": true} tags=["setup"]
# @title Setup: run this cell first. It makes `course_utils` importable and nothing else.
REPOSITORY, REF, VERSION, EXTRAS = "your__account/gpu-utilisation-course", "main", "0.1.0", ""


def _setup():
    import json, os, subprocess, sys  # noqa: E401
    from importlib import invalidate_caches, metadata
    from pathlib import Path

    url, folders = f"https://github.com/{REPOSITORY}", [Path.cwd(), *Path.cwd().parents]
    hosted = "COLAB_RELEASE_TAG" in os.environ or "KAGGLE_KERNEL_RUN_TYPE" in os.environ
    clone = [str(f) for f in folders if (f / "course_utils/__init__.py").is_file() and (f / "notebooks").is_dir()][:1]
    package = next(iter(metadata.distributions(name="course-utils")), None)
    origin = json.loads((package and package.read_text("direct_url.json")) or "{}")
    ours = (origin.get("url"), origin.get("vcs_info", {}).get("requested_revision")) == (url, REF)
    install = not clone and not (package and package.version == VERSION and (ours or not hosted))
    if install and "__" in REPOSITORY:
        raise RuntimeError(f"{REPOSITORY} is not published yet: use `make lab`, or `python -m tools.publish` first.")
    if install and not hosted:
        raise RuntimeError(f"course_utils is not here: run `git clone {url}` and, in its folder, `make lab`.")
    if install:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-input", "--no-deps", "--force-reinstall"]
        pip += ["--disable-pip-version-check", f"course-utils @ git+{url}@{REF}"]
        env = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        try:
            subprocess.run(pip, check=True, capture_output=True, text=True, env=env)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(
                f"Could not install course_utils from {url} at {REF}. If this runtime is offline, connect it "
                f"(Kaggle: Settings → Internet on) and run this cell again. pip said:\n{error.stderr[-900:].strip()}"
            ) from None
    sys.path[:0] = {*clone} - {*sys.path}
    if install or getattr(sys.modules.get("course_utils"), "__version__", VERSION) != VERSION:
        for name in [name for name in sys.modules if name.partition(".")[0] == "course_utils"]:
            del sys.modules[name]  # an older copy, loaded before this cell ran
        invalidate_caches()
    import course_utils

    found = getattr(course_utils, "__version__", "none")
    if found != VERSION:
        raise RuntimeError(
            f"This notebook needs course_utils {VERSION}, but {list(course_utils.__path__)[0]} holds version {found}: "
            "bring both to one version (in a clone: `git pull`; else open the notebook from its badge again)."
        )
    from course_utils.setup import prepare

    print(prepare(EXTRAS, install=hosted))


_setup()

# %%
import inspect

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from course_utils import amp_check, checkpointing, flops, lean, memory_model, oom, plots, progress
from course_utils import roofline, runtime, workload
from course_utils.exercises import lesson05
from course_utils.views import mebibytes

# %%
my_progress = progress.resume("")  # the code from the end of lesson 04, between the quotes
machine = runtime.describe_runtime()
device = runtime.pick_device()
on_gpu = device.type == "cuda"
print(machine.headline)
if machine.advice:
    print(machine.advice)

# %% [markdown]
# ## 1. The step, and its switches
#
# The job is the course's own, without the loading: the small ResNet, and four batches of photographs that lie on the
# device already. So only the model's work counts. This is the step that runs:

# %%
job = lean.image_job(device)
print(job)
print(inspect.getsource(lean.Training.step))

# %% [markdown]
# A **switch** changes one thing about it. As it comes, autocast is off, the scaler does nothing, the optimizer is AdamW
# as PyTorch makes it, and the loss is read after every step. Each function below is a switch. It gets the `training`
# before it begins, and in it is the line of your own code.

# %%
def amp(training):  # matrix products and convolutions in 16 bits: section 4
    training.autocast_dtype = workload.low_precision(device)
    half = training.autocast_dtype == torch.float16
    training.scaler = torch.amp.GradScaler(device.type, enabled=half)


def channels_last(training):  # the colours of a pixel side by side in memory: weights and images
    training.model.to(memory_format=torch.channels_last)
    training.memory_format = torch.channels_last


def fused(training):  # the whole AdamW update in one kernel
    training.make_optimizer = lambda weights: torch.optim.AdamW(weights, lr=1e-3, fused=True)


# %%
def fewer_syncs(training):  # each .item() makes the CPU wait for the GPU: only every 50 steps
    training.item_every = 50


def keep_zeros(training):  # zero_grad() as before PyTorch 2.0: write zeros, drop nothing
    training.set_to_none = False


def checkpointed(training):  # each block computes its activations twice: section 5
    checkpointing.checkpoint_blocks(training.model)


def smaller(training):  # the same architecture, half as wide: another model
    training.model = training.make_model(training.width // 2)


# %% [markdown]
# ## 2. Predict, then measure
#
# Lesson 04 predicted memory from shapes. It does so for each switch:

# %%
def predicted(switch):
    """The predicted peak of one step of the job with this switch."""
    training, n = job.training(), job.batch_size
    switch(training)
    return memory_model.predict_memory(
        training.model, job.batches[0], job.loss, torch.optim.AdamW, batch_sizes=(n, 2 * n),
        autocast=training.autocast_dtype, set_to_none=training.set_to_none,
    ).at(n).peak_bytes


peaks = {"baseline": predicted(lambda training: None)}
for switch in (amp, keep_zeros, checkpointed):
    peaks[switch.__name__] = predicted(switch)
for name, peak in peaks.items():
    print(f"{name:13} {mebibytes(peak)}")

# %% [markdown]
# `keep_zeros` keeps the gradients through the forward pass. `fused` and `fewer_syncs` hold the same tensors as the
# baseline. `channels_last` adds a copy of the batch. A compiled model may hold less: what it computes in one kernel
# needs no results in between. (A **kernel** is one program that runs on the device, such as a convolution.)
#
# **Predict first**: which switch makes the job fastest on this device, and how many times as fast is it? On Colab the
# next cell may take some minutes, because it compiles on two CPU threads.

# %%
my_guess_switch, my_guess_times = "amp", 2.0

switches = {
    "amp": amp, "channels_last": channels_last, "fused": fused, "fewer_syncs": fewer_syncs,
    "keep_zeros": keep_zeros, "checkpointed": checkpointed, "smaller": smaller,
    "compiled": lean.compiled,
}
skip = {} if on_gpu else {"compiled": "it took 64 s on two CPU cores: see section 6"}
result = lean.ablate(switches, job, skip=skip, budget_s=30 if on_gpu else 9)
result

# %% [markdown]
# This is an **ablation**: each switch alone, then those that gained together. The runs take turns, so that a machine
# that slows down for a while slows all of them. A switch counts as *faster* when it was so in every round (in all but
# one, from eight rounds on), and by 2 % at least. Anything else is noise, and buys nothing that you could see.
#
# *Loss difference* is the largest distance from the baseline's loss curve, over the first 20 steps at most, as a share
# of the largest loss. A switch that changes no arithmetic gives 0 on a CPU; a GPU may add in another order each time.
# With float16 the scaler may skip the first steps, and the curve then lags. `smaller` is another model: its curve
# differs by nature.

# %%
result.draw()

# %%
gains = [row for row in result.rows if row.name in switches and row.gained]
best = max(gains, key=lambda row: row.speedup, default=result.baseline)
print(f"fastest alone: {best.name}, {best.verdict}")
print(f"you guessed {my_guess_switch}, {my_guess_times} ×")
for name, peak in peaks.items():
    measured = result.row(name).peak_bytes  # None if that run failed
    off = f"predicted {peak / measured - 1:+.1%}" if measured else "nothing to compare with"
    print(f"{name:13} measured {mebibytes(measured)}, {off}")

# %% [markdown]
# On a CPU the prediction should be within 3 %. On a GPU it lies lower: cuDNN's scratch memory is not in it, and
# autocast's list of operations is a little another one there. Are the loss curves the same? Rounding differences grow
# from step to step. With 16 bits a difference of 5 % is allowed here, for the rest 1 %:

# %%
for name in switches:
    row = result.row(name)
    allowed = 0.05 if name == "amp" else 0.01
    if row.loss_difference is not None and name != "smaller":
        same = "the same curve" if row.loss_difference <= allowed else "ANOTHER CURVE"
        print(f"{name:13} {row.loss_difference:.2%} of {allowed:.0%} allowed: {same}")

# %% [markdown]
# ## 3. Why
#
# | switch | what the hardware does with it | where it pays |
# |---|---|---|
# | `amp` | Tensor cores multiply 16-bit numbers several times as fast as float32, and half the bytes move. | GPUs from compute capability 7.0 on. On a CPU only where it has 16-bit instructions (AMX, AVX-512 BF16); others emulate them, many times slower. |
# | `channels_last` | Tensor cores want the channels side by side; without it cuDNN transposes. | With float16 convolutions on a GPU; a CPU's library, oneDNN, may gain too. In float32 on a GPU mostly nothing. |
# | `fused` | One kernel for the whole update. The default on a GPU is `foreach`: one kernel for each operation on all weights; on a CPU a loop over the weights. | Many small weights, small batches. |
# | `fewer_syncs` | The CPU runs ahead and keeps the GPU's queue full. | Only on a GPU, and only where steps are short. With float16 the scaler reads one number a step anyway, unless the optimizer is `fused`. |
# | `keep_zeros` | Writes zeros, then adds to them. Dropping saves both. | Never: it is here to show what PyTorch's default saves. |
# | `checkpointed` | Computes the blocks' forward pass twice. | It costs time. It pays when the memory buys something. |
# | `smaller` | Half the channels is about a quarter of the arithmetic. | Everywhere, if the model is still good enough: section 9. |
#
# Two gains need not add up: two switches may remove the same waste, and one may need the other, as `fewer_syncs` needs
# `fused` with float16. That is why combinations are measured, too.
#
# One more is often named: TF32. It lets tensor cores round float32 products to 10 bits of mantissa, and needs compute
# capability 8.0: an A100 has it, a T4 does not. `torch.set_float32_matmul_precision("high")` asks for it in matrix
# products. Convolutions have it by default (`torch.backends.cudnn.allow_tf32`): on such a GPU the float32 baseline
# above used it already.
#
# ## 4. Mixed precision, in full
#
# **Automatic mixed precision** (AMP) runs matrix products and convolutions in a 16-bit format and leaves what needs
# care, such as sums and losses, in float32. Weights, their gradients and the optimizer state stay float32. Two formats
# have 16 bits:

# %%
for dtype in (torch.float16, torch.bfloat16):
    info = torch.finfo(dtype)
    print(f"{dtype}: largest {info.max:.3g}, smallest above 0 {info.tiny * info.eps:.1e},",
          f"next above 1: 1 + {info.eps:.1e}")

# %% [markdown]
# float16 is finer, bfloat16 reaches as far as float32. A GPU computes bfloat16 natively from compute capability 8.0 on.
# A T4 has 7.5: it takes float16. Ask `torch.cuda.is_bf16_supported(including_emulation=False)`: without the argument it
# counts emulation, and a T4 says yes.
#
# **Predict first**: which of these gradients become 0 in float16?

# %%
my_guess_zero = "none"

for gradient in (1e-3, 1e-5, 1e-7, 1e-9):
    small, scaled = (torch.tensor(gradient * factor, dtype=torch.float16) for factor in (1, 65536))
    back = scaled.float() / 65536
    print(f"{gradient:.0e} in float16: {small.item():.1e};",
          f"times 65536, and back in float32: {back.item():.1e}")
print("you guessed:", my_guess_zero)

# %% [markdown]
# That is what the **GradScaler** is for. It multiplies the loss, and so every gradient, by a large *scale*. The
# gradients are divided by it before the optimizer uses them. Where one overflows to infinity, the scaler skips the step
# and halves the scale. bfloat16 needs no scaler.
#
# Clipping must come *after* that division. **Predict first**: the gradient below has norm 158. The limit is one, and so
# is the learning rate. How long is the step if you clip before `unscale_`?

# %%
my_guess_length = 1.0


def step_length(unscale_first):
    """How far one step goes, clipped to 1 with a learning rate of 1."""
    weight = torch.nn.Parameter(torch.zeros(1000, device=device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=65536.0)
    scaler.scale((5 * weight).sum()).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    return weight.detach().norm().item()


print(f"unscale, then clip: {step_length(True):.3g}. Clip, then unscale: {step_length(False):.3g}")
print("you guessed", my_guess_length)

# %% [markdown]
# ### The step in full
#
# With clipping, accumulation and a learning-rate schedule there are seven lines in one right order. This is it:

# %%
print(inspect.getsource(amp_check.reference_step))

# %% [markdown]
# Every line has its way to go wrong, and most of them raise no error: the loss curve is only worse. So the course runs
# a step against the known faults. It needs no GPU. **Predict first**: what is wrong here?

# %%
def suspicious_step(model, optimizer, scaler, scheduler, micro_batches, max_norm):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype=torch.float16):
            loss = functional.cross_entropy(model(inputs), targets) / len(micro_batches)
        scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()


amp_check.check_amp_loop(suspicious_step)

# %% [markdown]
# Mend that line, run the cell again, and it names the next fault. A second `unscale_` before `update()` raises an
# error; a schedule that moves on a skipped step is over too early; and `get_scale()` reads a number from the GPU, so it
# waits. The step of section 1 has neither clipping nor a schedule, so its three scaler lines are enough. These are the
# faults that are known:

# %%
print(*amp_check.FAULTS, sep="; ")

# %% [markdown]
# ## 5. Checkpointing: time for memory
#
# The forward pass keeps activations for the backward pass. **Checkpointing** a block keeps only its input; the backward
# pass runs the block's forward once more. In your own model it is one line in `forward`:
#
# ```python
# x = checkpoint(self.block, x, use_reentrant=False)
# ```
#
# Always write `use_reentrant=False`. The old variant needs an input that requires a gradient, and without one the
# block's weights get none.
#
# **Predict first**: the block below has BatchNorm, which counts the batches that it has seen. What does it say after
# one training step with checkpointing?

# %%
my_guess_count = 1

pixels, classes = job.batches[0]
for name in ("plain", "checkpointed", "corrected"):
    torch.manual_seed(0)
    block, head = workload.small_resnet(10, 16)[:5].to(device), torch.nn.Linear(16, 10).to(device)
    norm = block[4].main[1]  # the first BatchNorm of the residual block
    if name == "plain":
        features = block(pixels)
    elif name == "checkpointed":
        features = checkpoint(block, pixels, use_reentrant=False)
    else:
        checkpointing.correct_batchnorm(checkpointing.checkpoint_blocks(block))
        features = block(pixels)
    functional.cross_entropy(head(features.mean((2, 3))), classes).backward()
    mean = norm.running_mean.norm().item()
    print(f"{name:13} batches {norm.num_batches_tracked.item()}, running mean {mean:.4f}")
print("you guessed", my_guess_count)

# %% [markdown]
# The gradients are the same, the running statistics are not: the recomputing pass updates them a second time, with the
# same batch. A model in eval mode uses these statistics. `checkpointing.correct_batchnorm` lets the second pass work on
# copies. (Where you cannot do that, a momentum of 1 − √(1 − m) in place of m makes two updates worth one.)
#
# **What does it buy?** Here is a small transformer. **Predict first**: with its blocks checkpointed, how many times as
# many sequences fit into the same memory, and how much arithmetic comes on top?

# %%
my_guess_fit, my_guess_extra_percent = 2.0, 100

text = lean.transformer_job(device)
plain, twin = (text.training().model for _ in range(2))
checkpointing.checkpoint_blocks(twin, text.block)
models, needs, counts = {"plain": plain, "checkpointed": twin}, {}, {}
for name, model in models.items():
    line = memory_model.predict_memory(
        model, text.batches[0], text.loss, torch.optim.AdamW, batch_sizes=(64, 128)
    )
    needs[name] = line.per_sample_bytes
    counts[name] = flops.count_flops(model, text.batches[0], text.loss)
    per_sequence = counts[name].hardware_flops / text.batch_size
    print(f"{name:13} {needs[name] / 1024:,.0f} KiB and {per_sequence / 1e6:,.0f} MFLOP a sequence")

# %%
fit = needs["plain"] / needs["checkpointed"]
extra = 100 * (counts["checkpointed"].hardware_flops / counts["plain"].hardware_flops - 1)
print(f"{fit:.1f} times as many fit; {extra:.0f} % more arithmetic")
print(f"you guessed {my_guess_fit} times and {my_guess_extra_percent} %")

# %% [markdown]
# A forward pass is a third of a step's arithmetic, so checkpointing adds a third at most. Here it is less: the output
# layer is in no block, and PyTorch ends the second pass as soon as it has all that the backward pass needs. It pays
# when the memory that it frees buys a batch nearer the knee (lesson 04), or lets the model run at all. The small ResNet
# gained little in section 2: its largest activations are in its first layers, outside the blocks.
#
# ## 6. Compiling
#
# `torch.compile` turns the model into fewer, larger kernels: operations that work number by number join, and their
# results stay on the chip instead of travelling to memory and back. On a GPU it writes Triton kernels, on a CPU C++.
# The first step pays for that: it compiles. A new shape, such as the shorter last batch of an epoch, may compile again
# (`drop_last=True` prevents that).
#
# The transformer's blocks are alike, so compiling each block (**regional compilation**) compiles one and uses it for
# all. (On a CPU, whose compiler is slow, only the part of a block that works on each token by itself. The cell takes
# about half a minute there, some minutes on Colab.) **Predict first**: after how many steps has compiling paid for
# itself?

# %%
my_guess_steps = 100


def compiled_blocks(training):
    for block in training.model.blocks:
        if on_gpu:
            block.compile()
        else:
            block.mlp = torch.compile(block.mlp)


more = {"amp": amp, "fused": fused, "checkpointed": lean.checkpointed}
more["compiled_blocks"] = compiled_blocks
on_text = lean.ablate(more, text, budget_s=30 if on_gpu else 4)
on_text

# %%
on_text.draw()

# %%
row = on_text.row("compiled_blocks")
print(row.verdict)
print(f"compiling: {row.compiling}; you guessed {my_guess_steps} steps")

# %% [markdown]
# The break-even step is compile time ÷ (time of a plain step − time of a compiled one). Where the compiled step is no
# faster, it is *never*. The course measures it with an empty cache; a second run of your own script compiles faster,
# because PyTorch keeps what it compiled on disk.
#
# Compiling the whole ResNet took 64 s on two CPU cores with torch 2.14.1, and 113 s with torch 2.11.0 (AMD EPYC,
# 2026-11-30), for steps that took 0.86 and 1.15 times as long as before: so section 2 leaves it out on a CPU. On a T4,
# "Not enough SMs to use max_autotune_gemm" is no error: that mode wants 68 multiprocessors, and a T4 has 40. Two more
# leads on a T4, not measured here: Triton from 3.3 on computes matrix products below compute capability 8.0 without
# tensor cores ([triton#5066](https://github.com/triton-lang/triton/pull/5066)), and FlashAttention-2 does not support
# it ([flash-attention#542](https://github.com/Dao-AILab/flash-attention/issues/542)); `scaled_dot_product_attention`,
# as in this transformer, takes its memory-efficient kernel there.
#
# ## 7. Without gradients
#
# Evaluation needs no backward pass, so nothing has to be kept for one. **Predict first**: which share of the memory
# does `inference_mode` save in a forward pass?

# %%
my_guess_saved_percent = 50

evaluated = job.training().model.eval()
inference = {"gradients on": torch.enable_grad, "no_grad": torch.no_grad}
inference["inference_mode"] = torch.inference_mode
held = {}
for name, context in inference.items():
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with oom.SimulatedMemory(None) as counted, context():
        evaluated(pixels)
    held[name] = torch.cuda.max_memory_allocated(device) - before if on_gpu else counted.peak_bytes
    print(f"{name:15} {mebibytes(held[name])} on top of the weights and the batch")
saved = 100 * (1 - held["inference_mode"] / held["gradients on"])
print(f"saved {saved:.0f} %; you guessed {my_guess_saved_percent} %")

# %% [markdown]
# `inference_mode` keeps no more than `no_grad`; it also leaves out PyTorch's own bookkeeping for each tensor, and its
# results cannot take part in a backward pass, unless you clone them. Both only stop the recording. `model.eval()` is
# another matter: it switches dropout and BatchNorm. For an evaluation you want both.
#
# ## 8. How far from the ceiling
#
# A faster step is possible as long as the device is not at one of two limits: its arithmetic, or its memory traffic.
# The arithmetic of the step can be counted, from shapes alone:

# %%
count = flops.count_flops(job.training().model, job.batches[0], job.loss)
count

# %% [markdown]
# The **ceiling** is what the device reaches in a plain matrix product, and in copying. Both are measured now. **Predict
# first**: which share of the arithmetic that this device can do does the baseline reach?

# %%
my_guess_mfu_percent = 50

roof = roofline.roofline(device)
step_s = job.batch_size / result.baseline.samples_per_s
used = flops.utilisation(count, step_s, roof.peak)
used

# %% [markdown]
# That share is the **MFU**, *model FLOPs utilisation*. **HFU**, *hardware FLOPs utilisation*, also counts what
# checkpointing computes again. Say which peak stands under the fraction. A T4's datasheet promises 65 TFLOPS in
# float16; one that was measured sustained about 24 in a large matrix product, which was put down to its 70 W
# ([source](https://forums.developer.nvidia.com/t/264462)). Against the datasheet such a card can never look good. The
# baseline here is float32, for which the datasheet says 8.1. With 16 bits both figures are others. (A CPU without
# 16-bit instructions emulates both; there the share may pass 100 %.)

# %%
with_amp = result.row("amp").samples_per_s
half_peak = roofline.matmul_peak(device, workload.low_precision(device))
print(half_peak)
print(flops.utilisation(count, job.batch_size / with_amp, half_peak) if with_amp else "amp did not run")

# %% [markdown]
# The other limit is memory. The **roofline** draws both: arithmetic as the flat part, memory as the slope; they meet at
# the *ridge*.

# %%
moved = flops.bytes_moved(job.training().model, job.batches[0], job.loss)
print(moved)
roof.draw({"one training step": (count.hardware_flops, moved.unfused_bytes, step_s)})

# %% [markdown]
# To the left of the ridge a program waits for memory, to the right for arithmetic. How far right it stands is its
# *intensity*, operations for each byte moved. The bytes are counted as if every operation read its inputs from memory
# and wrote its result back. Some come from a cache, so a point may lie above the slope. Fusing saves such traffic, so
# `torch.compile` moves the point to the right. (The time includes the optimizer, the two counts do not.) A point far
# below the roof is held up by something else: kernels too small to fill the device, gaps between them, or, on the CPU,
# shapes that suit the library badly.
#
# ## 9. In the training job
#
# Now the switches that gained here, in the real job with its loader. The recipe has a knob for each.

# %%
knobs = {
    "amp": {"precision": "amp"}, "channels_last": {"channels_last": True},
    "fused": {"optimizer": "fused"}, "fewer_syncs": {"item_every": 50}, "compiled": {"compile": True},
}
fed = workload.Recipe(cache="ram", augment="batch", item_every=10)
fed = fed.but(batch_size=256 if on_gpu else 96)  # better: your own knee, from lesson 04
lean_recipe = fed
gained = [name for name in knobs if result.row(name).gained]
for name in gained:
    lean_recipe = lean_recipe.but(**knobs[name])
print("gained:", ", ".join(gained) or "nothing")

# %%
recipes = {"fed (lessons 03, 04)": fed, "lean": lean_recipe}
recipes["lean, half as wide"] = lean_recipe.but(width=job.width // 2)
seconds = None if on_gpu else 2
runs = {name: workload.train(recipe, seconds=seconds) for name, recipe in recipes.items()}
for name, run in runs.items():
    print(f"{name:21} {run.samples_per_s:7,.0f} samples/s, {run.steps} steps, loss {run.loss_end:.2f}")

# %%
alt = "The training job: fed, lean, and lean with a model half as wide."
fig, ax = plots.figure(alt, height_in=2.4)
rates = [run.samples_per_s for run in runs.values()]
plots.bars(ax, list(runs), rates, "samples/s", title="Throughput")
plots.show(fig)

# %% [markdown]
# If nothing gained here, *lean* is the same recipe as *fed*, and the difference between the two bars is noise. That is
# a result, too: on this device these switches have nothing to give, and the next second is won elsewhere.
#
# The half-wide model is another matter. All three were measured for the same time, so compare their losses: a smaller
# model learns less from each image, and sees more images. A few seconds on a CPU say nothing yet. Which is better for
# your task, held-out data says, after a run of a useful length:
#
# ```python
# model = workload.small_resnet(10, job.width // 2)
# workload.train(lean_recipe, model=model, seconds=300)
# workload.accuracy(model)
# ```
#
# ## 10. Myths
#
# | What is said | What is true | Seen in |
# |---|---|---|
# | "AMP is always faster." | Where the device computes in 16 bits by nature, and the products are large enough. Elsewhere it is emulated. | section 2 |
# | "`is_bf16_supported()` is True, so use bfloat16." | True on a T4 by emulation. From compute capability 8.0 on it is native. | section 4 |
# | "channels_last is free speed." | It pays for float16 convolutions on tensor cores. Elsewhere measure. | sections 2, 3 |
# | "`torch.compile` makes everything faster." | After its break-even step, if there is one. | section 6 |
# | "Checkpointing makes training leaner and faster." | Leaner, and slower: a forward pass more. | section 5 |
# | "Checkpointing changes nothing but memory." | BatchNorm's statistics are updated twice. | section 5 |
# | "A T4 gives 65 TFLOPS." | On the datasheet. Compare with the product measured in the same run. | section 8 |
# | "Clipping before `unscale_` is about the same." | The step is shorter by the scale, 65,536 times. | section 4 |
#
# ## 11. Exercises
#
# ### Exercise 1: the mixed-precision step
#
# Without scrolling up. The loss is `functional.cross_entropy`, clipping is `torch.nn.utils.clip_grad_norm_`. All
# micro-batches are equally large.

# %% tags=["exercise:amp"]
def amp_step(model, optimizer, scaler, scheduler, micro_batches, max_norm):
    """Do one optimizer step on all `micro_batches`, in float16 autocast; return "stepped" or "skipped"."""
    ...


lesson05.amp.check(amp_step)

# %%
lesson05.amp.panel()

# %% [markdown]
# ### Exercise 2: does compiling pay?
#
# `compile_s` is spent once. Then a step takes `compiled_s` in place of `eager_s`.

# %% tags=["exercise:pays"]
def compile_pays(compile_s, eager_s, compiled_s, steps):
    """Return whether a run of `steps` steps ends earlier with compilation. All times in seconds."""
    ...


lesson05.pays.check(compile_pays)

# %%
lesson05.pays.panel()

# %% [markdown]
# ### Exercise 3: a leaner step, measured
#
# This step leaves the right weights and returns the right two numbers, and wastes time in several ways. (It also
# updates BatchNorm's statistics three times: section 5.)

# %%
print(inspect.getsource(lesson05.slow_step))

# %% [markdown]
# Write one that leaves the same weights and returns the same two numbers, and is 1.25 times as fast, measured here and
# now. Precision and model stay as they are.

# %% tags=["exercise:leaner"]
def lean_step(model, optimizer, images, labels):
    """Do what `slow_step` does, with less work; return loss and accuracy as detached tensors."""
    ...


lesson05.leaner.check(lean_step)

# %%
lesson05.leaner.panel()

# %% [markdown]
# ## The new row
#
# Row 5 is what gained here. It replaces an older one of this lesson; row 4 stays what your code says. Copy the code:
# lesson 06 will ask for it.

# %%
if not any(row.lesson == 4 for row in my_progress.board.rows):
    my_progress.add(runs["fed (lessons 03, 04)"].as_row(4, "batch_size: fed, larger batch"))
my_progress.add(runs["lean"].as_row(5, "lean_models: what gained here"))
my_progress.board.draw()

# %%
my_progress.show()

# %% [markdown]
# ## Key points
#
# - Measure each switch alone and together, on your device, against its noise. "No gain" is an answer.
# - AMP: the dtype that the device has by nature. float16 needs the scaler: scale, backward, unscale, clip, step,
#   update.
# - Checkpointing buys memory with up to a third more arithmetic, and BatchNorm must count once.
# - Compiling is an investment with a break-even step. MFU says how much a faster step could still gain.
#
# **Next lesson**: 06 · Let Lightning run the loop
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/06_lightning.ipynb)
#
# ## Further reading
#
# - [PyTorch's AMP examples](https://docs.pytorch.org/docs/stable/notes/amp_examples.html): the step with several models, losses and optimizers.
# - [Mixed Precision Training](https://arxiv.org/abs/1710.03740), Micikevicius et al. 2017: where loss scaling comes from.
# - [Roofline](https://doi.org/10.1145/1498765.1498785), Williams, Waterman and Patterson 2009.
# - [Regional compilation](https://docs.pytorch.org/tutorials/recipes/regional_compilation.html).
