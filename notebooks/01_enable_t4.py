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
# # 01 · Enable the T4
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/01_enable_t4.ipynb) [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/your__account/gpu-utilisation-course/blob/main/notebooks/01_enable_t4.ipynb)
#
# > Do I have a GPU, which one, and what can it do?
#
# After this lesson you can
#
# - switch a Colab notebook to a T4 GPU, and prove in one line that PyTorch uses it;
# - time GPU work without fooling yourself;
# - name the 16-bit type that your GPU computes natively, and compare its measured peak with its datasheet;
# - write code that runs unchanged on a GPU and on a CPU.
#
# **Time**: 20 minutes to read and run, 20 minutes for the exercises. **Needs**: a browser. Without a GPU every cell
# still runs, on smaller sizes, and says what a GPU would show.

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
# ## 1. Where are you running?
#
# A notebook is a page in your browser. The code runs somewhere else: in a **runtime**, a computer with a Python process
# that waits for your cells. On Colab the runtime is a virtual machine that you borrow. It may have a GPU or not, and it
# is deleted when you leave.
#
# So the first question of any GPU work is: *what machine is this?*

# %%
import time

import numpy as np
import torch

from course_utils import gpu_specs, plots, progress, runtime, timing
from course_utils.exercises import lesson01

machine = runtime.describe_runtime()
print(machine.headline)

# %%
machine

# %% [markdown]
# Read the table from the top:
#
# - **Runtime** says where you are: on Colab, on Kaggle, or in a Jupyter of your own.
# - **PyTorch** names the version, and the CUDA version that it was built with.
# - **cuda:0** is your GPU, with its *compute capability* (NVIDIA's version number for what the hardware can do; a T4
#   has 7.5, written sm_75) and its memory. Without a GPU, the table says why there is none.
# - **CPUs** counts those that your process may use. A container can be given fewer than the machine has.
# - **Shared memory** is what data-loading workers hand batches through. Lesson 03 needs it.
#
# CUDA is NVIDIA's software for running programs on its GPUs. Asking all this did not start it: asking is free, and
# leaves the GPU as it was. What the table says of number types is the subject of section 4.
#
# If there is no usable GPU, the next cell says why, and what to click.

# %%
if machine.reason:
    print(f"No usable GPU, because {machine.reason}. {machine.advice}")
else:
    print("This runtime has a GPU that PyTorch can use. Nothing to click.")

# %% [markdown]
# ### Choosing the T4 by hand
#
# In Colab:
#
# 1. Open the menu **Runtime** and choose **Change runtime type**.
# 2. Under *Hardware accelerator*, select **T4 GPU**.
# 3. Press **Save**. If Colab asks whether to disconnect and delete the old runtime, confirm.
# 4. Run the cells again from the top: a new runtime knows nothing of the old one's variables.
#
# You may not have had to do it. A notebook file carries notes for the program that opens it, and this one carries
# these two lines. Colab reads them when the notebook is opened:
#
# ```json
# "accelerator": "GPU",
# "colab": {"gpuType": "T4"}
# ```
#
# They are a wish, not a promise. When no T4 is free, Colab offers a runtime without one. That is why every lesson
# begins by asking the machine.
#
# ### What Colab's free tier promises
#
# Very little, and its [FAQ](https://research.google.com/colaboratory/faq.html) says so: resources are not guaranteed,
# the limits change with demand, and a runtime ends when it idles for a while or after some hours. Three habits help:
#
# - disconnect when you stop (**Runtime → Disconnect and delete runtime**), so that you run into a limit later;
# - keep what matters outside the runtime (in Drive, or downloaded);
# - when no T4 is free, do the lesson on the CPU runtime, come back later, or use Kaggle. There, a
#   verified account can choose **GPU T4 x2**: two T4 side by side, which lesson 08 puts to use.

