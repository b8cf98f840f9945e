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
# # 07 · Clear the cache
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/07_clear_cache.ipynb) [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/your__account/gpu-utilisation-course/blob/main/notebooks/07_clear_cache.ipynb)
#
# > Who holds the memory, and what does `empty_cache` really do?
#
# After this lesson you can
#
# - read a device's memory as one sum: allocated, cached, context, other processes;
# - predict what `del`, `gc.collect()` and `empty_cache()` change, and what not;
# - find who keeps a model alive in a notebook, and really free it;
# - recover from an out-of-memory error without a restart, and tell too little memory from memory in pieces;
# - say when emptying the cache is right, and show that it makes no loop faster.
#
# **Time**: 30 minutes to read and run, 25 minutes for the exercises. **Needs**: lesson 04. Without a GPU there is no
# cache to look at: tensors' lifetimes are real, the allocator is simulated, and GPU-only cells say what they would
# show.

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
import gc
import sys
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from IPython import get_ipython
from torch.nn import functional

from course_utils import cache, monitor, oom, plots, progress, runtime, workload
from course_utils.exercises import lesson07
from course_utils.views import mebibytes, number

MIB = 2**20

# %%
my_progress = progress.resume("")  # the code from the end of lesson 06, between the quotes
machine = runtime.describe_runtime()
device = runtime.pick_device()
on_gpu = device.type == "cuda"
print(machine.headline)
if machine.advice:
    print(machine.advice)

# %% [markdown]
# ## 1. One sum
#
# PyTorch does not ask the driver for each tensor: that is slow, and to take memory back the driver waits until the GPU
# has done its work. PyTorch's **caching allocator** takes large segments, cuts tensors out of them, and keeps what they
# free for the next ones. Memory can therefore be in three states:
#
# - **allocated**: living tensors;
# - **reserved**: what PyTorch has from the driver, allocated or *cached*;
# - **used**: what the driver has given to anybody. That is about what `nvidia-smi` shows.
#
# > used = allocated + cached + CUDA contexts + other processes
#
# **Predict first**: `nvidia-smi` shows 1,167 MiB. A tensor of 61 MiB is deleted and the cache emptied. What does it
# show now? (Segments come in whole blocks of 2 MiB.)

# %%
my_guess_smi_mib = 0

example = cache.MemoryReport(  # as posted in pytorch/pytorch#60150
    "cuda:0, an example", allocated_bytes=0, reserved_bytes=0, used_bytes=1105 * MIB
)
print(example.identity)
print("you guessed", my_guess_smi_mib)

# %% [markdown]
# The rest stays: the **CUDA context**, that is the driver's own data, loaded kernels, and what the libraries cuBLAS and
# cuDNN keep. It goes when the process ends, and not before. Nobody gets `nvidia-smi` to 0 from inside a notebook. Now
# yours:

# %%
torch.zeros(1, device=device)  # on a GPU this starts CUDA, and with it the context
cache.memory_report(device)

# %% [markdown]
# ## 2. What each act changes
#
# A tensor of 64 MiB, a *view* of its corner (a tensor that uses the same memory), and the acts that are said to free
# memory.
#
# **Predict first**: for each act, by how many MiB does the memory of living tensors change? (On a GPU that is
# *allocated*.)

# %%
my_guess_mib = {"del big": -64, "empty_cache()": 0, "del corner": 0, "empty_cache() again": 0}

effects = cache.Effects(device)
with effects.of("big = ones(16 Mi)"):
    big = torch.ones(16 * MIB, device=device)
with effects.of("corner = big[:1]"):
    corner = big[:1]
with effects.of("del big"):
    del big
with effects.of("empty_cache()"):
    torch.cuda.empty_cache()  # without a GPU it does nothing
with effects.of("del corner"):
    del corner
with effects.of("empty_cache() again"):
    torch.cuda.empty_cache()
effects

# %%
living = "allocated_bytes" if on_gpu else "tensor_bytes"
for act, guess in my_guess_mib.items():
    print(f"{act:20} {effects[act].change(living) / MIB:+4.0f} MiB, you guessed {guess:+}")
if not on_gpu:
    print("On a CPU there is no such cache: a tensor of this size leaves the process at once.")

