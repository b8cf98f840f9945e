import ctypes
import functools
import gc
import sys
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import TensorWeakRef

from course_utils import holder_search, holders, release
from course_utils.holder_paths import KINDS, REMEDIES
from course_utils.holder_roots import variables
from course_utils.holders import Holder, Holders, largest_tensors, who_holds
from course_utils.live_tensors import live_bytes, live_tensors
from course_utils.release import Freed, free

MIB = 2**20


def big():
    return torch.ones(2**18)  # 1 MiB


def look(thing, names):
    return [(one.kind, one.path) for one in who_holds(thing, namespace=names)]


def made(**values):
    """A namespace with the values, and a weak reference to its `x`: so that no variable of a test holds anything."""
    return values, weakref.ref(values["x"])


@pytest.fixture(autouse=True)
def no_last_error():
    """pytest keeps the error of a test that failed before."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)


# Names


def test_names_lists_dicts_and_attributes_are_spelt_as_python_would():
    names, r = made(x=big())
    names["history"] = {"loss": [0, 1, names["x"]], 7: (names["x"],)}
    names["trainer"] = types.SimpleNamespace(best={"state": names["x"]})
    assert look(r, names) == [
        ("name", "x"),
        ("inside", "history['loss'][2]"),
        ("inside", "trainer.best['state']"),
    ]


def test_parts_of_a_model_are_spelt_as_its_user_would():
    names, r = made(x=nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2))))
    names["head"] = names["x"][1]
    weight = TensorWeakRef(names["x"][1][0].weight)
    assert look(r, names) == [("name", "x"), ("inside", "head[0].weight")]
    assert look(weight, names) == [("inside", "x[1][0].weight"), ("inside", "head[0].weight")]


def test_a_view_and_a_numpy_array_hold_the_memory():
    names, r = made(x=big())
    names["row"] = names["x"][:10]
    names["array"] = names["x"].numpy()
    assert look(r, names) == [("name", "x"), ("view", "row"), ("array", "array.base")]
    del names["x"]
    assert r() is not None  # the array is all that holds the tensor itself
    assert look(r, names) == [("view", "row"), ("array", "array.base")]


def test_a_graph_that_shares_the_memory_under_a_tensor_of_its_own():
    out = big().requires_grad_().exp()  # exp saves its result
    names, r = made(x=out.detach())
    names["node"] = out.grad_fn
    del out
    assert look(r, names) == [("name", "x"), ("graph", "node")]


def test_a_class_attribute_of_the_notebook():
    kind = type("Config", (), {"data": big(), "__module__": "__main__"})
    names, r = {"Config": kind}, weakref.ref(kind.data)
    del kind
    assert look(r, names) == [("inside", "Config.data")]


def test_a_partial_and_a_bound_method():
    class Keeper:
        def __init__(self, x):
            self.x = x

        def use(self):
            return self.x

    names, r = made(x=big())
    names["part"] = functools.partial(print, names["x"])
    names["method"] = Keeper(names["x"]).use
    del names["x"]
    assert look(r, names) == [("inside", "part (in partial)[0]"), ("inside", "method.__self__.x")]


def test_a_cached_function():
    names, r = made(x=big())
    names["double"] = functools.lru_cache(lambda x: x * 2)
    names["double"](names.pop("x"))
    [found] = who_holds(r, namespace=names)
    assert found.kind == "cache"
    names["double"].cache_clear()
    assert r() is None


def test_keys_that_are_no_plain_values_and_long_paths_stay_short():
    names, r = made(x=big())
    names["by_type"] = {int: names["x"]}
    names["long"] = {"k" * 500: names["x"]}
    by_type, long = look(r, names)[1:]
    assert by_type == ("inside", "by_type[type]")
    assert long[1].startswith("long['kkk")
    assert len(long[1]) < 60


# Training


def test_optimizer_scheduler_and_graph():
    model = nn.Linear(4, 2)
    names, r = {"model": model}, TensorWeakRef(model.weight)
    names["optimizer"] = torch.optim.SGD(model.parameters(), momentum=0.9)
    names["scheduler"] = torch.optim.lr_scheduler.StepLR(names["optimizer"], 5)
    names["loss"] = model(torch.ones(1, 4)).sum()
    del model, names["model"]
    assert [kind for kind, _ in look(r, names)] == ["optimizer", "scheduler", "graph"]
    names.clear()
    gc.collect()
    assert r() is None


def test_a_graph_is_found_however_deep_and_whatever_holds_it():
    names, r = made(x=big())
    deep = nn.Parameter(torch.ones(1)) * names["x"]
    for _ in range(2000):
        deep = deep + 1
    names["node"] = deep.grad_fn
    del deep, names["x"]
    assert look(r, names) == [("graph", "node")]


def test_what_a_custom_function_saved_is_found():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    names, r = made(x=big().requires_grad_())
    middle = names["x"] * 1
    r = TensorWeakRef(middle)
    names["out"] = Square.apply(middle)
    del middle
    assert look(r, names) == [("graph", "out (its graph)")]


def test_a_checkpoint_is_seen_through_without_running_it_again():
    runs = []
    weight = nn.Parameter(torch.ones(1))

    def block(x):
        runs.append(1)
        return (x * weight).exp()

    names, r = made(x=big())
    names["out"] = checkpoint(block, names["x"], use_reentrant=False)
    del names["x"]
    assert r() is not None  # the checkpoint keeps its input, to run the block again
    assert [kind for kind, _ in look(r, names)] == ["graph"]
    assert len(runs) == 1


def test_a_freed_graph_holds_nothing_and_is_no_error():
    names, r = made(x=big())
    names["out"] = (nn.Parameter(torch.ones(1)) * names["x"]).sum()
    names["out"].backward()
    assert look(r, names) == [("name", "x")]


def test_a_gradient_is_held_by_its_parameter():
    names = {"model": nn.Linear(4, 2)}
    names["model"](torch.ones(1, 4)).sum().backward()
    grad = TensorWeakRef(names["model"].weight.grad)
    assert look(grad, names) == [("inside", "model.weight.grad")]


def test_hooks_of_a_tensor_and_of_a_module():
    names, r = made(x=big())
    names["weight"], names["layer"] = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)
    handles = [
        names["weight"].register_hook(functools.partial(lambda kept, grad: None, names["x"])),
        names["weight"].register_post_accumulate_grad_hook(functools.partial(lambda kept, grad: None, names["x"])),
        names["layer"].register_full_backward_hook(functools.partial(lambda kept, *_: None, names["x"])),
    ]
    del names["x"]
    assert [kind for kind, _ in look(r, names)] == ["hook", "hook"]  # one for each name
    for handle in handles:
        handle.remove()
    assert r() is None


# Elsewhere


def test_a_modules_global_variable(monkeypatch):
    module = types.ModuleType("kept_elsewhere")
    monkeypatch.setitem(sys.modules, "kept_elsewhere", module)
    names, r = made(x=big())
    module.registry = {"best": [names.pop("x")]}
    assert look(r, names) == [("module", "kept_elsewhere.registry['best'][0]")]
    module.registry.clear()
    assert r() is None


def test_a_module_that_holds_what_a_name_holds_is_found_beside_it(monkeypatch):
    module = types.ModuleType("kept_elsewhere")
    monkeypatch.setitem(sys.modules, "kept_elsewhere", module)
    names, r = made(x=nn.Linear(2, 2))
    module.tools = [torch.optim.SGD(names["x"].parameters())]
    assert [kind for kind, _ in look(r, names)] == ["name", "optimizer"]


def test_a_circle_of_garbage_is_told_from_what_cannot_be_seen():
    gc.disable()
    try:
        names, r = made(x=nn.Linear(2, 2))
        names["x"].me = names["x"]
        del names["x"]
        assert look(r, names) == [("circle", "a circle of objects")]
    finally:
        gc.enable()
    gc.collect()
    assert r() is None

    names, r = made(x=big())
    box = [names.pop("x")]
    address = id(box)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(box))
    del box
    try:
        assert look(r, names) == [("unseen", "unknown")]
    finally:
        ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object))
    assert r() is None


def test_the_last_error_a_kept_error_and_a_group_of_errors():
    def train():
        nonlocal r
        batch = big()
        r = weakref.ref(batch)
        raise ValueError("stop")

    r = None
    names = {}
    try:
        train()
    except ValueError as error:
        names["kept"] = ExceptionGroup("several", [error])
        sys.last_value = error
    assert look(r, names) == [
        ("traceback", "the last error (variable batch of train())"),
        ("exception", "kept (in ExceptionGroup)[0] (variable batch of train())"),
    ]
    names.clear()
    assert free(namespace=names).dropped == ("the last error",)
    assert not hasattr(sys, "last_value")
    assert r() is None


def test_a_running_generator_and_a_suspended_one():
    def batches(names):
        batch = big()
        yield weakref.ref(batch)
        yield look(weakref.ref(batch), names)

    names = {"loader": batches({})}
    r = next(names["loader"])
    assert look(r, names) == [("generator", "loader (variable batch)")]
    assert ("frame", "batches(), variable batch") in next(names["loader"])


# What the search itself leaves behind


def test_it_keeps_nothing_alive_even_while_its_results_live():
    names, r = made(x=big())
    results = [who_holds(names["x"], namespace=names), largest_tensors(50, namespace=names)]
    row = next(row for row in results[1] if row.held_by == "x")  # other tests' tensors may be larger
    names.clear()
    assert r() is None
    assert not who_holds(row, namespace=names).alive
    assert "has been freed" in repr(who_holds(r, namespace=names))


@pytest.mark.parametrize("call", [who_holds, largest_tensors, free], ids=["who_holds", "largest_tensors", "free"])
def test_an_interrupted_search_lets_go_although_its_error_is_kept(monkeypatch, call):
    def interrupt(*_):
        raise KeyboardInterrupt

    names, r = made(x=big())
    monkeypatch.setattr(holder_search.Search, "paths", interrupt)
    names["also"] = names["x"]
    arguments = {who_holds: (names["x"],), largest_tensors: (), free: ("x",)}[call]
    with pytest.raises(KeyboardInterrupt) as caught:
        call(*arguments, namespace=names)
    del arguments
    names.clear()
    assert r() is None
    assert caught.value.__traceback__ is not None


def test_the_search_leaves_no_copy_of_the_variables_in_a_running_call():
    def step():
        local = big()
        r = weakref.ref(local)
        who_holds(local, namespace={})
        del local
        return r()

    assert step() is None


def test_it_leaves_a_dict_that_locals_made_as_it_is():
    def step():
        local = big()
        mine = locals()
        who_holds(local, namespace={})
        return mine

    assert "local" in step()


def test_variables_reads_a_frame_whose_names_are_a_namespace():
    frames, names = [], {"frames": [], "sys": sys}
    exec("frames.append(sys._getframe()); value = 1", names)  # the frame's variables are the namespace itself
    frames = names.pop("frames")
    assert variables(frames[0])["value"] == 1
    assert names["value"] == 1


def test_the_search_ends_in_time_and_says_so():
    names, r = made(x=big())
    names["many"] = [[number] for number in range(20_000)]
    found = who_holds(r, namespace=names, budget_s=1e-9)
    assert not found.complete
    assert "ended early" in repr(found)
    assert who_holds(r, namespace=names).complete


def test_no_learners_code_runs():
    class Touchy:
        def __init__(self, x):
            self.kept = x

        def __getattr__(self, name):
            raise AssertionError(f"asked for {name}")

        def __repr__(self):
            raise AssertionError("asked for its repr")

        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = object.__hash__

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_, **__):
            raise AssertionError("a torch function ran")

    with torch._C.DisableTorchFunctionSubclass():
        names, r = made(x=torch.ones(8).as_subclass(Loud))
    names["touchy"] = Touchy(names["x"])
    names["keyed"] = {Touchy(names["x"]): 1}
    del names["x"]
    assert look(r, names) == [("inside", "touchy.kept"), ("inside", "keyed (as a key).kept")]
    assert len(largest_tensors(3, namespace=names)) == 3
    names.clear()


def test_cuda_is_never_started_nor_asked(monkeypatch):
    def asked(*_, **__):
        raise AssertionError("CUDA was asked")

    for name in ("init", "_lazy_init", "current_device", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, asked)
    names, r = made(x=big())
    assert who_holds(r, namespace=names).kinds == ("name",)
    assert largest_tensors(1, namespace=names).count >= 1
    assert free("x", namespace=names, empty_cache=True).cache_emptied is False
    assert not torch.cuda.is_initialized()


# What is handed in, and how results look


@pytest.mark.parametrize("thing", ["x", 5, None, torch.Tensor], ids=["name", "number", "none", "class"])
def test_what_cannot_be_held_is_refused(thing):
    with pytest.raises(TypeError, match=r"takes a tensor or a model") as caught:
        who_holds(thing)
    assert ("without quotes" in str(caught.value)) == isinstance(thing, str)


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="budget_s must be a positive number"):
        who_holds([], budget_s=0)
    with pytest.raises(ValueError, match="n=0 must be a whole number"):
        largest_tensors(0)
    with pytest.raises(TypeError, match=r"A namespace is a dict such as globals\(\), not list"):
        who_holds([], namespace=[])


def test_every_kind_has_a_sentence_that_names_what_to_free():
    assert len(KINDS) == len(REMEDIES) == 20
    for kind in KINDS:
        sentence = Holder(kind, "thing", "thing[0]").remedy
        assert sentence.endswith(".")
        assert "{" not in sentence
    assert Holder("name", "x", "x").remedy == "del x, or free('x')."


def test_results_are_tables_and_escape_what_they_show():
    names, r = made(x=big())
    names["<b>"] = {"<i>": names["x"]}
    found = who_holds(r, namespace=names)
    assert isinstance(found, Holders)
    assert "tensor 262144, float32, cpu, 1.0 MiB" in repr(found)
    page = found._repr_html_()
    assert "&lt;b&gt;[&#x27;&lt;i&gt;&#x27;]" in page
    assert "<b>" not in page
    names.clear()
    gone = who_holds(r, namespace=names)._repr_html_()
    assert gone == "<p>It: nothing holds it, it has been freed.</p>"


# The largest tensors


def test_the_largest_tensors_are_counted_once_and_named():
    names, _ = made(x=torch.ones(2**23))
    names["views"] = [names["x"][:10], names["x"].view(2, -1)]
    names["half"] = torch.ones(2**23, dtype=torch.float16)
    table = largest_tensors(50, namespace=names)
    ours = [row for row in table if row.held_by in names]  # other tests may have left tensors too
    assert [(row.used_bytes, row.shape, row.dtype, row.device, row.held_by) for row in ours] == [
        (32 * MIB, (2**23,), "float32", "cpu", "x"),
        (16 * MIB, (2**23,), "float16", "cpu", "half"),
    ]
    assert table.count >= 2
    assert table.total_bytes >= 48 * MIB
    assert "32.0 MiB" in repr(table)
    assert "<table>" in table._repr_html_()
    names.clear()
    assert table.total_bytes >= 48 * MIB  # a record, not a view of the present


def test_what_only_a_graph_saved_is_listed_and_found():
    names = {"loss": (nn.Parameter(torch.ones(2**22)) * 2).exp().sum()}  # exp saves its result: 16 MiB
    rows = [row for row in largest_tensors(50, namespace=names) if row.held_by == "loss (its graph)"][:2]
    assert [row.used_bytes for row in rows] == [16 * MIB, 16 * MIB]  # the parameter, and the result of exp
    assert [kind for kind, _ in look(rows[1], names)] == ["graph"]
    del names["loss"]
    assert not who_holds(rows[0], namespace=names).alive


def test_tensors_without_memory_of_their_own_are_left_out():
    from torch._subclasses.fake_tensor import FakeTensorMode

    gc.collect()
    before = live_bytes()
    with FakeTensorMode():
        fake = torch.ones(2**30)
    others = [fake, torch.ones(2**30, device="meta"), torch.empty(0), torch.ones(3).to_sparse(), nn.LazyLinear(3)]
    assert live_bytes() == before
    assert all(tensor.layout is torch.strided for tensor in live_tensors())
    assert len(others) == 5


# free


def test_free_deletes_the_name_and_says_how_much_memory_that_freed():
    names, r = made(x=big(), other=1)
    done = free("x", namespace=names)
    assert done == Freed(names=("x",), freed_bytes={"cpu": MIB})
    assert repr(done) == "Freed 1.0 MiB on cpu. Deleted: x."
    assert names == {"other": 1}
    assert r() is None


def test_free_says_who_still_holds_the_object_and_counts_only_what_went():
    names, r = made(x=big())
    names["y"] = names["x"][2:]
    done = free("x", namespace=names)
    assert done.freed_bytes == {}
    assert [one.path for one in done.still_held["x"]] == ["y"]
    assert "No tensor's memory was freed. Deleted: x." in repr(done)
    assert "still held by" in done._repr_html_()
    assert free("y", namespace=names).freed_bytes == {"cpu": MIB}
    assert r() is None


def test_free_takes_several_names_that_hold_each_other():
    names, r = made(x=nn.Linear(512, 512, bias=False))
    names["optimizer"] = torch.optim.SGD(names["x"].parameters())
    done = free("x", "optimizer", namespace=names)
    assert done.freed_bytes == {"cpu": MIB}
    assert done.still_held == {}
    assert names == {}
    assert r() is None


def test_free_takes_a_name_twice_and_without_a_name_collects_garbage():
    names, r = made(x=big())
    assert free("x", "x", namespace=names).names == ("x",)
    names, r = made(x=nn.Linear(512, 512, bias=False))
    names["x"].me = names["x"]
    del names["x"]
    assert free(namespace=names).freed_bytes == {"cpu": MIB}
    assert r() is None


def test_free_looks_into_a_list_that_cannot_be_watched_itself():
    names, r = made(x=big())
    names["history"] = [{"best": names["x"]}]
    done = free("history", namespace=names)
    assert [one.path for one in done.still_held["history"]] == ["x"]
    del names["x"]
    assert r() is None


def test_free_collects_a_circle():
    names, r = made(x=nn.Linear(512, 512, bias=False))
    names["x"].me = names["x"]
    assert free("x", namespace=names).freed_bytes == {"cpu": MIB}
    assert r() is None


def test_free_empties_the_cache_only_when_it_is_asked_to(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    assert free("x", namespace={"x": 1}).cache_emptied is None
    assert calls == []
    done = free("x", namespace={"x": 1}, empty_cache=True)
    assert (done.cache_emptied, calls) == (True, [1])
    assert "cache was emptied" in repr(done)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("modle", NameError, "Did you mean 'model'"),
        ("nothing_like_it", NameError, r"largest_tensors\(\) shows"),
        ("Out[99]", NameError, "no name '_99'"),
        ("history['loss']", ValueError, "is not a name: delete an item with del"),
        ("__name__", ValueError, "belongs to Python or IPython"),
        ("get_ipython", ValueError, "belongs to Python or IPython"),
        (torch.ones(1), TypeError, "takes names in quotes"),
    ],
    ids=["typo", "unknown", "output", "item", "dunder", "ipython", "object"],
)
def test_free_refuses_what_is_no_name_and_deletes_nothing(name, error, says):
    names = {"model": 1, "x": 2, "__name__": "kept"}
    with pytest.raises(error, match=says):
        free("x", name, namespace=names)
    assert names == {"model": 1, "x": 2, "__name__": "kept"}


def test_outside_ipython_the_names_are_those_of_main(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.x = big()
    r = weakref.ref(main.x)
    assert who_holds(r).kinds == ("name",)
    assert free("x").freed_bytes == {"cpu": MIB}
    assert not hasattr(main, "x")


def test_the_public_names_are_where_lesson_07_takes_them_from():
    assert set(holders.__all__) == {"Holder", "Holders", "LargestTensors", "LiveTensor", "largest_tensors", "who_holds"}
    assert set(release.__all__) == {"Freed", "free"}