# %% [markdown]
# ## 2. The same product three times
#
# Multiplying two matrices of *n* × *n* numbers takes about 2*n*³ arithmetic operations. Neural networks spend most of
# their time in products like this one. We compute it with NumPy, with PyTorch on the CPU, and with PyTorch on the GPU.
#
# **Predict first.** NumPy against PyTorch on the GPU (without one, on the CPU): how many times as long will NumPy take?

# %%
my_guess = 10  # times as long: change it before you run the next cells

device = runtime.pick_device()
n = 2048 if device.type == "cuda" else 1024
a_numpy = np.random.default_rng(0).standard_normal((n, n), dtype=np.float32)
a_cpu = torch.from_numpy(a_numpy)  # shares NumPy's memory: no copy
a_gpu = a_cpu.to(device)  # copies to the GPU; on a CPU-only machine it is the same tensor again
print(f"{n} × {n} numbers. The tensor that PyTorch multiplies is on: {a_gpu.device}")

# %% [markdown]
# ### Timed wrongly
#
# The obvious way to time it is this one. Run it, and keep the numbers in mind. A TFLOP/s is a million million
# operations a second.

# %%
for attempt in ("first", "second"):
    start = time.perf_counter()
    a_gpu @ a_gpu
    wrong_s = time.perf_counter() - start
    rate = 2 * n**3 / wrong_s / 1e12
    print(f"{attempt} call on {device}: {wrong_s * 1e3:.3f} ms, as if {rate:.2f} TFLOP/s")

# %% [markdown]
# Two things are wrong with it.
#
# 1. **The first call is never typical.** It loads libraries, chooses algorithms and allocates memory, so it looks too
#    slow.
# 2. **A GPU works behind Python's back.** `a_gpu @ a_gpu` puts the work in a queue and returns at once. The second clock
#    stopped when the work had been *asked for*, not when it was done. Compare its rate with what the chip could do at
#    best: a T4's datasheet promises 8.1 TFLOP/s in float32. On a CPU, PyTorch returns when the result is ready, so
#    there the second figure is right.
#
# A stand-in shows the second mistake on any machine. This one only sleeps: each piece of its work takes 4 ms.

# %%
gpu = lesson01.PretendGPU(work_s=0.004, first_s=0.004)

start = time.perf_counter()
gpu.work()
asked_s = time.perf_counter() - start
gpu.synchronize()
done_s = time.perf_counter() - start

print(f"asked for after {asked_s * 1e3:.3f} ms, done after {done_s * 1e3:.3f} ms")

# %% [markdown]
# ### Timed rightly
#
# Warm up, wait for the queue to be empty, start the clock, work, wait again, stop the clock. Repeat, and take the
# median, since one run can be unlucky.

# %%
def right_s(product, repeats=5):
    seconds = []
    for _ in range(1 + repeats):
        timing.synchronize(device)  # torch.cuda.synchronize() on a GPU, nothing on a CPU
        start = time.perf_counter()
        product()
        timing.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:]))  # the first one was the warm-up


seconds = {"NumPy, CPU": right_s(lambda: a_numpy @ a_numpy)}
seconds["PyTorch, CPU"] = right_s(lambda: a_cpu @ a_cpu)
if device.type == "cuda":
    seconds["PyTorch, GPU"] = right_s(lambda: a_gpu @ a_gpu)
else:
    print("No GPU here. With one, a third bar would stand below: the same product on the GPU.")

# %%
fig, ax = plots.figure("Milliseconds that one matrix product takes on each device.")
milliseconds = [1e3 * s for s in seconds.values()]
plots.bars(ax, list(seconds), milliseconds, "ms", title=f"One product of {n} × {n} float32 numbers")
plots.show(fig)
ratio = seconds["NumPy, CPU"] / seconds[f"PyTorch, {'GPU' if device.type == 'cuda' else 'CPU'}"]
print(f"NumPy took {ratio:.1f} times as long as PyTorch on {device}. Your guess was {my_guess}.")