# %% [markdown]
# `del` deletes a **name**. The memory goes when nothing refers to it any more: here the view still did. On a GPU it
# then is *cached*: reserved does not change. `empty_cache()` gives cached memory back to the driver, and touches no
# living tensor.
#
# `gc.collect()` is for one case only: objects that refer to each other in a circle. **Predict first**: is the tensor
# alive after `del trainer`?

# %%
my_guess_alive = True

gc.disable()  # so that Python does not collect by itself just now
trainer = SimpleNamespace(weights=torch.ones(MIB, device=device))
trainer.callback = SimpleNamespace(trainer=trainer)  # a circle, as frameworks like to have
alive = weakref.ref(trainer.weights)
del trainer
print("alive after del:", alive() is not None, "· you guessed", my_guess_alive)
gc.collect()
print("alive after gc.collect():", alive() is not None)
gc.enable()

# %% [markdown]
# The peak has its own act. **Predict first**: 32 MiB are held, 64 MiB more were made and are gone. What is the peak
# after `reset_peak_memory_stats()`, 0, 32 or 96?

# %%
if on_gpu:
    held = torch.ones(8 * MIB, device=device)
    torch.ones(16 * MIB, device=device)  # made and gone
    with effects.of("reset_peak_memory_stats()"):
        torch.cuda.reset_peak_memory_stats(device)
    print(effects["reset_peak_memory_stats()"])
    print("peak now:", mebibytes(torch.cuda.max_memory_allocated(device)))
    del held
else:
    print("Skipped: no GPU. reset_peak_memory_stats() sets the peak to what is allocated now, not")
    print("to 0, and frees nothing. On a CPU it raises an error.")

# %% [markdown]
# ## 3. Who holds it?
#
# In a notebook, names are not the only ones that hold. The next cell ends with a tensor, and so displays it.

# %%
scores = torch.ones(4 * MIB, device=device)
scores

# %% [markdown]
# **Predict first**: is it freed by `del scores`?

# %%
my_guess_freed = True

alive = weakref.ref(scores)
del scores
print("freed:", alive() is None, "· you guessed", my_guess_freed)
print(cache.who_holds(alive))

# %% [markdown]
# IPython keeps what a cell displays, in `Out`, `_` and other places, for as long as the kernel lives. Not even `%reset
# out` lets go of all. `%xdel scores` would have, and so does `cache.free`: it deletes a name **and** what the history
# keeps of it.

# %%
scores = alive()  # get it back under its name
print(cache.free("scores"))
print("freed:", alive() is None)

# %% [markdown]
# Better: end such a line with `;`, or print what you want to see (`scores.shape`).
#
# Now a model. **Predict first**: after `del model`, which of the names below still lead to its weights?

# %%
my_guess_holders = "none"

