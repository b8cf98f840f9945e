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
# # 03 · Feed the GPU
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/03_data_loading.ipynb) [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/your__account/gpu-utilisation-course/blob/main/notebooks/03_data_loading.ipynb)
#
# > Is the GPU waiting for data?
#
# After this lesson you can
#
# - say what shape a batch has, how many bytes it moves, and what cuts them to a quarter;
# - measure the share of a step in which the device waits for its batch, and the ceiling that no loader can pass;
# - set workers, prefetching, pinning and persistence by measurement, one at a time;
# - name the stages of the work behind one image, and do each of them less often, in fewer bytes, or elsewhere.
#
# **Time**: 30 minutes to read and run, 25 minutes for the exercises. **Needs**: lesson 02. Without a GPU the device is the
# CPU itself: it then computes and loads with the same cores. The lesson says where that changes the answer.

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
# ## 1. Where you are
#
# Every Colab notebook is a new machine, so your scoreboard cannot follow you by itself. Paste the code from the end of
# lesson 02 between the quotes. Without one you begin with an empty board: nothing is lost.

# %%
import inspect
import time
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from course_utils import fast_images, image_cache, loading, plots, progress, runtime, timing, workload
from course_utils.exercises import lesson03
from course_utils.photos import prepare_photos
from course_utils.views import mebibytes

# %%
my_progress = progress.resume("")  # your code between the quotes
machine = runtime.describe_runtime()
device = runtime.pick_device()
on_gpu = device.type == "cuda"
print(machine.headline)
if machine.advice:
    print(machine.advice)

# %% [markdown]
# Lesson 02 ended with the naive training run. Here it is again, on *this* machine: everything below is compared with
# these figures. **Predict first**: for which share of the time will the device wait for data?

# %%
my_guess_percent = 20

naive = workload.train(workload.Recipe())
print(f"waiting for data: {naive.data_wait_percent:.0f} % of the time; you guessed {my_guess_percent} %")
naive

# %% [markdown]
# ## 2. What is in a batch
#
# A batch of images is one tensor of shape **(N, C, H, W)**: N images, C channels, H rows, W columns. The files on the disk
# are JPEGs: lossy, small, and in no shape that a matrix product could use.
#
# **Predict first**: a photograph is 256 × 256 pixels in colour. How many times larger is it as a float32 tensor than as
# a file?

# %%
my_guess_times = 2

photos = prepare_photos()
image_size = naive.recipe.image_size
files = ImageFolder(photos.train)
path, label = files.samples[3]
image = Image.open(path)
tensor = v2.functional.pil_to_tensor(image)  # (C, H, W) in uint8
grey = v2.functional.rgb_to_grayscale(tensor)

sizes = {
    "JPEG file": Path(path).stat().st_size,
    "grey, uint8": grey.nbytes,
    "colour, uint8": tensor.nbytes,
    "colour, float32": tensor.float().nbytes,
}
print(f"{files.classes[label]}: {tuple(tensor.shape)}, {tensor.dtype}; grey: {tuple(grey.shape)}")
print(f"float32 is {sizes['colour, float32'] / sizes['JPEG file']:.0f} times the file; you guessed {my_guess_times}")

# %%
fig, ax = plots.figure("One photograph in four forms, in KiB.", height_in=2.6)
plots.bars(ax, list(sizes), [size / 1024 for size in sizes.values()], "KiB", title="One 256 × 256 photograph")
plots.show(fig)

# %% [markdown]
# - Colour costs three channels instead of one: 3 × the bytes to move, and the first layer reads three planes. Everything
#   behind the first layer stays as it was.
# - float32 takes 4 bytes for a number that had 256 values: 1 byte, `uint8`, is enough until the GPU has it.
# - The file is small, and the CPU pays for that each time it opens it: **a JPEG trades disk space for CPU time, in every
#   epoch.**
#
# What one training batch of this recipe moves to the device:

# %%
batch = torch.empty(naive.recipe.batch_size, 3, image_size, image_size)
print(f"(N, C, H, W) = {tuple(batch.shape)}")
print(f"float32: {batch.nbytes / 2**20:.2f} MiB, uint8: {batch.nbytes / 4 / 2**20:.2f} MiB")
print(f"an epoch of {len(files)} images: {mebibytes(batch.nbytes / len(batch) * len(files))} in float32")

# %% [markdown]
# ## 3. Measure the wait, and the ceiling
#
# A training step, and the loader of a first script:

# %%
def make_step():
    """A training step of its own small model; `step(batch)` copies, computes and updates."""
    model = workload.small_resnet(len(files.classes), workload.MODEL_WIDTH[device.type]).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        images, labels = (part.to(device, non_blocking=True) for part in batch)
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


# %%
dataset = ImageFolder(photos.train, transform=workload.train_transform(image_size))


def make_loader(**keywords):
    return DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True, **keywords)


# %% [markdown]
# The wait is the time that `next()` takes while the device has nothing to do. So: wait for the device, look at the clock,
# fetch, look again.

# %%
step, batches = make_step(), iter(make_loader())
step(next(batches))  # warm-up
wait_s = work_s = 0.0
for _ in range(10):
    timing.synchronize(device)
    start = time.perf_counter()
    batch = next(batches)
    fetched = time.perf_counter()
    step(batch)
    timing.synchronize(device)
    wait_s, work_s = wait_s + fetched - start, work_s + time.perf_counter() - fetched
print(f"10 steps: {wait_s:.2f} s waiting, {work_s:.2f} s working: {100 * wait_s / (wait_s + work_s):.0f} % waiting")

# %% [markdown]
# And the **ceiling**: how fast would the loop be if batches cost nothing? Use one batch again and again. No loader can
# make this loop faster than that. `loading.data_wait` measures both, and draws the conclusion.

# %%
before = loading.data_wait(step, make_loader(), device=device, budget_s=3)
before

# %% [markdown]
# Read the verdict first. If the real rate is within 5 % of the ceiling, the loader is not the bottleneck. Then stop here,
# and go to lessons 04 and 05: no setting of this lesson can help.
#
# On a CPU the ceiling is out of reach for another reason: loading and computing share the cores.

# %% [markdown]
# ## 4. One setting at a time
#
# `DataLoader` has four settings for speed. Guess each before you measure it.
#
# | setting | what it does | what it costs |
# |---|---|---|
# | `num_workers` | other processes fetch and transform while this one trains | their start, their memory, your CPUs |
# | `prefetch_factor` | batches that each worker keeps ready | memory: workers × factor × batch |
# | `persistent_workers` | workers live on after an epoch | their memory |
# | `pin_memory` | batches lie in page-locked memory (the system may not move it), from which the GPU copies by itself; with `non_blocking=True` the CPU does not wait for that | locked memory; only with a GPU |
#
# `loading.loader_keywords` writes down a valid combination: with 0 workers, prefetching and persistence are errors.

# %%
my_guess_workers = 2  # which number of workers is best on this machine?

most = min(2 * machine.cpus, 8)
counts = sorted({0, 1, 2, min(machine.cpus, 8), most})
settings = {f"{count} workers": loading.loader_keywords(count, device=device) for count in counts}
for name, keywords in settings.items():
    print(f"{name}: {keywords}")

# %%
waits = {}
for name, keywords in settings.items():
    with loading.no_worker_advice():
        waits[name] = loading.data_wait(step, make_loader(**keywords), device=device, budget_s=4 if on_gpu else 1.5)
rates = {name: wait.samples_per_s for name, wait in waits.items()}
best = max(rates, key=rates.get)
print(f"fastest: {best}; you guessed {my_guess_workers} workers")

# %%
alt = "Workers: throughput, and the share of the time spent waiting."
fig, (left, right) = plots.figure(alt, columns=2, width_in=12)
plots.bars(left, list(rates), list(rates.values()), "samples/s", title="Throughput")
plots.bars(right, list(waits), [wait.wait_percent for wait in waits.values()], "%", title="Waiting for data")
right.set_yticklabels([])
plots.show(fig)

# %% [markdown]
# More workers than CPUs take turns on the same cores. PyTorch warns of it (*our suggested max number of worker …*); that
# number is an upper bound, not advice. `loading.no_worker_advice()` keeps that warning out of this comparison only.
#
# ### Prefetching and pinning
#
# **Predict first**: how much will a prefetch factor of 8 instead of 2 gain?

# %%
my_guess_percent = 20

two = loading.loader_keywords(2, device=device)
variants = {"2 workers": two, "prefetch_factor=8": {**two, "prefetch_factor": 8}}
if on_gpu:
    variants["pin_memory=False"] = {**two, "pin_memory": False}
else:
    print("Skipped: pin_memory. It would compare copies from pinned and from ordinary memory, which only a GPU makes.")