# %% [markdown]
# On the CPU expect about a draw: both call a BLAS, a library for such products, though not always the same one. A GPU
# wins because it has more arithmetic units. A T4 has 2,560 *CUDA cores*, each of which does one float32
# multiply-and-add at a time
# ([datasheet](https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf)).
# A Colab VM with a T4 has two CPU threads. The T4's 320 *tensor cores*, units that multiply small blocks of 16-bit
# numbers at once, are idle here. Section 4 uses them.
#
# From here on the lessons use `timing.time_call`, which is the loop above with CUDA events on a GPU (time stamps that
# the GPU itself writes into its queue) and a time limit.

# %%
timing.time_call(lambda: a_gpu @ a_gpu, device=device)

# %% [markdown]
# ### Is the GPU always faster?
#
# **Predict first**: from which size on does PyTorch on this device beat NumPy, if at all?

# %%
sizes = [16, 64, 256, 1024] + ([2048] if device.type == "cuda" else [])
times = {"NumPy, CPU": [], f"PyTorch, {'GPU' if device.type == 'cuda' else 'CPU'}": []}
for size in sizes:
    small_numpy = a_numpy[:size, :size].copy()
    small = torch.from_numpy(small_numpy).to(device)
    numpy_time = timing.time_call(lambda: small_numpy @ small_numpy, device="cpu", budget_s=0.5)
    torch_time = timing.time_call(lambda: small @ small, device=device, budget_s=0.5)
    for row, measured in zip(times.values(), (numpy_time, torch_time)):
        row.append(measured.median_s * 1e6)

# %%
fig, ax = plots.figure(f"Time of one product over its size, for {' and for '.join(times)}.")
for (label, microseconds), marker in zip(times.items(), "os"):
    ax.loglog(sizes, microseconds, marker=marker, label=label)
ax.set_xlabel("n (a product of n × n numbers)")
ax.set_ylabel("µs a product")
ax.legend()
plots.show(fig)

# %% [markdown]
# On a GPU expect the left part of its line to be flat. Below some size a product costs what it costs to ask for it: Python,
# PyTorch and the driver prepare and *launch* one program on the GPU, however little there is to compute. Read that
# price off your own plot. On a CPU both lines begin with the price of the call itself. A GPU needs large pieces of
# work. Keeping it supplied with them is what this course is about.
#
# ### Is PyTorch just NumPy on a GPU?
#
# The array part is. PyTorch adds what NumPy has not: devices (above), bfloat16 and products on tensor cores (section 4),
# and **automatic differentiation**. A tensor that asks for it remembers what was done to it:

# %%
w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
loss = (w**2).sum()
loss.backward()
print("loss", loss.item(), " gradient", w.grad.tolist(), " by hand 2w:", (2 * w).tolist())

# %% [markdown]
# ## 3. Where tensors live
#
# Every tensor lives on one device. `.to(device)` gives you the tensor there. It copies when it must, and hands back the
# same tensor when it is there already. For a model, `.to(device)` moves the parameters in place.

# %%
batch = torch.ones(2, 3)
model = torch.nn.Linear(3, 1)
print("batch:", batch.device, "  weights:", model.weight.device)

batch, model = batch.to(device), model.to(device)
print("batch:", batch.device, "  weights:", model.weight.device)
print("the same object again:", batch.to(device) is batch)

# %% [markdown]
# What happens when two tensors of one operation disagree? **Predict first**: does PyTorch copy for you, or refuse?
#
# Where there is no GPU, the next cell uses `meta`, a device that knows shapes but holds no numbers, and that every
# machine has.

# %%
elsewhere = torch.ones(3, device="cuda" if device.type == "cuda" else "meta")
try:
    torch.ones(3) + elsewhere
except RuntimeError as error:
    print("RuntimeError:", error)

# %% [markdown]
# It refuses. A copy between devices is slow, and PyTorch will not hide one from you. Read such a message for the two
# device names in it, print `.device` of both tensors, and move the one that is not where you want to compute. There is
# one exception: a CPU tensor that holds a single number and has no dimensions may join a GPU tensor.
#
# **Predict first**: how many times as long does a copy to the GPU take as one within it? The first crosses PCIe, the
# connection between the CPU and the GPU, which is far narrower than the GPU's own memory.