model = workload.small_resnet(10, workload.MODEL_WIDTH[device.type]).to(device)
optimizer = torch.optim.AdamW(model.parameters())
size = workload.IMAGE_SIZE[device.type]
images = torch.rand(16, 3, size, size, device=device)
targets = torch.zeros(16, dtype=torch.int64, device=device)
losses = []
for _ in range(2):
    loss = functional.cross_entropy(model(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss)

# %%
weight = weakref.ref(model[0].weight)
del model
holders = cache.who_holds(weight)
print("you guessed:", my_guess_holders)
holders

# %%
cache.largest_tensors(5)

# %% [markdown]
# The optimizer keeps the parameters that it steps. A loss keeps the **graph** that made it, and the graph keeps the
# weights. All of them have to go, in any order:

# %%
losses = [loss.item() for loss in losses]  # numbers keep nothing
del loss, optimizer
print("freed:", weight() is None)

# %% [markdown]
# ## 4. `total += loss`
#
# The best-known leak. `total` becomes the end of a graph that grows with each batch. `backward()` drops the large
# tensors of a graph; what then stays are its nodes, in the computer's RAM. Where nobody calls `backward()`, as in
# validation, they all stay.
#
# **Predict first**: how many times as much does the wrong line hold after 8 batches as `total += loss.item()`?

# %%
my_guess_times_more = 1


def peak_of(keep, grad=True):
    """The most that is held at once while 8 batches are validated, in MiB."""
    net = workload.small_resnet(10, 16).to(device).eval()
    memory = None if on_gpu else oom.SimulatedMemory(None)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    with memory or nullcontext(), torch.set_grad_enabled(grad):
        total = 0.0
        for _ in range(8):
            total = total + keep(functional.cross_entropy(net(images), targets))
    return ((torch.cuda.max_memory_allocated(device) if on_gpu else memory.peak_bytes) - before) / MIB


# %%
peaks = {
    "total += loss": peak_of(lambda loss: loss),
    "total += loss.item()": peak_of(lambda loss: loss.item()),
    "the same, torch.no_grad()": peak_of(lambda loss: loss.item(), grad=False),
}
fig, ax = plots.figure("What each way of summing losses holds at its peak.", height_in=2.4)
plots.bars(ax, list(peaks), list(peaks.values()), "MiB", emphasis=("total += loss",))
plots.show(fig)
times = peaks["total += loss"] / peaks["total += loss.item()"]
print(f"{times:.0f} times as much; you guessed {my_guess_times_more}")

# %% [markdown]
# `.item()` is a number and keeps nothing, but it makes the CPU wait for the GPU. `loss.detach()` keeps no graph either
# and does not wait: sum up detached losses, and call `.item()` once at the end. In validation use `torch.no_grad()` or
# `torch.inference_mode()` besides: then there is no graph at all.
#
# ## 5. Out of memory, and on
#
# Lesson 04: inside `except` the failed step is still alive. In a notebook often nobody writes `except`: the cell just
# fails, and IPython shows the error. The next cell does that **on purpose**. On a GPU PyTorch gets a limit of 1 GiB
# more than it has; on a CPU the limit is simulated.
#
# **Predict first**: how much is still held after it?

# %%
my_guess_held_mib = 0

memory = None if on_gpu else oom.SimulatedMemory(64 * MIB)
net = workload.small_resnet(10, workload.MODEL_WIDTH[device.type]).to(device)


def held_bytes():
    return torch.cuda.memory_allocated(device) if on_gpu else memory.used_bytes


def step(batch_size):
    """One forward and backward pass on that many images."""
    pixels = torch.rand(batch_size, 3, size, size, device=device)
    hidden = net(pixels)
    functional.cross_entropy(hidden, torch.zeros(batch_size, dtype=int, device=device)).backward()


held_before = held_bytes()
if on_gpu:  # 1 GiB more than PyTorch has now, whatever the card holds
    total = torch.cuda.mem_get_info(device)[1]
    fraction = min(1.0, (torch.cuda.memory_reserved(device) + 1024 * MIB) / total)
    torch.cuda.set_per_process_memory_fraction(fraction, device)

# %% tags=["raises-exception"]
try:
    with memory or nullcontext():
        step(1024 if on_gpu else 256)  # too large
except torch.OutOfMemoryError:
    get_ipython().showtraceback()  # shown and kept as by a cell that fails, but "Run all" goes on

# %%
print(f"still held: {mebibytes(held_bytes() - held_before)}; you guessed {my_guess_held_mib} MiB")
cache.explain_oom(sys.last_value)

# %% [markdown]
# The error is kept, so that `%debug` can look into it. With it stay its frames, and their variables:

# %%
cache.largest_tensors(3)

# %%
print(cache.free())  # without a name: the last error, what cells displayed, and garbage
net.zero_grad()
print("still held:", mebibytes(held_bytes() - held_before))
with memory or nullcontext():
    step(16)
print("and a batch of 16 runs")
if on_gpu:
    torch.cuda.set_per_process_memory_fraction(1.0, device)  # the limit is gone

# %% [markdown]
# No restart. (Any later error takes this one's place. That is why a cell with `1 / 0` is said to free memory.) In a
# script, note what you need inside `except`, leave the block, then go on, as in lesson 04. Lightning, accelerate and
# toma call `empty_cache()` while the failed step is still alive (read and measured with Lightning 2.6.6, accelerate
# 1.15, toma 1.1): then there is little to empty.
#
# ## 6. Too little, or in pieces?
#
# PyTorch's message ends with the same advice for everybody: "If reserved but unallocated memory is large try setting
# `expandable_segments:True`". Many try it although it is *not* large. Look at the numbers first:

# %%
full = (  # 24.85 MiB unallocated, as in jhc13/taggui#188; the other figures are made up
    "CUDA out of memory. Tried to allocate 260.00 MiB. GPU 0 has a total capacity of 14.75 GiB of "
    "which 165.06 MiB is free. Of the allocated memory 14.42 GiB is allocated by PyTorch, and "
    "24.85 MiB is reserved by PyTorch but unallocated."
)
cache.explain_oom(full)

# %% [markdown]
# Fragmentation is real all the same. A segment goes back to the driver only when **nothing** lives in it, and free
# pieces of two segments never join. Here is a small model of PyTorch's allocator, **simulated** on any machine, with
# its rules and sizes.
#
# **Predict first**: of 256 MiB, 80 are in use. Can it give 64 MiB?

# %%
my_guess_fits = True


def leave_pieces(allocator):
    """Four times: 60 MiB go, 20 stay in their place, 40 fill the gap. At the end the 40s go."""
    rest = []
    for _ in range(4):
        allocator.free(allocator.allocate(60 * MIB))
        allocator.allocate(20 * MIB)  # stays
        rest.append(allocator.allocate(40 * MIB))
    for address in rest:
        allocator.free(address)


usual = cache.SimulatedAllocator(256 * MIB)
leave_pieces(usual)
usual.blocks().draw(request_bytes=64 * MIB)

# %%
try:
    usual.allocate(64 * MIB)
except torch.OutOfMemoryError as error:
    reading = cache.explain_oom(error)
print("fits: no · you guessed", my_guess_fits)
reading

# %% [markdown]
# `expandable_segments:True` takes memory in pages that can go back one by one, and lets segments grow:

# %%
expandable = cache.SimulatedAllocator(256 * MIB, expandable=True)
leave_pieces(expandable)
expandable.allocate(64 * MIB)
print(expandable)

# %% [markdown]
# The same calls, and it fits. It is no cure for all: a page with one living tensor stays. In your own process:

# %%
blocks = cache.read_blocks()
print(blocks)
if on_gpu:
    print(blocks.verdict(64 * MIB, torch.cuda.mem_get_info(device)[0]))
    plots.show(blocks.draw(64 * MIB))
else:
    print("Skipped: no GPU. It would draw this process's segments, as above.")

# %% [markdown]
# ### Where the setting goes
#
# In an environment variable, before CUDA starts: in the **first** cell, before `import torch`.
#
# ```python
# import os
# os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
# ```
#
# The allocator reads it once. Later it changes nothing, and PyTorch does not say so. `set_allocator` writes the same
# variable, and says when it is too late. Never combine it with `max_split_size_mb`, which does not apply to expandable
# segments; together they have crashed ([pytorch#119452](https://github.com/pytorch/pytorch/issues/119452)).

# %%
print(cache.allocator_settings())
for settings in ("expandable_segments:True,max_split_size_mb:128", "expandable_segments:True"):
    try:
        cache.set_allocator(settings)
        print(settings, "is asked for: CUDA will read it when it starts.")
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, error, sep=": ")
if not on_gpu:
    cache.set_allocator("")  # back to the defaults

