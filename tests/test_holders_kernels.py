"""What keeps memory in a notebook, and what frees it, in a real kernel of the running Python: the cases of kind 4.

One kernel runs them all, one after the other, as a learner's notebook would. Each case's last cell reports what it saw.
"""

import json

import nbformat
import pytest
from nbclient import NotebookClient

MIB = 2**20
SETUP = """
import gc, json, threading, weakref
import torch
from torch import nn
from torch.utils.weak import TensorWeakRef
from course_utils.holders import largest_tensors, who_holds
from course_utils.release import free

def big():
    return torch.ones(2**18)  # 1 MiB

def alive(reference):
    return reference() is not None and gc.collect() >= 0 and reference() is not None

def look(reference):
    return [[one.kind, one.path] for one in who_holds(reference)]

def report(**seen):
    print("REPORT " + json.dumps(seen))
"""

# Each case: its cells, of which one that starts with "# raises" raises, and what it reports.
CASES = {
    "del is enough for a value that was never displayed": (
        """
x = big(); r = weakref.ref(x)
# %%
x;
# %%
print(x)
# %%
held = look(r); del x
report(held=held, alive=alive(r))
""",
        {"held": [["name", "x"]], "alive": False},
    ),
    "a displayed value outlives del and later outputs (MEM-05)": (
        """
x = big(); r = weakref.ref(x)
# %%
x
# %%
del x
"more"
# %%
"and more"
# %%
"and more"
# %%
after = alive(r)
[holder] = who_holds(r)
entry = holder.name.split(", ")[0]
done = free(entry)
report(after=after, kind=holder.kind, entry=entry[:4], freed=done.freed_bytes, alive=alive(r))
""",
        {
            "after": True,
            "kind": "output history",
            "entry": "Out[",
            "freed": {"cpu": MIB},
            "alive": False,
        },
    ),
    "it outlives Out.clear() and %reset -f out too": (
        """
x = big(); r = weakref.ref(x)
# %%
x
# %%
del x
Out.clear(); after_clear = alive(r)
# %%
%reset -f out
# %%
after_reset = alive(r)
kinds = who_holds(r).kinds
done = free()
report(after_clear=after_clear, after_reset=after_reset, kinds=kinds, freed=done.freed_bytes, alive=alive(r))
""",
        {
            "after_clear": True,
            "after_reset": True,
            "kinds": ["output history"],
            "freed": {"cpu": MIB},
            "alive": False,
        },
    ),
    "%xdel frees it": (
        """
x = big(); r = weakref.ref(x)
# %%
x
# %%
%xdel x
# %%
report(alive=alive(r))
""",
        {"alive": False},
    ),
    "free() frees a displayed name, a displayed view of it, and leaves the history working": (
        """
x = big(); r = weakref.ref(x)
# %%
x
# %%
x[:5]
# %%
"kept"
# %%
done = free("x")
# %%
"next"
# %%
report(last=[_, __], named="x" in globals(), freed=done.freed_bytes, held=len(done.still_held), alive=alive(r))
""",
        {"last": ["next", "kept"], "named": False, "freed": {"cpu": MIB}, "held": 0, "alive": False},
    ),
    "another name for the object stays, and is reported": (
        """
x = big(); other = x
# %%
x
# %%
done = free("x")
report(freed=done.freed_bytes, held=[one.path for one in done.still_held["x"]], other=float(other[0]))
del other
""",
        {"freed": {}, "held": ["other"], "other": 1.0},
    ),
    "an optimizer, and a scheduler through it, keep a model's weights (MEM-02)": (
        """
model = nn.Linear(512, 512, bias=False); weight = TensorWeakRef(model.weight)
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
model(torch.ones(2, 512)).sum().backward(); optimizer.step()
# %%
done = free("model"); held = done.still_held["model"].kinds
del optimizer
still = [alive(weight), who_holds(weight).kinds]
done = free("scheduler")
report(held=held, still=still, freed=done.freed_bytes, alive=alive(weight))
""",
        # The weight, its gradient and Adam's two averages are 1 MiB each; Adam's step count is one float.
        {
            "held": ["optimizer", "scheduler"],
            "still": [True, ["scheduler"]],
            "freed": {"cpu": 4 * MIB + 4},
            "alive": False,
        },
    ),
    "a kept loss keeps the model (MEM-02)": (
        """
model = nn.Linear(512, 512, bias=False); weight = TensorWeakRef(model.weight)
loss = model(torch.ones(2, 512)).square().sum(); history = {"loss": [loss]}
# %%
del model
held = look(weight)
del loss; history.clear()
report(held=held, alive=alive(weight))
""",
        {"held": [["graph", "loss (its graph)"], ["graph", "history['loss'][0] (its graph)"]], "alive": False},
    ),
    "a displayed loss keeps the model, and free() finds it in the history": (
        """
model = nn.Linear(512, 512, bias=False); weight = TensorWeakRef(model.weight)
# %%
model(torch.ones(2, 512)).square().sum()
# %%
done = free("model")
report(freed=done.freed_bytes, held=len(done.still_held), alive=alive(weight))
""",
        # With the weight go the loss and what its graph had saved: the input, and the output of 2 × 512 floats.
        {"freed": {"cpu": MIB + 2 * 4096 + 4}, "held": 0, "alive": False},
    ),
    "total += loss keeps the graph of every step": (
        """
model = nn.Linear(4096, 1); total = 0.0
for step in range(3):
    batch = torch.ones(64, 4096)
    total += model(batch).mean()
    if step == 0: first = TensorWeakRef(batch)
del batch
# %%
held = look(first)
done = free("total")
report(held=held, freed=done.freed_bytes["cpu"] - 3 * 2**20 < 1000, alive=alive(first))
""",
        {"held": [["graph", "total (its graph)"]], "freed": True, "alive": False},
    ),
    "the last error keeps the variables of its calls": (
        """
def train():
    global r
    batch = big(); r = weakref.ref(batch)
    raise RuntimeError("stop")
# %%
# raises
train()
# %%
now = look(r)
# %%
later = look(r)
done = free()
report(now=now, later=later, freed=done.freed_bytes, alive=alive(r))
# %%
%tb
# %%
%debug
""",
        {
            "now": [["traceback", "the last error (variable batch of train())"]],
            "later": [["traceback", "the last error (variable batch of train())"]],
            "freed": {"cpu": MIB},
            "alive": False,
        },
    ),
    "the last error is dropped where it holds what is to be freed": (
        """
x = big(); r = weakref.ref(x)
def use(tensor):
    raise RuntimeError("stop")
# %%
# raises
use(x)
# %%
done = free("x")
report(alive=alive(r), dropped=done.dropped)
""",
        {"alive": False, "dropped": ["the last error"]},
    ),
    "a caught error that has a name": (
        """
try:
    train()
except RuntimeError as error:
    kept = error
# %%
held = look(r)
del kept
report(held=held, alive=alive(r))
""",
        {"held": [["exception", "kept (variable batch of train())"]], "alive": False},
    ),
    "a hook": (
        """
def watch(model):
    global r
    seen = [big()]; r = weakref.ref(seen[0])
    return model.register_forward_hook(lambda *_: seen.append(1))
model = nn.Linear(4, 4); handle = watch(model)
# %%
held = look(r)
handle.remove()
report(held=held, alive=alive(r))
""",
        {"held": [["hook", "model._forward_hooks[0] (closure variable seen)[0]"]], "alive": False},
    ),
    "a closure": (
        """
def counter():
    global r
    store = big(); r = weakref.ref(store)
    return lambda: store
f = counter()
# %%
held = look(r)
del f
report(held=held, alive=alive(r))
""",
        {"held": [["closure", "f (closure variable store)"]], "alive": False},
    ),
    "a generator that has not ended": (
        """
def batches():
    global r
    batch = big(); r = weakref.ref(batch)
    yield 1
    yield batch
loader = batches(); next(loader);
# %%
held = look(r)
loader.close()
report(held=held, alive=alive(r))
""",
        {"held": [["generator", "loader (variable batch)"]], "alive": False},
    ),
    "a thread": (
        """
go, started = threading.Event(), threading.Event()
def work():
    global r
    result = big(); r = weakref.ref(result)
    started.set(); go.wait(60)
thread = threading.Thread(target=work, name="worker"); thread.start(); started.wait(60)
# %%
held = look(r)
go.set(); thread.join(60)
report(held=held, alive=alive(r))
""",
        {"held": [["thread", "worker, variable result of work()"]], "alive": False},
    ),
    "a running call": (
        """
def step():
    local = big(); r = weakref.ref(local)
    return look(r), r
held, r = step()
report(held=held, alive=alive(r))
""",
        {"held": [["frame", "step(), variable local"]], "alive": False},
    ),
    "the search keeps nothing, and nor does its displayed result": (
        """
x = big(); r = weakref.ref(x)
# %%
who_holds(x)
# %%
largest_tensors(3)
# %%
row = largest_tensors(1)[0]; held_by = row.held_by
del x
report(held_by=held_by, alive=alive(r), gone=not who_holds(row).alive)
""",
        {"held_by": "x", "alive": False, "gone": True},
    ),
    "a loop's own _ is the learner's name": (
        """
for _ in [big()]: pass
r = weakref.ref(_)
# %%
held = look(r)
del _
report(held=held, alive=alive(r))
""",
        {"held": [["name", "_"]], "alive": False},
    ),
    "IPython's own inside": (
        """
x = big(); r = weakref.ref(x)
get_ipython().kept_by_an_extension = [x]
del x
held = look(r)
del get_ipython().kept_by_an_extension
report(held=held, alive=alive(r))
""",
        {"held": [["IPython", "get_ipython().kept_by_an_extension[0]"]], "alive": False},
    ),
    "CUDA was never started": (
        "report(started=torch.cuda.is_initialized())",
        {"started": False},
    ),
}


def run(cases):
    """Run the cases' cells in one kernel; returns what each case reported."""
    book, owners = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SETUP)]), [""]
    for name, (text, _) in cases.items():
        for source in text.split("# %%\n"):
            cell = nbformat.v4.new_code_cell(source.strip())
            cell.metadata["tags"] = ["raises-exception"] if cell.source.startswith("# raises") else []
            book.cells.append(cell)
            owners.append(name)
    NotebookClient(book, timeout=120, kernel_name="python3").execute()
    reports = {}
    for owner, cell in zip(owners, book.cells, strict=True):
        for output in cell.outputs:
            for line in output.get("text", "").splitlines():
                if line.startswith("REPORT "):
                    reports[owner] = json.loads(line.removeprefix("REPORT "))
    return reports


@pytest.mark.usefixtures("one_kernel")
def test_every_retention_case_is_found_and_freed_by_the_stated_means_in_a_real_kernel():
    assert run(CASES) == {name: expected for name, (_, expected) in CASES.items()}