with loading.no_worker_advice():
    seen = {
        name: loading.data_wait(step, make_loader(**keywords), device=device, budget_s=4 if on_gpu else 1.5)
        for name, keywords in variants.items()
    }
gain = seen["prefetch_factor=8"].samples_per_s / seen["2 workers"].samples_per_s - 1
print(f"prefetching 8: {100 * gain:+.0f} %; you guessed {my_guess_percent:+} %")

# %%
fig, ax = plots.figure("Two workers with one setting changed at a time.", height_in=2.6)
spreads = [wait.samples_per_s * (wait.spread or 0) / 2 for wait in seen.values()]
plots.bars(ax, list(seen), [wait.samples_per_s for wait in seen.values()], "samples/s", spreads)
plots.show(fig)

# %% [markdown]
# The thin lines show the middle half of the steps: a difference inside them is noise. Prefetching smooths *uneven* batches.
# It cannot make the workers faster.
#
# ### Persistence
#
# Without it every epoch starts with new processes and empty queues. **Predict first**: how long is that pause?

# %%
my_guess_ms = 10

for keep in (True, False):
    loader = DataLoader(Subset(dataset, range(64)), batch_size=16, **{**two, "persistent_workers": keep})
    list(loader)  # the first epoch starts the workers
    start = time.perf_counter()
    next(iter(loader))
    pause_ms = 1e3 * (time.perf_counter() - start)
    print(f"persistent_workers={keep}: the second epoch's first batch after {pause_ms:.0f} ms")
print("you guessed", my_guess_ms, "ms")

# %% [markdown]
# Each epoch pays that pause. In long epochs it does not count; in short ones it does.
#
# ### When workers only cost
#
# A data set that is in memory already leaves them nothing to do but to send tensors from process to process:

# %%
in_memory = TensorDataset(torch.randn(512, 3, 64, 64), torch.zeros(512, dtype=torch.int64))
for count in (0, 2):
    loader = DataLoader(in_memory, batch_size=16, num_workers=count, persistent_workers=count > 0)
    list(loader)  # the first epoch starts the workers
    took = timing.time_call(lambda: list(loader), repeats=3)
    print(f"{count} workers: {took.throughput(512):,.0f} samples/s")

# %% [markdown]
# ### Overlap, drawn
#
# Each bar is a piece of time: waiting for the batch, or working on it. You do not see the workers, only what they leave to
# wait for. They make the next batch while this one is used, so *waiting* shrinks.

# %%
before.draw()

# %%
waits["2 workers"].draw()

# %% [markdown]
# On a CPU runtime the *working* part grows at the same time: workers and training share the cores.
#
# ## 5. Can these CPUs feed the device?
#
# What does the CPU do for *one* image? **Predict first**: which stage costs most?

# %%
my_guess_stage = "to float32, normalise"

paths = [path for path, _ in files.samples[::10]]
crop = v2.Compose([v2.RandomResizedCrop(image_size, scale=(0.3, 1.0)), v2.RandomHorizontalFlip()])
to_float = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*fast_images.MEAN_STD)])

encoded = [Path(path).read_bytes() for path in paths]
decoded = [Image.open(BytesIO(data)).convert("RGB") for data in encoded]
cropped = [crop(image) for image in decoded]
tensors = [to_float(image) for image in cropped]
# %%
stages = {
    "read the file": lambda: [Path(path).read_bytes() for path in paths],
    "decode the JPEG": lambda: [Image.open(BytesIO(data)).convert("RGB") for data in encoded],
    "crop, resize, flip": lambda: [crop(image) for image in decoded],
    "to float32, normalise": lambda: [to_float(image) for image in cropped],
    "stack the batch": lambda: torch.stack(tensors),
}

# %%
threads = torch.get_num_threads()
torch.set_num_threads(1)  # a worker has one
cost_ms = {name: 1e3 * timing.time_call(work).median_s / len(paths) for name, work in stages.items()}
torch.set_num_threads(threads)
per_cpu = 1e3 / sum(cost_ms.values())
print(f"most expensive: {max(cost_ms, key=cost_ms.get)}; you guessed {my_guess_stage}")
fig, ax = plots.figure("What one image costs the CPU, stage by stage.", height_in=3)
plots.bars(ax, list(cost_ms), list(cost_ms.values()), "ms", title="One image on one CPU")
plots.show(fig)

# %% [markdown]
# Now the division that decides whether workers can save you: how many CPUs would it take to feed this device?

