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
# # 02 · Read nvidia-smi
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/02_nvidia_smi.ipynb) [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/your__account/gpu-utilisation-course/blob/main/notebooks/02_nvidia_smi.ipynb)
#
# > Is the GPU busy, and what does "busy" mean?
#
# After this lesson you can
#
# - read every field of `nvidia-smi`, and query the ones you need;
# - say what *GPU-Util* counts, and show that 100 % can mean almost no work;
# - watch a training run with a monitor, find the gaps in it, and name what the GPU waited for;
# - measure the course's training job: samples per second, busy %, data-wait % and peak memory.
#
# **Time**: 25 minutes to read and run, 20 minutes for the exercises. **Needs**: lesson 01. Without a usable GPU the
# monitor watches the CPU instead, says so, and the `nvidia-smi` text comes from an example.

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

# %% [markdown]
# ## 1. nvidia-smi, line by line

# %%
import inspect
import time

import numpy as np
import psutil
import torch

from course_utils import monitor, nvidia_smi, plots, progress, runtime, timing, workload
from course_utils.exercises import lesson02
from course_utils.photos import prepare_photos
from course_utils.views import number
from course_utils.visible_devices import visible_nvml_indices

my_progress = progress.resume("")  # the code from the end of lesson 01, between the quotes
machine = runtime.describe_runtime()
device = runtime.pick_device()
on_gpu = device.type == "cuda"
print(machine.headline)
if machine.advice:
    print(machine.advice)

# %% [markdown]
# `nvidia-smi` is a program that comes with NVIDIA's driver. A `!` in front of a line hands it to the system's shell.
# Without a GPU the program may be missing, and the shell says so: on this runtime that is the answer, not a fault.

# %%
# !nvidia-smi

# %%
if not machine.gpus:
    print("EXAMPLE, not measured here: what nvidia-smi prints on a machine with a T4.\n")
    print(nvidia_smi.EXAMPLE_SUMMARY)

# %% [markdown]
# | Field | Meaning |
# |---|---|
# | Driver Version (newer drivers: KMD Version) | The driver on this machine. It is not part of PyTorch. |
# | CUDA Version (newer: CUDA UMD Version) | The *newest* CUDA that this driver can run. It says nothing of what is installed; `torch.version.cuda` does. |
# | GPU, Name, Bus-Id | Its number, its model, its place on the PCIe bus. |
# | Persistence-M | On: the driver stays loaded while nobody uses the GPU. |
# | Disp.A | Whether a screen is set up on it. |
# | Volatile Uncorr. ECC | Memory errors that could not be corrected since the driver was loaded. It should be 0, or `N/A` without ECC. |
# | Fan | `N/A` on a T4: it has none, and is cooled by the server's air. A missing value is not 0. |
# | Temp | Degrees Celsius. |
# | Perf | The performance state, from P0 (maximum) to P12 (minimum). The idle T4 of the example rests in P8. Within P0 the clocks still move, for example when the power limit is reached. |
# | Pwr:Usage/Cap | Watts drawn now, and the limit. A T4's limit is 70 W. |
# | Memory-Usage | Memory that is *taken* from the whole card, by everyone. 1 MiB is 1,048,576 bytes. |
# | GPU-Util | The share of the last moments in which *something* ran on the GPU. Section 3 takes it apart. |
# | Compute M., MIG M. | Default: several processes may share the GPU. MIG: whether it is cut into slices. |
# | Processes | Who uses the GPU. On Colab and Kaggle it is usually empty although your job runs: see below. |
#
# **An empty process list does not mean an idle GPU.** You sit in a container there, and the process numbers belong to
# the machine outside, where you may not look. A blank list means that processes are there and cannot be named; *No
# running processes found* means that the driver lists none. Read the memory and the utilisation instead, or ask PyTorch
# what *your* tensors take: `torch.cuda.memory_allocated()`.

# %% [markdown]
# ## 2. Ask for what you need
#
# The table is for people. For programs there is `--query-gpu`, which prints comma-separated values:

# %%
# !nvidia-smi --query-gpu=index,name,utilization.gpu,memory.used,power.draw --format=csv

# %% [markdown]
# `nvidia_smi.query()` runs a query like this one with a time limit, since the program can hang on a sick driver, and
# turns the text into records. A cell such as `[N/A]` or `[Not Supported]` becomes `None`. When there is no GPU you get
# no records and the reason.

# %%
report = nvidia_smi.query()
report

# %%
example = nvidia_smi.parse_query_csv(nvidia_smi.EXAMPLE_QUERY_CSV)
print("EXAMPLE, not measured here:")
print(nvidia_smi.EXAMPLE_QUERY_CSV)
example

# %% [markdown]
# ## 3. What GPU-Util counts
#
# NVIDIA defines it in one sentence of
# [its manual](https://docs.nvidia.com/deploy/nvml-api/api/structnvmlUtilization__t.html): the percentage of time, over the
# past sample period, in which one or more kernels was executing on the GPU. A *kernel* is one program that runs on the
# GPU, such as a product or a sum. The sample period is between a sixth of a second and a second.
#
# Read it again. It says **when** the GPU worked. It does not say **how much of it** did.
#
# Two loads, each for two seconds:
#
# - **Little work**. On a GPU: running totals down 32 long columns. PyTorch's kernel gives each column one thread, which
#   walks down it step by step, so 32 threads work. A T4 has 2,560 CUDA cores. On a CPU: picking numbers from random
#   places of a long vector. All cores take part, and mostly wait for memory.
# - **Big product**: the matrix product of lesson 01. It gives every core plenty to multiply.
#
# **Predict first**: which busy % will the monitor see for each?

# %%
my_guess = {"little work": 1, "big product": 100}  # busy %, change them before you run on

n = 4096 if on_gpu else 1024
square = torch.randn(n, n, device=device)
if on_gpu:
    columns = torch.ones(100_000, 32, device=device)
    loads = {"little work": lambda: columns.cumsum(dim=0)}
    operations = {"little work": columns.numel()}
else:
    vector, places = torch.ones(16_000_000), torch.randint(16_000_000, (4_000_000,))
    loads = {"little work": lambda: vector.take(places)}
    operations = {"little work": places.numel()}
loads["big product"] = lambda: square @ square
operations["big product"] = 2 * n**3

# %%
def watch(work, seconds=2.0):
    """Repeat `work` for about `seconds`. Returns runs per second and what the monitor saw."""
    work()  # warm-up
    timing.synchronize(device)
    with monitor.Monitor(device=device) as watching:
        runs, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            work()
            timing.synchronize(device)
            runs += 1
        elapsed_s = time.perf_counter() - start
    return runs / elapsed_s, watching.summary()


# %%
busy, rate = {}, {}
for name, work in loads.items():
    runs_per_s, seen = watch(work)
    busy[name] = seen.busy_percent.mean
    rate[name] = runs_per_s * operations[name] / 1e9
    print(f"{name}: busy {number(busy[name], '%')}, you guessed {my_guess[name]} %")
    power, limit = number(seen.power_w.mean, "W"), number(seen.device.power_limit_w, "W")
    print(f"    power {power} of {limit}; memory in use {number(seen.memory_busy_percent.mean, '%')}")
print("Watched:", seen.label)

# %%
alt = "Two charts of both loads: how busy they keep the device, and how much arithmetic they do."
fig, (left, right) = plots.figure(alt, columns=2, width_in=11)
plots.bars(left, list(busy), list(busy.values()), "%", title="Busy")
plots.bars(right, list(rate), list(rate.values()), "G operations/s", title="Work done", log=True)
plots.show(fig)

