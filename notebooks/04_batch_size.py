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
# # 04 · Choose the batch size
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/04_batch_size.ipynb) [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/your__account/gpu-utilisation-course/blob/main/notebooks/04_batch_size.ipynb)
#
# > How large a batch fits, and how large is worth it?
#
# After this lesson you can
#
# - name what fills a GPU's memory in training, and predict how much of it a batch will need before anything runs;
# - find the largest batch that fits, with almost no out-of-memory error, and recover cleanly from one;
# - measure the throughput curve and take the batch size at its knee, not at its end;
# - keep the effective batch with gradient accumulation, exactly.
#
# **Time**: 30 minutes to read and run, 25 minutes for the exercises. **Needs**: lesson 03. Without a GPU, memory is
# predicted for a T4 all the same, and the limits that you run into are simulated; the cells say so.

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
import time
from contextlib import nullcontext

import ipywidgets as widgets
import torch
import torchvision
from torch.nn import functional

from course_utils import accumulation, batch_size, memory_model, monitor, oom, plots, progress
from course_utils import runtime, throughput, workload
from course_utils.exercises import lesson04
from course_utils.views import mebibytes, number

# %%
my_progress = progress.resume("")  # the code from the end of lesson 03, between the quotes
machine = runtime.describe_runtime()
device = runtime.pick_device()
on_gpu = device.type == "cuda"
print(machine.headline)
if machine.advice:
    print(machine.advice)

# %% [markdown]
# ## 1. What fills the memory
#
# Training keeps four kinds of numbers:
#
# - **parameters**: the weights;
# - **gradients**: one for each weight;
# - **optimizer state**: AdamW keeps two more for each weight, SGD with momentum one, plain SGD none;
# - **activations**: what the forward pass leaves behind for the backward pass. These, and the batch itself, grow with the
#   batch size.
#
# **Predict first**: ResNet-18 has 11.7 million parameters. It trains with AdamW in float32 on 32 images of 224 × 224.
# Which kind is the largest, and what share of the whole is it?

# %%
my_guess_kind, my_guess_percent = "parameters", 50

resnet18 = torchvision.models.resnet18()
images, targets = torch.empty(32, 3, 224, 224), torch.zeros(32, dtype=torch.int64)
prediction = memory_model.predict_memory(
    resnet18, (images, targets), functional.cross_entropy, torch.optim.AdamW, batch_sizes=(16, 32, 64)
)
prediction

# %% [markdown]
# Nothing was computed. The model ran with *fake tensors*: they have a shape and a dtype, and no memory. PyTorch's own
# memory tracker counted what a real run would hold at its fullest moment, its *peak*. That works on any machine, also for a
# GPU that is not there. *Other* is the batch itself, buffers, and what the backward pass needs for the moment.

# %%
prediction.draw()

# %%
at_32 = prediction.at(32)
share = 100 * at_32.activations_bytes / at_32.peak_bytes
print(f"activations: {share:.0f} % at batch 32; you guessed {my_guess_kind}, {my_guess_percent} %")
print(f"peak = {mebibytes(prediction.fixed_bytes)} + {mebibytes(prediction.per_sample_bytes)} for each image")

# %% [markdown]
# A straight line: a fixed part, and so much for each sample. The fixed part is what the batch does not change: weights,
# AdamW's two states, and the gradients that exist at the peak. (At a large batch the peak comes early in the backward pass,
# when hardly a gradient is made yet. At a very small one it is the optimizer's step, and all of them count.)
# **Activations are what you trade**: a smaller image, a smaller batch, lower precision, or checkpointing (lesson 05).
#
# What the prediction leaves out on a GPU: the CUDA context, the scratch memory of cuDNN and cuBLAS (NVIDIA's libraries for
# convolutions and matrix products), and fragmentation (free memory in pieces too small to use). They come on top, so
# leave some headroom. On a CPU, too, convolutions take scratch memory that shapes do not show.
#
# ## 2. The largest batch for a T4
#
# **Predict first**: how many such images fit on a T4?

# %%
my_guess_largest = 64