# %% [markdown]
# ## 7. When emptying the cache is right
#
# `empty_cache()` helps **others**: another process on this GPU, or a library with an allocator of its own. It does not
# give PyTorch more memory: before PyTorch raises an out-of-memory error, it empties its cache by itself and tries
# again.
#
# Inside one process there is one good moment: *between* two jobs of different sizes, such as training and evaluating a
# second model. **Predict first**: a job takes 8 tensors of 16 MiB and ends; the next takes 4 of 32 MiB. How much is
# reserved then, if the cache is not emptied between?

# %%
my_guess_reserved_mib = 128


def two_jobs(empty_between):
    """Reserved MiB (simulated) after a job with small tensors and one with large ones."""
    allocator = cache.SimulatedAllocator(1024 * MIB)
    for address in [allocator.allocate(16 * MIB) for _ in range(8)]:
        allocator.free(address)
    if empty_between:
        allocator.empty_cache()
    for _ in range(4):
        allocator.allocate(32 * MIB)
    return allocator.reserved_bytes / MIB


print(f"cache kept: {two_jobs(False):.0f} MiB, emptied between: {two_jobs(True):.0f} MiB")
print("you guessed", my_guess_reserved_mib)

# %% [markdown]
# That is memory which another process could use. It is not speed. **Does emptying raise utilisation?** Each step then
# asks the driver again for what it had. The requests of a real training step are recorded here, and replayed in the
# simulated allocator. **Predict first**: how many times as often is the driver asked, if the cache is emptied after
# each of the four steps?