# %%
ceiling = before.ceiling_samples_per_s
print(f"one CPU prepares {per_cpu:,.0f} images/s; {machine.cpus} CPUs at most {machine.cpus * per_cpu:,.0f}")
print(f"this device could train on {ceiling:,.0f} images/s: it needs {ceiling / per_cpu:.1f} CPUs that do nothing else")

# %% [markdown]
# Without a GPU the answer says little: the device is these CPUs, and its ceiling is low. The free Colab runtime is another
# case: a T4, and two CPU threads that share one core. Run this cell there. When a device needs more CPUs than there are,
# **no number of workers will feed it**. What remains is to spend less CPU on each image:
#
# | do it … | how | knob of the recipe |
# |---|---|---|
# | less often | decode once, keep the pixels as uint8 in RAM or on the device | `cache="ram"`, `cache="device"` |
# | in fewer bytes | send uint8, make floats on the device | `transfer="uint8"` |
# | elsewhere | crop, resize, flip a whole batch on the device | `augment="batch"` |
# | smaller | let the JPEG decoder leave out detail that the resize would throw away | `decode="reduced"` |
# | on the GPU | NVIDIA's JPEG decoder | `decode="gpu"` |
#
# ## 6. Spend less CPU
#
# ### Keep pixels, not files
#
# Decoded once, the whole data set is one uint8 tensor. Say how large before you make it, and whether that fits:

# %%
print(f"{len(files)} images × 3 × 256 × 256 bytes = {mebibytes(len(files) * 3 * 256 * 256)}")
print(image_cache.cache_need(photos, device))
pixels = torch.stack([v2.functional.pil_to_tensor(image) for image, _ in files])  # (N, 3, 256, 256), uint8
pixels.shape, pixels.dtype, mebibytes(pixels.nbytes)

# %% [markdown]
# ### Augment a batch on the device
#
# One call of a torchvision transform for a whole batch would give *every* image the same crop. That is another
# augmentation, and a weaker one. Here each image draws its own box. A resize is a weighted sum along the rows and one along
# the columns, so a GPU does it for the whole batch in two matrix products (`fast_images.resize_by_matrices`). A CPU does
# better with one image at a time.

# %%
chosen = torch.randint(len(pixels), (16,))
raw = pixels[chosen].to(device)  # uint8: a quarter of what the same images take in float32
boxes = fast_images.random_boxes(len(raw), 256, 256, device=device)  # (N, 4): left, top, right, bottom
crops = fast_images.crop_and_resize(raw, boxes, image_size)  # float32 (N, 3, image_size, image_size), 0 to 255
mirrored = torch.rand(len(raw), 1, 1, 1, device=device) < 0.5
crops = torch.where(mirrored, crops.flip(-1), crops)
images = fast_images.normalize(crops)  # what the model sees
print(tuple(raw.shape), raw.dtype, "→", tuple(images.shape), images.dtype)

# %%
alt = "Eight photographs above, and their random crops below."
fig, axes = plots.figure(alt, rows=2, columns=8, width_in=12, height_in=3.4)
for column in range(8):
    axes[column].imshow(raw[column].permute(1, 2, 0).cpu())
    axes[column + 8].imshow(crops[column].permute(1, 2, 0).byte().cpu())
for ax in axes:
    ax.set_axis_off()
plots.show(fig)

# %%
def on_cpu():
    return torch.stack([to_float(crop(files[i][0])) for i in chosen.tolist()]).to(device)


def on_device():
    return fast_images.augment_batch(pixels[chosen].to(device), image_size)  # the lines above, in one function


slow, fast = timing.time_call(on_cpu, device=device), timing.time_call(on_device, device=device)
print(f"decode and augment, image by image: {1e3 * slow.median_s:.1f} ms a batch")
print(f"from pixels, a batch at a time:     {1e3 * fast.median_s:.1f} ms a batch")
print(f"{slow.median_s / fast.median_s:.1f} times as fast")

# %% [markdown]
# Add up the bytes before you call it a saving: a whole 256 × 256 photograph in uint8 is as large as its 128 × 128 crop in
# float32. What this saves is CPU work. And on a CPU runtime the device *is* the CPU: the work moves from the wait to the
# step, and pays only as far as it shrinks.
#
# ### In the training job
#
# The same job, one change after the other. **Predict first**: which of them will win on your device?