largest = prediction.largest_batch("T4", headroom=0.1)
print(f"predicted for a T4, with 10 % left free: {largest}; you guessed {my_guess_largest}")

# %% [markdown]
# Where there is a GPU, that is tested now: two real steps at this size, or at what fits here if that is less.

# %%
if on_gpu:
    n = min(largest, prediction.largest_batch(device, headroom=0.1))
    real = torchvision.models.resnet18().to(device)
    adamw = torch.optim.AdamW(real.parameters())
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        pixels = torch.rand(n, 3, 224, 224, device=device)
        loss = functional.cross_entropy(real(pixels), torch.zeros(n, dtype=torch.int64, device=device))
        adamw.zero_grad()
        loss.backward()
        adamw.step()
    print(f"batch {n} ran. Predicted: {mebibytes(prediction.at(n).peak_bytes)},")
    print(f"measured: {mebibytes(torch.cuda.max_memory_allocated(device))}")
    del real, adamw, loss, pixels
else:
    print("Skipped: no GPU. It would train two steps at that size and compare the peaks.")

# %% [markdown]
# ### What if?
#
# Move the sliders. The table under them is the same without widgets.

# %%
def predict(pixels, autocast=None):
    """ResNet-18's line for images of this size."""
    images, targets = torch.empty(32, 3, pixels, pixels), torch.zeros(32, dtype=torch.int64)
    return memory_model.predict_memory(
        resnet18, (images, targets), functional.cross_entropy, torch.optim.AdamW,
        batch_sizes=(16, 64), autocast=autocast,
    )


lines = {
    "224 px, float32": prediction,
    "224 px, float16 autocast": predict(224, torch.float16),
    "112 px, float32": predict(112),
}

# %%
def what_if(batch=32, training="224 px, float32"):
    """Print the predicted peak, and whether it fits on a T4."""
    peak, room = lines[training].peak_bytes(batch), memory_model.budget_bytes("T4")
    verdict = "fits" if peak <= room else "does not fit"
    print(f"{training}, batch {batch}: {mebibytes(peak)}, {100 * peak / room:.0f} % of a T4: {verdict}")


widgets.interact(what_if, batch=widgets.IntSlider(32, 1, 1024), training=list(lines));

# %%
for training in lines:
    for batch in (64, 512):
        what_if(batch, training)

# %% [markdown]
# Half the pixels a side is a quarter of the activations. Autocast (lesson 05) runs most operations in float16, so most
# activations take two bytes instead of four. The fixed part does not shrink: weights, gradients and optimizer state stay
# float32, and float16 copies of the weights join them.
#
# ## 3. Find it on the device
#
# A prediction is not a test. `find_batch_size` starts from it, runs two real optimizer steps at each size that it tries,
# reads the peak that the device reports, corrects the line, and stops close under the limit. It gives back only a size
# that has run. Weights, optimizer, random numbers and gradients are then what they were.
#
# On a GPU the limit is the card. **On a CPU it is simulated**: the course counts the bytes of living tensors and raises
# PyTorch's own out-of-memory error at 128 MiB.

# %%
memory = None if on_gpu else oom.SimulatedMemory(128 * 2**20)  # None: the GPU's own
model_width, image_size = workload.MODEL_WIDTH[device.type], workload.IMAGE_SIZE[device.type]
model = workload.small_resnet(10, model_width).to(device).train()
optimizer = torch.optim.AdamW(model.parameters())