# %%
my_guess_times_asked = 1

job = workload.small_resnet(10, 32)  # on the CPU: a recording of the sizes, not of the time
adamw = torch.optim.AdamW(job.parameters())


def training_step():
    loss = functional.cross_entropy(job(torch.rand(32, 3, 64, 64)), torch.zeros(32, dtype=int))
    adamw.zero_grad()
    loss.backward()
    adamw.step()


trace = cache.record_allocations(training_step, steps=4)
kept, emptied = cache.SimulatedAllocator(1024 * MIB), cache.SimulatedAllocator(1024 * MIB)
trace.replay(kept)
trace.replay(emptied, empty_cache_every=1)
print(trace, kept, emptied, sep="\n")
print("you guessed", my_guess_times_asked, "times")

# %% [markdown]
# Calls of the driver are what the cache is there to save. What they cost, only a GPU can say:

# %%
def rate(after_step, seconds=6.0):
    """Samples/s and busy % of `step(32)`, with `after_step()` after each."""
    step(32)
    with monitor.Monitor(device=device) as watching:
        done, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            step(32)
            after_step()
            done += 32
        if on_gpu:
            torch.cuda.synchronize(device)
        return done / (time.perf_counter() - begun), watching.summary().busy_percent.mean


if on_gpu:
    for name, act in {"left alone": lambda: None, "emptied": torch.cuda.empty_cache}.items():
        samples_per_s, busy = rate(act)
        time.sleep(1)  # NVML looks back up to a second: the next run must not see this one
        print(f"{name:10} {samples_per_s:8,.0f} samples/s, busy {number(busy, '%')}")
else:
    print("Skipped: no GPU. It would train with empty_cache() in each step, and without:")
    print("samples/s and busy %. On a CPU empty_cache() does nothing, so nothing can be shown.")

# %% [markdown]
# Others have measured it: Hugging Face's Trainer got slower by a call in each step
# ([transformers#31372](https://github.com/huggingface/transformers/issues/31372)), and a PEFT script went from 65 s to
# 45 s without it, reserving 23.5 GB at most instead of 19.3
# ([peft#2894](https://github.com/huggingface/peft/pull/2894); not measured here). Its authors kept one call in every
# ten steps, for 50 s: where sizes change from step to step, the cache collects pieces of all of them. The same script
# lost another 43 s to `gc.collect()` in each step. That one can be measured anywhere.
#
# ## 8. In the training job
#
# **Predict first**: the running workload, left alone, against the same with tidying up in each step: how many times as
# fast?

# %%
my_guess_times_faster = 1.0


def tidy_up(*_):
    gc.collect()
    torch.cuda.empty_cache()


recipe = workload.Recipe(cache="ram", augment="batch", item_every=10)  # lesson 03's
tidied = workload.small_resnet(10, workload.MODEL_WIDTH[device.type])
tidied.register_forward_pre_hook(tidy_up)  # before each step
seconds = None if on_gpu else 3
runs = {
    "naive": workload.train(seconds=seconds),
    "left alone": workload.train(recipe, seconds=seconds),
    "tidied": workload.train(recipe, model=tidied, seconds=seconds),
}

# %%
fig, ax = plots.figure("The training job with and without tidying up in each step.", height_in=2.4)
plots.bars(ax, list(runs), [run.samples_per_s for run in runs.values()], "samples/s")
plots.show(fig)
times = runs["left alone"].samples_per_s / runs["tidied"].samples_per_s
print(f"left alone, it has {times:.1f} times the throughput; you guessed {my_guess_times_faster}")
for name, run in runs.items():
    print(f"{name:10} busy {number(run.busy_percent, '%')} ({run.busy_source})")

# %% [markdown]
# `gc.collect()` looks at every object that Python tracks, and a notebook has very many. On a CPU that is the whole
# cost, and it keeps a core *busy*: a busy device is not a fast one (lesson 02). On a GPU each step also asks the driver
# again.