# %%
naive_recipe = workload.Recipe()
recipes = {
    "naive": naive_recipe,
    "2 workers": naive_recipe.but(num_workers=2, persistent_workers=True, pin_memory=True, non_blocking=True),
    "uint8 over the bus": naive_recipe.but(transfer="uint8"),
    "decode reduced": naive_recipe.but(decode="reduced"),
    "decode once": naive_recipe.but(cache="ram"),
    "augment on the device": naive_recipe.but(augment="batch"),
    "both": naive_recipe.but(cache="ram", augment="batch"),
    "all on the device": naive_recipe.but(cache="device", augment="batch"),
}
if on_gpu:
    recipes["decode on the GPU"] = naive_recipe.but(decode="gpu", augment="batch")
else:
    print('Skipped: decode="gpu". With a GPU it would decode the JPEG files there, a batch at a time.')

# %%
my_guess_recipe = "2 workers"

runs = {name: workload.train(recipe, seconds=3 if on_gpu else 1.2) for name, recipe in recipes.items()}
winner = max(runs, key=lambda name: runs[name].samples_per_s)
print(f"fastest: {winner}; you guessed {my_guess_recipe}")

# %%
fig, (left, right) = plots.figure("The same job with less CPU work.", columns=2, width_in=12, height_in=4.4)
rates = [run.samples_per_s for run in runs.values()]
plots.bars(left, list(runs), rates, "samples/s", title="Throughput", emphasis=[winner])
plots.bars(right, list(runs), [run.data_wait_percent for run in runs.values()], "%", title="Waiting for data")
right.set_yticklabels([])
plots.show(fig)

# %%
for name, run in runs.items():
    for note in run.notes:
        print(f"{name}: {note}")

# %% [markdown]
# `decode="reduced"` halves the photographs while a small crop of them still has enough pixels: for 64-pixel images on a
# CPU it does; for the GPU's 128 pixels it cannot, and equals the naive run. "All on the device" and "both" differ on a GPU
# only: a CPU keeps both in the same RAM. Whether decoding on the GPU pays depends on the GPU: some, such as the A100, have a
# decoder of their own for JPEG ([nvJPEG](https://developer.nvidia.com/nvjpeg)); on others it competes with training.
#
# Decoding once costs its time once, and memory for good: the notes say how much. It fits when the data set does. Ten
# thousand such photographs take 1.8 GiB. ImageNet does not fit into the memory of Colab's machine; then smaller files,
# `decode="reduced"` or the GPU's decoder remain.
#
# ## 7. Let it be measured
#
# `tune_loader` does section 4 for you. It asks first whether the loader is the bottleneck at all. Then it climbs: more
# workers while they help, then the other settings. Wins inside the noise do not count, a setting that would not fit into
# the memory is not tried, and it stops when its time is up.

# %%
tuned = loading.tune_loader(make_loader, make_step(), device=device, budget_s=8)
tuned

# %%
settings = ", ".join(f"{name}={value!r}" for name, value in tuned.keywords.items())
print(f"DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True, {settings})")

# %% [markdown]
# ## 8. Traps
#
# Workers are separate processes. Each has a *copy* of the data set. Two faults follow from that, and neither raises
# anything. Here are two data sets that have them. Find the faults before you run on.

# %%
print(inspect.getsource(lesson03.Numbers))
print(inspect.getsource(lesson03.Lottery))

# %% [markdown]
# `check_dataset` looks for such faults without starting a worker:

# %%
for trap in (lesson03.Numbers(), lesson03.Lottery()):
    for finding in loading.check_dataset(trap, num_workers=2):
        print(f"{type(trap).__name__}: {finding}")

# %%
stream = DataLoader(lesson03.Numbers(), batch_size=None, num_workers=2)
copied = DataLoader(lesson03.Lottery(), batch_size=2, num_workers=2)
mended = DataLoader(lesson03.Lottery(), batch_size=2, num_workers=2, worker_init_fn=lesson03.fresh_generator)
print("a stream of 8 numbers, 2 workers:", [int(number) for number in stream])
print("8 random numbers, 2 workers:     ", [batch.tolist() for batch in copied])
print("with a generator for each worker:", [batch.tolist() for batch in mended])