# %%
if device.type == "cuda":
    host = torch.ones(64 * 2**20, dtype=torch.uint8)
    there = host.to(device)
    to_gpu = timing.time_call(lambda: host.to(device), device=device)
    within = timing.time_call(lambda: there.clone(), device=device)
    print(f"64 MiB to the GPU: {to_gpu.median_s * 1e3:.2f} ms")
    print(f"64 MiB within the GPU: {within.median_s * 1e3:.2f} ms")
else:
    print("Skipped: no GPU. It would show 64 MiB copied to the GPU, and within the GPU, in milliseconds.")

# %% [markdown]
# ## 4. What this GPU can do, and what it cannot
#
# Networks train well in 16-bit numbers, and tensor cores multiply those much faster than 32-bit ones; your bars below
# show by how much. There are two 16-bit types: **float16** (more precision, small range) and **bfloat16** (less precision, the range of
# float32). Which one is native depends on the GPU's generation:
#
# | | compute capability | float16 tensor cores | bfloat16 | TF32 |
# |---|---|---|---|---|
# | T4 (Turing) | 7.5 | yes | emulated only | no |
# | A100 (Ampere), L4 (Ada), H100 (Hopper) | 8.0, 8.9, 9.0 | yes | yes | yes |
#
# *Emulated* means computed in software through another type, without tensor cores. TF32 is a faster, less precise way
# to multiply float32 numbers; its switch, `torch.set_float32_matmul_precision("high")`, needs hardware that a T4 does
# not have. It is off by default, so the float32 bar below is true float32.
#
# **Predict first**: which of the three types will reach the highest rate on *your* device?

# %%
on_gpu = device.type == "cuda"
chip = torch.cuda.get_device_name(device) if on_gpu else "the CPU"
m = 4096 if on_gpu else 256
peak_tflops = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    x = torch.randn(m, m, device=device).to(dtype)
    measured = timing.time_call(lambda: x @ x, device=device, budget_s=1.0)
    peak_tflops[str(dtype).removeprefix("torch.")] = 2 * m**3 / measured.median_s / 1e12

# %%
fig, ax = plots.figure("Measured TFLOP/s for each number type.")
title = f"Measured on {chip}, products of {m} × {m}"
plots.bars(ax, list(peak_tflops), list(peak_tflops.values()), "TFLOP/s", title=title)
plots.show(fig)
if on_gpu:
    best = runtime.amp_dtype(torch.cuda.get_device_capability(device))
    print("Native 16-bit type of this GPU for training:", best)
else:
    print("A CPU has no tensor cores. Your bars say whether a 16-bit type pays here.")

# %% [markdown]
# On a T4 expect float16 far ahead and bfloat16 behind. On its elder sister, a V100, which has no bfloat16 either, one
# report measured 9.6 TFLOP/s in bfloat16, 14.0 in float32 and 95 to 100 in float16
# ([mlxcel#1654](https://github.com/lablup/mlxcel/issues/1654)). On a CPU without 16-bit arithmetic both 16-bit types are
# *slower* than float32, since each number is converted back and forth.
#
# ### Peak and datasheet
#
# A datasheet gives what the hardware could do at best. Real work seldom reaches it. The share that a model reaches is
# called its *model FLOPs utilisation*, MFU.

# %%
spec = gpu_specs.spec_for(chip)
if spec is None:
    print(f"The course has no datasheet for {chip}. A T4's promises 65 TFLOP/s in float16.")
else:
    promises = [spec.fp32_tflops, spec.fp16_tensor_tflops, spec.bf16_tensor_tflops]
    for (name, measured), promised in zip(peak_tflops.items(), promises):
        share = f"{measured / promised:.0%} of the {promised} promised" if promised else "no figure in the table"
        print(f"{name}: {measured:.1f} TFLOP/s measured, {share}")
    print("Datasheet:", spec.source)