# %% [markdown]
# Expect both loads to look alike in the left chart. The right one shows what was done. *Busy* is necessary and not
# sufficient: an idle GPU does nothing, and a busy one may do next to nothing.
#
# So this course never judges by busy % alone. Beside it stands **throughput**: samples per second. A good change raises
# throughput. Busy % tells you *where to look*: low means that the GPU waits for something; high at low throughput
# means that each kernel uses little of the chip: it is small, or it waits for memory.
#
# Power is a hint as well: compare the two loads above. Without a GPU it reads n/a.
#
# ### The other percentage
#
# NVML (the library behind `nvidia-smi`) also has a *memory utilisation*. It is **not** how full the memory is. It is
# the share of time in which the memory was being read or written. That is *memory in use* above. How full it is
# stands in *Memory-Usage*.

# %% [markdown]
# ## 4. Memory, three ways
#
# **Predict first**: you make one tensor of 256 MiB, then delete it. By how much does each of three counters grow, and how
# far does each fall?

# %%
def memory_now():
    """Three answers to "how much memory is used?", in MiB."""
    if on_gpu:
        free, total = torch.cuda.mem_get_info(device)
        held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        counters = [held, reserved, total - free]
    else:
        tensors = sum(tensor.nbytes for tensor in [vector, places, square, *kept])
        counters = [tensors, psutil.Process().memory_info().rss, psutil.virtual_memory().used]
    return np.array(counters) / 2**20


# %%
names = ["allocated", "reserved", "used"] if on_gpu else ["tensors", "this process", "whole machine"]
kept = []
rows = [memory_now()]
kept.append(torch.ones(256 * 2**20, dtype=torch.uint8, device=device))
rows.append(memory_now())
kept.clear()
rows.append(memory_now())
print(f"{'MiB':16} {'before':>9} {'with it':>9} {'deleted':>9}")
for name, *values in zip(names, *rows):
    print(f"{name:16} " + " ".join(f"{value:9,.0f}" for value in values))

# %% [markdown]
# On a GPU the three are:
#
# 1. **allocated**: bytes in living tensors;
# 2. **reserved**: what PyTorch has taken from the driver, living tensors and its cache of freed blocks;
# 3. **used**, close to what `nvidia-smi` prints: reserved, plus the CUDA context (memory for kernels and libraries, taken
#    when CUDA starts), plus every other process.
#
# When the tensor goes, *allocated* falls and the other two stay: PyTorch keeps the block for the next tensor. So
# `nvidia-smi` is right to show more than your tensors, and it does not fall back when you delete them. Lesson 07 is
# about this. On a CPU the three counters are the tensors, the process and the machine, and so large a block goes back to
# the system at once.
#
# One more trap: MiB, GiB and GB are three units. A T4 has 15360 MiB = 15.0 GiB = 16.1 GB in `nvidia-smi`. PyTorch reports
# somewhat less, since the driver keeps some back.

# %%
if on_gpu:
    total = torch.cuda.get_device_properties(device).total_memory
    print(f"PyTorch: {total / 2**20:,.0f} MiB = {total / 2**30:.2f} GiB = {total / 1e9:.2f} GB")
else:
    print("Skipped: no GPU. It would show the card's total in MiB, GiB and GB.")

# %% [markdown]
# ## 5. One snapshot, or a series?
#
# Make a device that works 0.6 seconds and rests 0.9, again and again. It is busy 40 % of the time.
#
# **Predict first**: what will a single glance at `nvidia-smi` say?

# %%
with monitor.Monitor(device=device) as watching:
    for _ in range(3):
        start = time.perf_counter()
        while time.perf_counter() - start < 0.6:
            square @ square
            timing.synchronize(device)
        time.sleep(0.9)

# %%
glances = [percent for percent in watching.values("busy_percent") if percent is not None]
if glances:
    picked = np.random.default_rng(1).choice(glances, size=5)
    print("five glances, picked at random:", [f"{value:.0f} %" for value in picked])
    print(f"mean of all {len(glances)} samples: {np.mean(glances):.0f} %")
else:
    print("This device does not tell how busy it is, as a slice of a GPU (MIG) does not.")

# %%
watching.plot()

