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
# # 06 · Let Lightning run the loop
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/06_lightning.ipynb) [![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/your__account/gpu-utilisation-course/blob/main/notebooks/06_lightning.ipynb)
#
# > What does Lightning automate, and what not?
#
# After this lesson you can
#
# - turn a training loop into a `LightningModule`, and prove that the losses stay the same;
# - say what a `Trainer` does for you, what it leaves to you, and what it costs in each step;
# - log how busy the device is beside the loss, into any logger, and read Lightning's profiler;
# - distrust an answer of Lightning's batch-size finder until it has run;
# - resume an interrupted run so that it ends with the same weights.
#
# **Time**: 35 minutes to read and run, 25 minutes for the exercises. **Needs**: lesson 04; lesson 05 helps. Without a
# GPU everything runs on the CPU, with `accelerator="cpu"` and otherwise the same code.
#
# **What is installed**: Colab has no Lightning. The next cell adds `lightning` and the packages that it needs and Colab
# lacks: `pytorch-lightning`, `lightning-utilities` and `torchmetrics` (Lightning 2.6.6, Colab's image of August 2026).
# It leaves torch, torchvision and numpy as they are, and its last line says so.

# %% cellView="form" jupyter={"source_hidden": true} tags=["setup"]
# @title Setup: run this cell first. It makes `course_utils` importable and nothing else.
REPOSITORY, REF, VERSION, EXTRAS = "your__account/gpu-utilisation-course", "main", "0.1.0", "lightning"


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
import csv
import inspect
import tempfile
from pathlib import Path

from course_utils import lightning_tools  # first: it says what to do where Lightning is missing
import lightning as L  # noqa: N812 - its documentation's own name
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from course_utils import fast_images, image_cache, oom, progress
from course_utils import runtime, workload
from course_utils.exercises import lesson06
from course_utils.images import Uint8, open_data

# %%
my_progress = progress.resume("")  # the code from the end of lesson 05, between the quotes
machine = runtime.describe_runtime()
device = runtime.pick_device()
on_gpu = device.type == "cuda"
lightning_tools.quiet()  # without Lightning's hints; warnings that mean something stay
print(machine.headline)
print("Lightning", L.__version__)
if machine.advice:
    print(machine.advice)

# %% [markdown]
# ## 1. The loop, and the same in Lightning
#
# The data is what lesson 03 left: photographs that are decoded once and kept as uint8, cropped and flipped a batch at a
# time on the device.

# %%
photographs = Uint8(open_data(None, "train", None).dataset, None)  # no transform: uint8, as decoded
cached = image_cache.CachedImages(photographs, torch.device("cpu"), False)  # False: no progress bar
augment = fast_images.DeviceAugment(workload.IMAGE_SIZE[device.type])


def new_loader(batch_size=64):
    """The photographs in a shuffled order, always the same one."""
    order = torch.Generator().manual_seed(0)
    return DataLoader(
        cached, batch_size, shuffle=True, generator=order, collate_fn=image_cache.as_is
    )


def new_model():
    torch.manual_seed(0)
    return workload.small_resnet(10, workload.MODEL_WIDTH[device.type])


# %% [markdown]
# The loop of the earlier lessons, with nothing left out:

# %%
def raw_loop(model, loader):
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = functional.cross_entropy(model(augment(images)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# And as a `LightningModule`:

# %%
class Classifier(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = functional.cross_entropy(self.model(augment(images)), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# %% [markdown]
# | the loop | in Lightning | who does it |
# |---|---|---|
# | `for images, labels in loader:` | `trainer.fit(module, loader)` | Trainer |
# | `model.to(device).train()`, `images.to(device)` | `accelerator=`, `devices=` | Trainer |
# | `loss = …` | `training_step` returns it | **you** |
# | `optimizer = …` | `configure_optimizers` returns it | **you** |
# | `zero_grad()`, `backward()`, `step()` | nothing to write | Trainer |
# | `losses.append(loss.item())` | `self.log("train_loss", loss)` | you say what, the logger where |
#
# One difference does not show in the losses: `.item()` makes the CPU wait for the GPU in every step. `self.log` keeps a
# tensor, and reads it when the logger writes, every 50th step if you say nothing.
#
# A Trainer has many defaults. Here most are off, so that you see what each one adds. No progress bar either: these runs
# are short.

# %%
scratch = tempfile.TemporaryDirectory()  # all files of this lesson; the last cell removes it
folder = Path(scratch.name)
plain = {
    "accelerator": "gpu" if on_gpu else "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "default_root_dir": folder,
}

# %% [markdown]
# ## 2. The same losses
#
# **Predict first**: same seed, same data, same operations. How far apart are the two loss curves after one epoch?

# %%
my_guess_difference = 0.01

raw_losses = raw_loop(new_model(), new_loader())
recorder = lightning_tools.LossRecorder()
L.Trainer(**plain, callbacks=[recorder]).fit(Classifier(new_model()), new_loader())
same = lightning_tools.compare_losses(raw_losses, recorder.losses, rtol=1e-2 if on_gpu else 1e-5)
print("you guessed", my_guess_difference)
same

# %%
same.draw()

# %% [markdown]
# Lightning runs the same operations in the same order. On a CPU the numbers are equal to the last bit. On a GPU some
# kernels add up in an order that changes from run to run; two runs of the *raw loop* differ there too.
#
# ## 3. What Trainer automates
#
# | you want | the loop | Trainer |
# |---|---|---|
# | mixed precision (lesson 05) | `autocast`, `GradScaler`, `unscale_` before clipping | `precision="16-mixed"` or `"bf16-mixed"` |
# | accumulation (lesson 04) | divide the loss, step every fourth batch | `accumulate_grad_batches=4` |
# | clipping | `clip_grad_norm_` | `gradient_clip_val=1.0` |
# | another device, several | `.to(device)`, `torchrun`, DDP | `accelerator=`, `devices=`, `strategy=` |
# | logging | your own lists and files | `logger=`, `log_every_n_steps=` |
# | checkpoints | `torch.save` of model, optimizer, … | `callbacks=[ModelCheckpoint(…)]` |
# | validation | a second loop, `eval()`, `no_grad()` | `validation_step` |
#
# Two of these differ from what lessons 04 and 05 taught.
#
# **Predict first**: a model with one weight, whose gradient is always 1. SGD with lr = 1, ten batches,
# `accumulate_grad_batches=4`. The groups have 4, 4 and 2 batches, so there are three steps. Where does the weight end?
# (It starts at 0.)

# %%
my_guess_weight = -3.0


class OneWeight(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return 1.0 * self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


one = OneWeight()
L.Trainer(**plain, accumulate_grad_batches=4).fit(one, DataLoader(range(10)))
print(f"it ends at {one.weight.item()}; you guessed {my_guess_weight}")

# %% [markdown]
# Steps of 1, 1 and 0.5: Trainer divides by four, also the last group of two. Lesson 04 weighed each piece by its share.
# Choose a number that divides the batches of an epoch, or drop the last ones with `limit_train_batches`.
#
# The second: with `precision="16-mixed"` the scaler skips a step whose gradients overflow. **Trainer moves a schedule
# by step all the same**; lesson 05's loop does not. Here a scaled gradient overflows on purpose, on the CPU, at batch
# 1: 1e36 times the scale of 65,536 is more than float32 holds.

# %%
from lightning.pytorch.plugins.precision import MixedPrecision


class Overflows(OneWeight):
    def training_step(self, batch, batch_idx):
        rate = self.optimizers().param_groups[0]["lr"]
        print(f"batch {batch_idx}: weight {self.weight.item():6.3f}, lr {rate}")
        return self.weight * (1e36 if batch_idx == 1 else 1.0)

    def configure_optimizers(self):
        sgd = torch.optim.SGD(self.parameters(), lr=1.0)
        halve = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.5)
        return [sgd], [{"scheduler": halve, "interval": "step"}]


half = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
L.Trainer(**plain | {"accelerator": "cpu"}, plugins=[half]).fit(Overflows(), DataLoader(range(4)))

# %% [markdown]
# From batch 1 to batch 2 the weight stood still and the learning rate was halved. A few skipped steps at the start do
# no harm; a short warm-up schedule may be over before training has begun.
#
# Clipping is one option:

# %%
clipped = OneWeight()
L.Trainer(**plain, gradient_clip_val=0.5).fit(clipped, DataLoader(range(10)))
print(f"ten steps of length 1, clipped to 0.5: {clipped.weight.item()}")

# %% [markdown]
# So is precision. What it buys depends on the device (lesson 05):

# %%
if on_gpu:
    half_type = workload.low_precision(device)
    word = "16-mixed" if half_type is torch.float16 else "bf16-mixed"
    for precision in ("32-true", word):
        monitor = lightning_tools.MonitorCallback()
        options = plain | {"precision": precision, "gradient_clip_val": 1.0, "max_epochs": 4}
        L.Trainer(**options, callbacks=[monitor]).fit(Classifier(new_model()), new_loader())
        print(f"{precision}: {monitor.measurement.samples_per_s:,.0f} samples/s")
else:
    print("Skipped: no GPU. It would train in float32 and in mixed precision, and print samples/s.")
    print('A CPU takes precision="bf16-mixed"; lesson 05 measures what that does there.')

# %% [markdown]
# ## 4. How busy, while it trains
#
# `MonitorCallback` is an ordinary Lightning callback. It logs what the scoreboard shows into whatever logger the
# Trainer has: `CSVLogger`, `TensorBoardLogger`, several, or none.
#
# **Predict first**: what share of the time does the device wait for data here?

# %%
my_guess_wait_percent = 20

monitor = lightning_tools.MonitorCallback()
trainer = L.Trainer(
    **plain | {"max_epochs": 40 if on_gpu else 2, "logger": CSVLogger(folder)},
    callbacks=[monitor],
    log_every_n_steps=5,
)
trainer.fit(Classifier(new_model()), new_loader())
print(f"you guessed {my_guess_wait_percent} %")
monitor.measurement

# %%
monitor.draw()

# %% [markdown]
# The same numbers are in the log, beside the loss:

# %%
with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
    rows = list(csv.DictReader(file))
for name in rows[0]:
    values = [f"{float(row[name]):,.1f}" for row in rows if row[name]]
    if name == "train_loss" or name.startswith("monitor/"):
        print(f"{name:28}", *values[:6])

# %% [markdown]
# **TensorBoard or matplotlib?** TensorBoard while a run goes on: it shows long runs, several side by side, also from
# another machine. `monitor.draw()` at the end: a picture that stays in the saved notebook, works without a server, and
# goes into a report. For TensorBoard write `logger=TensorBoardLogger(folder)`, from `lightning.pytorch.loggers` (it
# needs the package `tensorboard`, which Colab has), then in a cell of its own
#
# ```
# %load_ext tensorboard
# %tensorboard --logdir FOLDER
# ```
#
# ## 5. What Trainer costs
#
# **Trainer makes no kernel faster.** It runs your `training_step` and adds Python around it: hooks, counters, the
# logger.
#
# **Predict first**: how many microseconds does Trainer add to each step?

# %%
my_guess_us = 100

overhead = lightning_tools.overhead_per_step(device=device, budget_s=6)
print(f"you guessed {my_guess_us} µs")
overhead

# %%
overhead.draw()

# %% [markdown]
# The rounds take turns, and *noise* is the spread of their differences. Each line after *Trainer* adds to the one
# before it. What does it mean for a step of the course's job, as the monitor measured it?

# %%
step_s = monitor.measurement.seconds / monitor.measurement.batches
print(f"a step of 64 photographs: {1e3 * step_s:.1f} ms")
print(f"Trainer's part: {100 * overhead.share(step_s):.1f} % if the device waited for it")

# %% [markdown]
# On a GPU it usually does not wait: the CPU runs ahead and queues kernels, and Trainer's Python hides behind them. It
# stops hiding where steps are very short (small models, small batches), or where something makes the CPU wait for the
# GPU in every step.
#
# ## 6. Lightning's profiler
#
# `SimpleProfiler` adds up how long each of Trainer's actions took, by the CPU's clock.

# %%
profiler = SimpleProfiler()
L.Trainer(**plain, profiler=profiler).fit(Classifier(new_model()), new_loader())
spent = {name: sum(times) for name, times in profiler.recorded_durations.items()}
for name in sorted(spent, key=spent.get, reverse=True)[:8]:
    print(f"{spent[name]:7.3f} s  {len(profiler.recorded_durations[name]):3} ×  {name}")

# %% [markdown]
# The actions lie inside each other. `run_training_epoch` holds the rest, and `optimizer_step` holds `training_step` and
# `backward`: Trainer hands all of them to the optimizer as one function. `train_dataloader_next` is the wait for data.
# On a GPU these are the times in which kernels are *queued*: a step may look cheap, and whatever waits next for the GPU
# expensive. For kernels take `PyTorchProfiler(dirpath=folder, filename="kernels")`, which runs `torch.profiler` and
# writes its table to a file. (`profiler="simple"` and `"pytorch"` write theirs as a log line, which `quiet()` hides.)
#
# ## 7. The batch-size finder, and where it goes wrong
#
# `Tuner.scale_batch_size` doubles the batch until memory runs out. Here the memory is simulated, 4.5 MB on the CPU, so
# that the same happens to everybody. The module needs an attribute `batch_size`, and a loader that asks it.

# %%
class Tunable(L.LightningModule):
    def __init__(self, samples):
        super().__init__()
        self.batch_size, self.data, self.ran = 1024, lightning_tools.Rows(samples), set()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def train_dataloader(self):
        return DataLoader(self.data, self.batch_size, collate_fn=image_cache.as_is)

    def training_step(self, batch, batch_idx):
        rows, labels = batch
        self.ran.add(len(rows))
        return functional.cross_entropy(self.model(rows), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


# %% [markdown]
# **Predict first**: was the size that it returns ever run?

# %%
my_guess_ran = "yes"

tunable, memory = Tunable(20_000), lightning_tools.FinderMemory(4_500_000)
with memory:
    memory.track(tunable.model)
    tuner = Tuner(L.Trainer(**plain | {"accelerator": "cpu"}))
    found = tuner.scale_batch_size(tunable, mode="power", init_val=1024)
print(f"returned {found:,}; ran {sorted(tunable.ran)}; you guessed {my_guess_ran}")

# %% [markdown]
# So run it:

# %%
memory = lightning_tools.FinderMemory(4_500_000)
memory.track(tunable.model)
try:
    with memory:
        rows, labels = next(iter(tunable.train_dataloader()))
        functional.cross_entropy(tunable.model(rows), labels).backward()
        print(f"a batch of {len(rows):,} runs")
except torch.OutOfMemoryError as error:
    verdict = oom.classify_oom(error)
    print(f"a batch of {tunable.batch_size:,}: {verdict.kind}")

# %% [markdown]
# The search stops at `max_val=8192` and returns that, without a trial. The course's [benchmarks](../docs/benchmarks.md)
# list more of this kind: a batch larger than the data set, an untested 1 where nothing fits, and with
# `mode="binsearch"` 7,782 where 5,000 is the limit. It never looks at throughput either: lesson 04's knee is not what
# it searches. Exercise 2 makes its answer safe.
#
# ## 8. Why `devices=1` in a notebook
#
# Training on several devices takes several processes. A script starts them by running itself again; a notebook has no
# script. Lightning can *fork* the notebook's process (`strategy="ddp_notebook"`). Once CUDA has been used in it, for
# which one `.to("cuda")` is enough, the new processes fail: *Cannot re-initialize CUDA in forked subprocess*. With
# `devices="auto"` Lightning 2.6 takes a single GPU in a notebook, and its log calls more "experimental and unstable"; a
# script would get all of them. So in a notebook say `devices=1`: it means the same everywhere. For more, write a script
# (lesson 09).

# %%
automatic = L.Trainer(**plain | {"devices": "auto"})
print(f"GPUs here: {torch.cuda.device_count()}; devices=\"auto\" takes {automatic.num_devices}")
print("CUDA has been used in this process:", torch.cuda.is_initialized())

# %% [markdown]
#
# ## 9. Resume without losing a step
#
# Colab disconnects. A checkpoint every few steps should make that harmless.
#
# **Predict first**: 40 samples, batches of 4, stopped after 6 of 10 batches and resumed from the checkpoint of batch 6.
# How many of the 40 samples are seen twice in this epoch?

# %%
my_guess_twice = 0


class Seen(OneWeight):
    """Notes which samples it has seen, and is interrupted at batch `stop`."""

    def __init__(self, stop):
        super().__init__()
        self.stop, self.samples = stop, []

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.stop:
            raise RuntimeError("disconnected")
        self.samples += batch.tolist()
        return 1.0 * self.weight


# %%
def interrupt_and_resume(new_loader, here, *callbacks):
    """Train one epoch in two parts; the samples that each part has seen."""
    options = plain | {"enable_checkpointing": True, "accelerator": "cpu"}
    for stop, checkpoint in ((6, None), (None, "last")):
        saving = ModelCheckpoint(here, every_n_train_steps=1, save_last=True)
        module, trainer = Seen(stop), L.Trainer(**options, callbacks=[*callbacks, saving])
        try:
            trainer.fit(module, new_loader(), ckpt_path=checkpoint)
        except RuntimeError as error:
            print("interrupted:", error)
        yield module.samples


# %% tags=["explains-warning"]
first, second = interrupt_and_resume(lambda: DataLoader(range(40), 4, shuffle=True), folder / "a")
print(f"batches: {len(first) // 4} + {len(second) // 4}")
print(f"seen twice: {len(set(first) & set(second))}, you guessed {my_guess_twice}")
print(f"never seen: {len(set(range(40)) - set(first) - set(second))}")

# %% [markdown]
# Lightning warned: *…your dataloader is not resumable…*. It restores the **number** of the batch, the weights, the
# optimizer and the schedule. It does not restore the **order** of the data, nor the random numbers for augmentation and
# dropout. The rest of the epoch is drawn from a new shuffle.
#
# Two small classes add what is missing. `ResumableLoader` draws its order from a seed and the epoch's number, and has
# the two methods that Lightning asks for, `state_dict` and `load_state_dict`. `RandomState` is a callback that carries
# the random states in the checkpoint.

# %%
first, second = interrupt_and_resume(
    lambda: lightning_tools.ResumableLoader(range(40), 4, seed=0), folder / "b"
)
print(f"seen twice: {len(set(first) & set(second))}")
print(f"never seen: {len(set(range(40)) - set(first) - set(second))}")

# %% [markdown]
# Now the whole proof, on half of the photographs with their random crops: two epochs of five steps at a stretch, and
# two epochs interrupted at step 8 with a checkpoint at every third. The resumed run starts at step 6, and trains 6 and
# 7 again.

# %%
class Disconnect(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 8:
            raise RuntimeError("disconnected at step 8")


def train(here, *callbacks, resume=None):
    half = Subset(cached, range(320))
    loader = lightning_tools.ResumableLoader(half, 64, seed=0, collate_fn=image_cache.as_is)
    saving = ModelCheckpoint(here, every_n_train_steps=3, save_last=True)
    options = plain | {"max_epochs": 2, "enable_checkpointing": True}
    module = Classifier(new_model())
    trainer = L.Trainer(**options, callbacks=[lightning_tools.RandomState(), *callbacks, saving])
    trainer.fit(module, loader, ckpt_path=resume)
    return module


# %%
whole = train(folder / "whole")
try:
    train(folder / "parts", Disconnect())
except RuntimeError as error:
    print(error)
torch.manual_seed(1234)  # another process would have other random numbers
resumed = train(folder / "parts", resume="last")
pairs = zip(whole.state_dict().values(), resumed.state_dict().values())
largest = max(float((one.float() - other.float()).abs().max()) for one, other in pairs)
print(f"largest difference of any weight: {largest}")

# %% [markdown]
# On a CPU it is exactly 0. On a GPU it is as small as two runs of the same code differ.
#
# - Checkpoints come **at the end of a step** (`every_n_train_steps`). One that is written when the error happens may
#   lie in the middle of one, and its batch would be lost.
# - The interrupt button works too: Trainer calls its callbacks' `on_exception`, and the cell ends with `SystemExit`.
# - A checkpoint from elsewhere can be made to run code when it is loaded. For a file, torch refuses that by default
#   since 2.6; for an address that begins with `http`, Lightning 2.6 does not. Write `fit(…, weights_only=True)`.
# - Save them where they survive: on Colab, a mounted Drive, not the runtime's disk.
#
# ## 10. Myths
#
# | What is said | What is true | Seen in |
# |---|---|---|
# | "Lightning makes training faster." | It runs the same kernels and adds a little Python to every step. | sections 2 and 5 |
# | "Lightning is slow." | A fixed time a step. It shows where steps are very short. | section 5 |
# | "`accumulate_grad_batches=4` equals a batch four times as large." | Not for a short last group, and not with BatchNorm. | section 3; lesson 04 |
# | "The Tuner's batch size has been tested." | It may never have run. | section 7 |
# | "Resuming continues where it stopped." | The weights do. The data's order and the random numbers do not. | section 9 |
# | "`devices="auto"` uses all GPUs." | In a script. In a notebook Lightning 2.6 takes one. | section 8 |
#
# ## 11. Exercises
#
# ### Exercise 1: from the loop to the module
#
# The loop: `functional.cross_entropy(model(inputs), labels)`, AdamW with learning rate `lr`, nothing else. The check
# trains both with the same seed and compares every loss.

# %% tags=["exercise:module"]
def as_module(model, lr):
    """Return a LightningModule that trains `model` as the loop above does, and logs "train_loss" in every step."""
    ...


lesson06.module.check(as_module)

# %%
lesson06.module.panel()

# %% [markdown]
# ### Exercise 2: an answer that has run
#
# `find()` is the batch-size finder's answer. It may be untested, larger than the data set, or wrong.

# %% tags=["exercise:finder"]
def tested_batch_size(find, fits, samples):
    """Return a batch size that has run: start at what `find()` says; 0 if nothing fits.

    `fits(n)` trains two steps on n samples and says whether they went through; the data set has `samples`.
    """
    ...


lesson06.finder.check(tested_batch_size)

# %%
lesson06.finder.panel()

# %% [markdown]
# ### Exercise 3: a leaner Trainer, measured
#
# These options do too much in every step. `folder` is where logs and checkpoints go.

# %%
print(inspect.getsource(lesson06.heavy_options))


# %% tags=["exercise:trainer"]
def lean_options(folder):
    """Return the options of a Trainer for the same run that is 1.5 times as fast a step.

    It still logs at least every 10th step, and at the end there is a checkpoint of the last step, both in `folder`.
    """
    ...


lesson06.trainer.check(lean_options)

# %%
lesson06.trainer.panel()

# %% [markdown]
# ## The new row
#
# Rows 2 and 4 are measured anew; the others are what your code says. Rows 4 and 6 train the same model on the same
# photographs: they differ by Trainer, its logging, and noise. Copy the code: lesson 07 will ask for it.

# %%
seconds = None if on_gpu else 3
fed = workload.Recipe(cache="ram", augment="batch", item_every=10, batch_size=64)
my_progress.add(workload.train(seconds=seconds).as_row(2, "nvidia_smi, naive recipe"))
my_progress.add(workload.train(fed, seconds=seconds).as_row(4, "batch_size: 64, raw loop"))
my_progress.add(monitor.measurement.as_row(6, "lightning: the same, by Trainer"))
my_progress.board.draw()

# %%
my_progress.show()
scratch.cleanup()

# %% [markdown]
# ## Key points
#
# - A LightningModule holds what is yours: the loss and the optimizer. Trainer does the rest, with the same numbers.
# - It costs a fixed time a step, and makes no kernel faster. Measure it, and keep what logs and saves out of every
#   step.
# - Two details to know: a short last group of accumulation counts less, and a skipped float16 step still moves the
#   schedule.
# - A finder's answer is a guess until it has run.
# - To resume exactly, the data's place and the random states belong in the checkpoint.
#
# **Next lesson**: 07 · Clear the cache
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/your__account/gpu-utilisation-course/blob/main/notebooks/07_clear_cache.ipynb)
#
# ## Further reading
#
# - [Lightning's documentation](https://lightning.ai/docs/pytorch/stable/): `Trainer`'s options, callbacks, loggers.
# - [Several GPUs with Lightning](https://lightning.ai/docs/pytorch/stable/accelerators/gpu_intermediate.html), and what a notebook allows.
# - [The discussion behind the warning of section 9](https://github.com/Lightning-AI/pytorch-lightning/issues/18780).
# - [torchdata's StatefulDataLoader](https://docs.pytorch.org/data/main/torchdata.stateful_dataloader.html): a loader that can be resumed, also with workers.