# %% [markdown]
# A T4 is a small card that may draw 70 W, and power is what stops it. In one public report, products of 4096 × 4096
# float16 numbers sustained about 24 TFLOP/s of the 65
# ([NVIDIA forum](https://forums.developer.nvidia.com/t/264462)). Compare with your own bar above. In this course we
# judge a training loop against the peak *measured on the same device*, and name the datasheet beside it.

# %% [markdown]
# ## 5. Myths
#
# | What is said | What is true | Seen in |
# |---|---|---|
# | "My GPU is on, so PyTorch uses it." | A tensor is on the CPU until you move it. | section 3 |
# | "The GPU did it in no time." | That was the time to ask for it. Synchronise, then stop the clock. | section 2 |
# | "A GPU is always faster." | Not for small pieces of work. | section 2, second plot |
# | "A T4 gives 65 TFLOPS." | That is the datasheet. Power limits it to much less. | section 4 |
# | "`is_bf16_supported()` is True, so use bfloat16." | It counts emulation. Ask without it: | next cell |
# | "Enable TF32." | It needs capability 8.0. | section 4, table |

# %%
if device.type == "cuda":
    print("bfloat16, emulation counted:", torch.cuda.is_bf16_supported())
    print("bfloat16 in hardware:       ", torch.cuda.is_bf16_supported(including_emulation=False))
else:
    print("Skipped: no GPU. On a T4 the first answer is True and the second False.")

# %% [markdown]
# ## 6. Exercises
#
# Write your code in place of the `...` and run the cell. You can move on when all three say *passed*.
#
# ### Exercise 1: any device
#
# The model may live on any device. The images arrive on the CPU. Return the model's output, without naming a device.

# %% tags=["exercise:device"]
def predict(model, images):
    """Return the model's output for `images`, on the device where the model's weights live."""
    ...


lesson01.device.check(predict)

# %%
lesson01.device.panel()

# %% [markdown]
# ### Exercise 2: the right 16-bit type
#
# Return `torch.float16` or `torch.bfloat16`, whichever a GPU of this capability computes natively and trains best in.
# Capabilities are pairs such as `(7, 5)`.

# %% tags=["exercise:dtype"]
def best_dtype(capability):
    """Return the 16-bit dtype to train in on a GPU of this compute capability, from (7, 0) on."""
    ...


lesson01.dtype.check(best_dtype)

# %%
lesson01.dtype.panel()

# %% [markdown]
# ### Exercise 3: a timing that must be right
#
# `work()` asks a device for work and returns at once. `synchronize()` waits until the device has done all of it. The
# first call is slow, and something else may still be running when you are called. The check measures, and compares
# your figure with the reference in the same run.

# %% tags=["exercise:timing"]
def seconds_per_call(work, synchronize, repeats=10):
    """Return the seconds that one `work()` takes on its device, once it is warm."""
    ...


lesson01.timing.check(seconds_per_call)

# %%
lesson01.timing.panel()

# %% [markdown]
# ## Your progress code
#
# The next notebook is a new machine on Colab and does not know what you did here. This code carries your exercises
# over, and from lesson 02 on your measurements. Copy it. It names nobody.

# %%
my_progress = progress.resume()
my_progress.show()

# %% [markdown]
# ## Key points
#
# - A runtime is a borrowed machine. Ask it what it is before you trust it: `runtime.describe_runtime()`.
# - A GPU works behind Python's back. Warm up and synchronise, or you time the asking.
# - GPUs need large pieces of work; small ones cost a launch each.
# - T4: float16 with tensor cores, bfloat16 emulated, no TF32. Judge yourself by the peak you measured.
#
# This lesson trained nothing, so it adds no row to the scoreboard. The next one measures the training job that the
# whole course speeds up, and writes the first row.
#
# **Next lesson**: 02 · Read nvidia-smi
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/02_nvidia_smi.ipynb)
#
# ## Further reading
#
# - [CUDA semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html): asynchronous execution, in PyTorch's own words.
# - [Colab's FAQ](https://research.google.com/colaboratory/faq.html): limits and what is allowed.
# - [T4 datasheet](https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf).