def trial(n):
    """One optimizer step on n images."""
    images = torch.rand(n, 3, image_size, image_size, device=device)
    targets = torch.zeros(n, dtype=torch.int64, device=device)
    loss = functional.cross_entropy(model(images), targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


# %%
example = (torch.empty(16, 3, image_size, image_size), torch.zeros(16, dtype=torch.int64))
small = memory_model.predict_memory(model, example, functional.cross_entropy, optimizer)
with memory or nullcontext():
    if memory:
        memory.track(model)
    found = batch_size.find_batch_size(
        trial, model=model, optimizer=optimizer, prediction=small, memory=memory, max_batch=8192
    )
print(f"predicted for {found.batch_size}: {mebibytes(small.at(found.batch_size).peak_bytes)}")
found

# %% [markdown]
# Every size in the table ran. Where memory set the limit, the result lies close under it; the first line says if something
# else did. Finders that double until a size fails pay with one or more out-of-memory errors, and some return a size that
# never ran. The course's [benchmarks](../docs/benchmarks.md) set them side by side.
#
# ## 4. Out of memory, on purpose
#
# The error is ordinary: you may catch it and go on. One trap is in the way. **Inside the `except` block the failed step's
# tensors are still alive**: the exception holds its frames, and the frames hold the tensors. Whatever you clean up there frees
# nothing.
#
# **Predict first**: how much is still held inside `except`, and how much after it?

# %%
my_guess_inside_mib = 0

too_large = 4 * found.batch_size if not on_gpu or found.limited_by == "memory" else 400_000


def held_bytes():
    return torch.cuda.memory_allocated(device) if on_gpu else memory.used_bytes


with memory or nullcontext():
    before = held_bytes()
    try:
        trial(too_large)
    except torch.OutOfMemoryError as error:
        verdict, inside = oom.classify_oom(error), held_bytes()
    after = held_bytes()
    print(f"held before {mebibytes(before)}, inside except {mebibytes(inside)}, after it {mebibytes(after)};")
    print(f"you guessed {my_guess_inside_mib} MiB for the middle one")
    trial(found.batch_size)
    print(f"and a batch of {found.batch_size} runs again")
verdict

# %% [markdown]
# Note the failure in the block, leave the block, then go on. `classify_oom` tells memory errors
# from others, also the many that do not say *out of memory*. Some errors leave the GPU unusable until the runtime is
# restarted; it says that too:

# %%
for text in (
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: device-side assert triggered",
    "mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)",
):
    print(oom.classify_oom(RuntimeError(text)), "\n")

# %% [markdown]
# ## 5. How large is worth it
#
# What fits is an upper bound. What you want is samples per second. **Predict first**: by how much does throughput grow from
# batch 16 to the largest size that the next cell names?

# %%
top = min(found.batch_size, 640 if on_gpu else 128)  # the training job has 640 images
print("largest size to be measured:", top)

# %%
my_guess_gain = 8.0

curve = throughput.throughput_curve(trial, device=device, largest=top, budget_s=20 if on_gpu else 6)
curve

# %%
curve.draw()

# %%
knee = curve.knee()
rate = {point.batch_size: point.samples_per_s for point in curve.points if point.fits}
first, last = min(16, max(rate)), max(rate)
print(f"{last} against {first}: {rate[last] / rate[first]:.1f} times the throughput; you guessed {my_guess_gain}")
knee

# %% [markdown]
# On a GPU the curve rises while each kernel is too small to fill the device, and flattens when it is full. On a CPU with two
# cores a few images occupy them already; what larger batches save there is the fixed cost of a step.
#
# The **knee** is the smallest batch within 5 % of the best throughput that leaves a tenth of the memory free (where memory
# can be read). Beyond it a larger batch costs memory, makes fewer updates per epoch, and buys 5 % at most. Near the limit of a
# GPU's memory it can even be slower, since cuDNN then has no room for its faster algorithms
# ([pytorch#49207](https://github.com/pytorch/pytorch/issues/49207); not measured here).
#
# **Powers of two?** They are not special: look at the sizes between them. For float16 NVIDIA asks for multiples of 8 in the
# dimensions of a matrix product; in a convolution these are the channels.

# %%
for n in sorted(rate):
    power = "power of two" if n & (n - 1) == 0 else ""
    print(f"{n:5}: {rate[n]:8,.0f} samples/s  {power}")

# %% [markdown]
# ## 6. The same batch, in pieces
#
# The **effective batch** is the samples behind one optimizer step. You want one that does not fit? Then add up gradients over
# **micro-batches** and step once:

# %%
plan = accumulation.plan_accumulation(effective=32, largest_micro=12)
plan

# %% [markdown]
# Full pieces of 12 would give 24 or 36 samples a step: another training run.
#
# **Predict first**: a batch of 10 in pieces of 4, 4 and 2. Does the mean of the three mean losses have the gradient of
# the whole batch?

# %%
my_guess_same = "yes"

twin = workload.small_resnet(10, model_width).to(device).double().eval()  # eval: BatchNorm would see other batches
images = torch.randn(10, 3, image_size, image_size, device=device, dtype=torch.float64)
targets = torch.arange(10, device=device)


def gradient(pieces, weigh):
    """The gradient of all pieces together, each one's mean loss times `weigh(its samples)`."""
    twin.zero_grad()
    for piece, labels in pieces:
        loss = functional.cross_entropy(twin(piece), labels)
        (loss * weigh(len(piece))).backward()
    return torch.cat([parameter.grad.flatten() for parameter in twin.parameters()])


# %%
whole = gradient([(images, targets)], lambda samples: 1)
pieces = list(zip(images.split(4), targets.split(4)))  # 4, 4 and 2
for name, weigh in {"mean of means": lambda samples: 1 / 3, "by share": lambda samples: samples / 10}.items():
    error = (gradient(pieces, weigh) - whole).norm() / whole.norm()
    print(f"{name:13} relative error of the gradient: {error:.1e}")
print("you guessed:", my_guess_same)

# %% [markdown]
# Each piece must count by its share. Then the gradient is the same up to rounding, short tail or not. `accumulation.micro_batches(batch, 4)` cuts any batch into
# such pieces and gives each one's share. BatchNorm is the exception: in training it normalises with
# the statistics of the *piece*, so a model with BatchNorm sees small batches.
#
# ## 7. The learning rate, and the end of the epoch
#
# Another batch size is another optimisation. There are rules of thumb for the learning rate, and no law. The course
# states them and changes nothing for you:

# %%
for name in ("SGD", "AdamW"):
    print(accumulation.learning_rate_advice(1e-3, 16, knee.batch_size, name))

# %% [markdown]
# And look at the last batch. 641 images in batches of 64 leave one image alone. BatchNorm then has the pixels of one image
# for its statistics; where a channel has a single value, PyTorch raises an error. `drop_last=True` drops that image; with
# a batch larger than the data set it drops everything.

# %%
for count, size, drop_last in ((641, 64, False), (641, 64, True), (50, 64, True), (640, knee.batch_size, False)):
    told = accumulation.epoch_warnings(count, size, drop_last, model)
    print(f"{count} samples, batch {size}, drop_last={drop_last}:", *(told or ["fine"]), sep="\n    ")

# %% [markdown]
# ## 8. In the training job
#
# The knee was measured on ready batches. The real job has the loader too. **Predict first**: does the batch at the knee help here?

# %%
# item_every=10: read the loss every tenth step, since .item() makes the CPU wait for the device
fed = workload.Recipe(cache="ram", augment="batch", item_every=10)
recipes = {
    "naive": workload.Recipe(),
    "fed (lesson 03)": fed,
    f"fed, batch {knee.batch_size}": fed.but(batch_size=knee.batch_size),
}
runs = {name: workload.train(recipe, seconds=None if on_gpu else 3) for name, recipe in recipes.items()}

# %%
alt = "The training job: naive, fed, and with the batch size at the knee."
fig, (left, right) = plots.figure(alt, columns=2, width_in=12, height_in=2.8)
plots.bars(left, list(runs), [run.samples_per_s for run in runs.values()], "samples/s", title="Throughput")
plots.bars(right, list(runs), [run.peak_memory_bytes / 2**20 for run in runs.values()], "MiB", title="Peak memory")
right.set_yticklabels([])
plots.show(fig)
print("memory is", runs["naive"].memory_source)
if not on_gpu:
    print("On a CPU that is the whole notebook's process: it does not show what the batch takes.")

# %% [markdown]
# ## 9. Myths
#
# | What is said | What is true | Seen in |
# |---|---|---|
# | "It must be a power of two." | Sizes between powers of two lie on the same curve. | section 5 |
# | "Bigger is always faster." | Up to the knee. Then it costs memory and updates. | section 5 |
# | "Bigger is always better." | Past a critical size each sample teaches less ([McCandlish et al. 2018](https://arxiv.org/abs/1812.06162)). | further reading |
# | "GPU-Util is 100 %, so the batch is large enough." | Busy is not full: below the knee throughput still rises. | the next cell |
# | "After an out-of-memory error the runtime must be restarted." | Not after an ordinary one. Leave the `except` block and go on. | section 4 |
# | "Double until it breaks finds the batch size." | It finds a limit of memory, at the price of errors. It does not look at speed. | sections 3 and 5 |

# %%
for n in sorted({first, knee.batch_size}):
    with monitor.Monitor(device=device) as watching:
        end = time.perf_counter() + 1.5
        while time.perf_counter() < end:
            trial(n)
    busy = watching.summary().busy_percent.mean
    print(f"batch {n}: busy {number(busy, '%')} ({watching.label}), {rate[n]:,.0f} samples/s")

# %% [markdown]
# ## 10. Exercises
#
# ### Exercise 1: what fits
#
# You know the line: `fixed_bytes` and `per_sample_bytes`. Return the largest batch that keeps the share `headroom` of the memory
# free, and 0 if not even one sample fits.

# %% tags=["exercise:fits"]
def largest_batch(fixed_bytes, per_sample_bytes, memory_bytes, headroom):
    """Return the largest batch size that leaves the share `headroom` (0.1: a tenth) of the memory free; 0 if none."""
    ...


lesson04.fits.check(largest_batch)

# %%
lesson04.fits.panel()

# %% [markdown]
# ### Exercise 2: an exact accumulated step
#
# The loss is `functional.cross_entropy`. The whole batch never goes through the model at once.

# %% tags=["exercise:accumulate"]
def accumulated_step(model, optimizer, images, labels, micro_size):
    """Do one optimizer step on the whole batch in pieces of `micro_size`; return the mean loss of the batch."""
    ...


lesson04.accumulate.check(accumulated_step)

# %%
lesson04.accumulate.panel()

# %% [markdown]
# ### Exercise 3: the knee, measured
#
# `trial(n)` does one training step on n images. Measure as you like, and return the smallest batch size within 5 % of the
# best throughput. The check measures a quarter of it, twice and four times as much beside it, here and now, and leaves room
# for noise.

# %% tags=["exercise:knee"]
def best_batch_size(trial):
    """Return the smallest batch size within 5 % of this device's best throughput. `trial(n)` does one step of n."""
    ...


lesson04.knee.check(best_batch_size)

# %%
lesson04.knee.panel()

# %% [markdown]
# ## The new row
#
# Earlier rows are measured anew, so that all come from this machine. Copy the code: lesson 05 will ask for it.

# %%
my_progress.add(runs["naive"].as_row(2, "nvidia_smi, naive recipe"))
my_progress.add(runs["fed (lesson 03)"].as_row(3, "data_loading: fed"))
my_progress.add(runs[f"fed, batch {knee.batch_size}"].as_row(4, f"batch_size: {knee.batch_size}"))
my_progress.board.draw()

# %%
my_progress.show()

# %% [markdown]
# ## Key points
#
# - Memory = a fixed part (weights, gradients, optimizer state) + so much per sample (activations). Predict it before you run.
# - The largest batch that fits is a limit. The batch size to use stands at the knee of the throughput curve.
# - After an out-of-memory error: leave the `except` block, then go on.
# - Accumulate by share, and keep the effective batch. Retune the learning rate when it changes.
#
# **Next lesson**: 05 · Leaner models
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/05_lean_models.ipynb)
#
# ## Further reading
#
# - [An Empirical Model of Large-Batch Training](https://arxiv.org/abs/1812.06162): where larger batches stop paying.
# - [NVIDIA's guide to matrix shapes](https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html): multiples, tiles and waves.
# - [PyTorch's FAQ on out-of-memory errors](https://docs.pytorch.org/docs/stable/notes/faq.html).