# %% [markdown]
# One glance says where in its cycle the device happened to be. Decide nothing on fewer than ten samples, spread over
# several steps of what you watch. Looking more often than five times a second adds little, since the driver itself
# averages over a sixth of a second or more. And a program that launches `nvidia-smi` for each sample spends
# milliseconds, at times seconds, on every one ([bpytop#26](https://github.com/aristocratos/bpytop/issues/26),
# [netdata#14522](https://github.com/netdata/netdata/issues/14522)); `Monitor` asks NVML inside the process instead.

# %% [markdown]
# ## 6. Watch a real training run
#
# Here is the job that the whole course speeds up. It classifies crops of photographs, stored as JPEG files, with a small
# residual network. The photographs ship with scikit-image and scikit-learn: nothing is downloaded.

# %%
prepare_photos()

# %% [markdown]
# A `Recipe` holds every knob of the job, and the defaults are the *naive* way: what a first script looks like.

# %%
recipe = workload.Recipe()
recipe

# %% [markdown]
# And this is the loop. Read it for its shape: copy, forward, loss, backward, step. `autocast` and `scaler` do nothing in
# the naive recipe; lesson 05 turns them on. Every other knob has its lesson too.

# %%
print(inspect.getsource(workload.training_loop))

# %% [markdown]
# **Predict first**: on your device, which share of the time will this loop keep it busy?

# %%
my_guess_percent = 90

with monitor.Monitor(live=True, device=device) as watching:
    naive = workload.train(recipe, monitor=watching)
naive

# %%
watching.plot()

# %%
print(f"busy: {number(naive.busy_percent, '%')}, you guessed {my_guess_percent} % ({watching.label})")
step_ms, wait_ms = 1e3 * naive.seconds_per_step, 1e3 * naive.data_wait_s / naive.steps
print(f"one step takes {step_ms:.1f} ms; for {wait_ms:.1f} ms of it the device waits for its batch")
print(f"loss: {naive.loss_start:.2f} → {naive.loss_end:.2f}")

# %% [markdown]
# ### Find the gaps
#
# The left edge of the plot is preparation and warm-up. The plot's mean contains it; the measurement leaves it out.
#
# A hatched stretch was less than 10 % busy. But on a GPU each point of the curve is already an average over a sixth of a
# second or more. A wait that is shorter does not show as a gap: it pulls the whole curve down. Compare the step's time
# above with that.
#
# **Data-wait %** sees what the curve cannot. It is the share of the time in which the device had finished all its work
# and the next batch was not there yet. On a GPU it is measured step by step, with time stamps in the GPU's own queue.
# When it is large, one Python process reads and decodes JPEG files while the device waits, and a faster GPU would
# change little.
#
# On a CPU runtime the same processor decodes *and* computes. Busy % mixes the two, and on many cores it is low while one
# of them decodes. Data-wait % keeps them apart.
#
# With two GPUs the live view has two strips. The second stays idle: this loop uses one.
#
# Lesson 03 removes the wait. The rest of the course attacks what then remains.

# %% [markdown]
# ## 7. The first row of the scoreboard
#
# Every lesson adds one row for the same job. Throughput is what counts, the rest explains it.

# %%
my_progress.add(naive.as_row(2, "nvidia_smi, naive recipe"))
my_progress.board

# %% [markdown]
# ## 8. Myths
#
# | What is said | What is true | Seen in |
# |---|---|---|
# | "100 % utilisation means efficient." | It means that something ran all the time, be it 32 threads on a T4's 2,560 cores. | section 3 |
# | "Memory utilisation means memory filled." | It is the share of time with reads or writes. | section 3 |
# | "nvidia-smi shows 0 %, so my job is not on the GPU." | One glance shows the last fraction of a second: 0 % in a longer pause. | section 5 |
# | "The process list is empty, so my job is not on the GPU." | In a container it is usually empty. | section 1 |
# | "`CUDA Version` is the CUDA that PyTorch uses." | It is the newest that the driver can run. | section 1 |
# | "GPU 0 in nvidia-smi is cuda:0." | Only if `CUDA_VISIBLE_DEVICES` is not set and all GPUs are the same model. Else CUDA puts the fastest first; `CUDA_DEVICE_ORDER=PCI_BUS_ID` makes both count alike. | the next cell |