# %% [markdown]
# The stream comes twice: each worker reads all of it. The random batches come in equal pairs: both workers hold a copy
# of one generator. (PyTorch seeds NumPy's *global* state for each worker since 2021,
# [pytorch#56488](https://github.com/pytorch/pytorch/pull/56488): the old warning about `np.random` in `__getitem__` is
# out of date. A generator of your own is not seeded for you.)
#
# Four more, which you meet in other places:
#
# - **A data set typed in a cell** cannot be found by a worker that starts afresh (`spawn` on Windows and macOS, `forkserver` on
#   Linux from Python 3.14 on). Put the class into a `.py` file, or use 0 workers.
# - **`/dev/shm` is small** in many containers. Workers hand batches over in it, and a full one ends in *Bus error*:
#   fewer workers, a smaller `prefetch_factor`, uint8 instead of float32.
# - **A long Python list in a data set** is copied into each worker page by page, since reading an object writes its
#   reference count ([pytorch#13246](https://github.com/pytorch/pytorch/issues/13246)). Keep paths and labels in arrays.
# - **Files on Google Drive** are fetched over the network, one by one. Copy them to the runtime's own disk first.

# %%
print(loading.loader_needs(batch_bytes=64 * 3 * 224 * 224 * 4, num_workers=2, prefetch_factor=2))

# %% [markdown]
# ## 9. Myths
#
# | What is said | What is true | Seen in |
# |---|---|---|
# | "`num_workers` = number of CPUs is best." | It depends on what the workers do, and the device may be the CPU. Measure. | section 4 |
# | "More workers cannot hurt." | They share the CPUs, and each takes memory. | section 4 |
# | "`pin_memory` and `non_blocking` always help." | Pinning costs a copy on the CPU. It pays when the loader's own thread does it while the GPU works. | section 4, on a GPU |
# | "The GPU is idle, so I need a faster GPU." | It waits. A faster one would wait longer. | section 3 |
# | "Workers fix a slow pipeline." | They divide the work among the CPUs that there are. Less work is what fixes it. | sections 5 and 6 |
# | "`np.random` is the same in all workers." | Not since 2021. A generator stored in the data set still is. | section 8 |

# %% [markdown]
# ## 10. Exercises
#
# ### Exercise 1: the bytes of a batch

# %% tags=["exercise:bytes"]
def batch_bytes(n, channels, height, width, dtype):
    """Return the bytes of one batch of images, shape (n, channels, height, width)."""
    ...


lesson03.bytes_of_a_batch.check(batch_bytes)

# %%
lesson03.bytes_of_a_batch.panel()

# %% [markdown]
# ### Exercise 2: a stream shared among workers
#
# Inside a worker, `get_worker_info()` returns an object with `.id` (0, 1, …) and `.num_workers`; in the training process it
# returns `None`. Return the samples that *this* worker should yield, so that together they yield each sample once.

# %% tags=["exercise:share"]
def my_share(samples, info):
    """Return the samples that this worker yields; `info` is what `get_worker_info()` returned."""
    ...


lesson03.share.check(my_share)

# %%
lesson03.share.panel()

# %% [markdown]
# ### Exercise 3: fed, measured
#
# Find a recipe that waits half as long for data as the naive one, and is at least 10 % faster. Batch size, image size,
# precision and learning rate stay as they are: other lessons are about them. The check trains both here and now, and measures again before it says no. It takes up
# to half a minute.

# %% tags=["exercise:fed"]
def fed_recipe():
    """Return a workload.Recipe that waits half as long for data as the naive one, and is 10 % faster."""
    ...


lesson03.fed.check(fed_recipe)

# %%
lesson03.fed.panel()

# %% [markdown]
# ## The new row
#
# The fastest recipe of section 6, run once more at full length. The naive row is measured anew, so that both come from
# this machine. Copy the code: lesson 04 asks for it.

# %%
after = workload.train(recipes[winner])
my_progress.add(naive.as_row(2, "nvidia_smi, naive recipe"))
my_progress.add(after.as_row(3, f"data_loading: {winner}"))
my_progress.board.draw()

# %%
my_progress.show()

# %% [markdown]
# ## Key points
#
# - Ask first whether the loader is the bottleneck: data-wait %, and the ceiling with a cached batch.
# - Workers divide the work among the CPUs that there are. They cannot add any.
# - When the CPUs are too few: decode once, keep uint8, augment whole batches on the device.
# - Change one setting at a time, and compare with the noise. `tune_loader` does that.
#
# **Next lesson**: 04 · Choose the batch size
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/04_batch_size.ipynb)
#
# ## Further reading
#
# - [torch.utils.data](https://docs.pytorch.org/docs/stable/data.html): every argument of `DataLoader`.
# - [A guide on pin_memory() and non_blocking](https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html): when they pay, with measurements.
# - [torchvision v2 transforms](https://docs.pytorch.org/vision/stable/transforms.html): what runs on tensors and on batches.