# %% [markdown]
# ## 9. Myths
#
# | What is said | What is true | Seen in |
# |---|---|---|
# | "`empty_cache()` frees GPU memory for my model." | It gives unused cache to *others*. PyTorch could use it all along. | sections 2 and 7 |
# | "Emptying the cache raises utilisation." | It makes PyTorch ask the driver again. | sections 7 and 8 |
# | "`del model` frees the model." | It deletes a name. Optimizer, losses, history and errors may hold it still. | section 3 |
# | "`nvidia-smi` shows what my tensors take." | It also counts the cache, the context and everybody else. | section 1 |
# | "Reserved is much more than allocated: a leak." | That is the cache at work. A leak is *allocated* that grows, or the process's RAM. | sections 1 and 4 |
# | "After an out-of-memory error, restart." | Drop the error, and go on. | section 5 |
# | "Out of memory? Set `expandable_segments`." | Only if reserved and unallocated is large, and only before CUDA starts. | section 6 |
#
# ## 10. Exercises
#
# ### Exercise 1: let go
#
# `session` is a dict with `model`, `optimizer`, `scheduler`, `losses` (three, each with its graph), `scores` (an output
# of the model), `error` (an out-of-memory error that was caught) and `images`. The model is no longer needed. The
# images are, and so are the losses, as numbers.

# %% tags=["exercise:held"]
def let_go(session):
    """Leave nothing in `session` that keeps the model; losses stay, as numbers. Return it."""
    ...


lesson07.held.check(let_go)

# %%
lesson07.held.panel()

# %% [markdown]
# ### Exercise 2: a sum that keeps nothing
#
# Validation without a leak. The loss is `functional.cross_entropy`; all batches are equally large. The check measures
# the memory with 3 batches and with 12.

# %% tags=["exercise:total_loss"]
def mean_loss(model, batches):
    """Return the mean of the batches' losses as a float; hold no more with more batches."""
    ...


lesson07.total_loss.check(mean_loss)

# %%
lesson07.total_loss.panel()

# %% [markdown]
# ### Exercise 3: faster by doing less
#
# Somebody afraid of full memory wrote this loop:
#
# ```python
# losses = []
# for images, labels in batches:
#     loss = functional.cross_entropy(model(images), labels)
#     optimizer.zero_grad()
#     loss.backward()
#     optimizer.step()
#     losses.append(loss.item())
#     del loss
#     gc.collect()
#     torch.cuda.empty_cache()
# ```
#
# Write it without its waste. The check runs theirs and yours, here and now, and compares losses and time.

# %% tags=["exercise:tidy"]
def train_briskly(model, optimizer, batches):
    """Train one step on each batch; return the losses as floats. Do no more than that."""
    ...


lesson07.tidy.check(train_briskly)

# %%
lesson07.tidy.panel()

# %% [markdown]
# ## The new row
#
# This lesson's row is the job *left alone*: the cache is PyTorch's business. Its batch is the naive 16, because short
# steps show the tidying best; so the row stands below those of lessons 04 and 05. Copy the code: lesson 08 will ask for
# it.

# %%
my_progress.add(runs["naive"].as_row(2, "nvidia_smi, naive recipe"))
my_progress.add(runs["left alone"].as_row(7, "clear_cache: left alone"))
my_progress.board.draw()

# %%
my_progress.show()

# %% [markdown]
# ## Key points
#
# - used = allocated + cached + context + others. A leak is *allocated* that grows, or the process's memory.
# - Memory goes when the last reference goes: names, outputs, optimizers, graphs, errors. `who_holds` finds them.
# - `gc.collect()` is for circles, `empty_cache()` is for other processes. Neither belongs into every step of a training
#   loop.
# - After an out-of-memory error read the numbers: too large, in pieces, or somebody else.
# - Allocator settings belong into the first cell.
#
# **Next lesson**: 08 · DataParallel, in preparation.
#
# ## Further reading
#
# - [PyTorch: memory management](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management), with all settings.
# - [When does fragmentation occur in the CUDA caching allocator?](https://github.com/pytorch/devlogs/blob/main/content/eager/2026-06-01-cuda-caching-allocator.md): a note in PyTorch's developer log, which says that it was drafted with an AI and edited by a maintainer. The simulated allocator gives the figures printed there.
# - [Understanding CUDA memory usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html): record what was allocated where, and look at it.
# - [PyTorch's FAQ](https://docs.pytorch.org/docs/stable/notes/faq.html): "My model reports cuda runtime error(2): out of memory".