# %%
three = nvidia_smi.parse_query_csv("index\n0\n1\n2").gpus  # an example: three GPUs
for setting in ("2,0", "1", ""):
    mapped = visible_nvml_indices({"CUDA_VISIBLE_DEVICES": setting}, three)
    print(f"CUDA_VISIBLE_DEVICES={setting!r:6} cuda:0, cuda:1, … are GPUs {list(mapped.indices)}")

# %% [markdown]
# ## 9. Exercises
#
# ### Exercise 1: parse a query
#
# You get the text that `nvidia-smi --query-gpu=index,utilization.gpu,memory.used --format=csv,noheader,nounits` prints:
# one line for each GPU, such as `0, 87, 5310`. Return a list with each GPU's utilisation as a float, and `None` where it
# is missing (`[N/A]`, `[Not Supported]`, …). A sentence such as *No devices were found* means an empty list.

# %% tags=["exercise:parse"]
def utilisation(text):
    """Return one float for each GPU in `text`, or None where the value is missing."""
    ...


lesson02.parse.check(utilisation)

# %%
lesson02.parse.panel()

# %% [markdown]
# ### Exercise 2: three traces
#
# The cell draws three GPUs, made up for this exercise in the manner of a T4 with a limit of 70 W. One is **starved** (it
# waits for data), one is **healthy**, and one runs **tiny kernels**. Which is which?

# %%
fig, axes = plots.figure(lesson02.TRACES_ALT, rows=3, columns=2, width_in=11, height_in=6.5, share_x=True)
for row, (letter, (seconds, busy_percent, power_w)) in enumerate(lesson02.traces().items()):
    plots.trace(axes[2 * row], seconds, busy_percent, title=letter, legend=False)
    axes[2 * row + 1].plot(seconds, power_w)
    axes[2 * row + 1].set(ylim=(0, 75), ylabel="power (W)")
plots.show(fig)

# %% tags=["exercise:traces"]
def verdicts():
    """Return a dict such as {"A": "healthy", "B": "starved", "C": "tiny kernels"}."""
    ...


lesson02.traces_told_apart.check(verdicts)

# %%
lesson02.traces_told_apart.panel()

# %% [markdown]
# ### Exercise 3: busier, measured
#
# Return a recipe that raises the mean busy % of the training job *and* its samples per second above the naive recipe's.
# The check runs both here and now, and measures again before it says no. It takes up to a minute.

# %% tags=["exercise:busier"]
def busier_recipe():
    """Return a workload.Recipe that keeps this device busier than the naive one, and is faster."""
    ...


lesson02.busier.check(busier_recipe)

# %%
lesson02.busier.panel()

# %% [markdown]
# ## Your progress code
#
# Copy it: lesson 03 asks for it, and goes on with your scoreboard.

# %%
my_progress.show()

# %% [markdown]
# ## Key points
#
# - GPU-Util is *when*, not *how much*: the share of time in which at least one kernel ran.
# - Judge by throughput; use busy % and data-wait % to find out where the time goes.
# - Look at a series, never at one glance. `with Monitor() as m:` goes around any code.
# - Memory used = tensors + PyTorch's cache + context + others. Missing values are `None`, not 0.
#
# **Next lesson**: 03 · Feed the GPU
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/03_data_loading.ipynb)
#
# ## Further reading
#
# - [nvidia-smi](https://docs.nvidia.com/deploy/nvidia-smi/index.html): every field, in NVIDIA's words.
# - [NVML: nvmlUtilization_t](https://docs.nvidia.com/deploy/nvml-api/api/structnvmlUtilization__t.html): the two percentages.
