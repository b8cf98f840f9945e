"""FLOPs and bytes of a training step, told from shapes, against hand counts, torch's counter and FACTS 18."""

import copy
import gc
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from course_utils.flops import Flops, bytes_moved, count_flops, mfu, utilisation
from course_utils.flops_counter import OperationTally
from course_utils.flops_units import percent, si
from course_utils.memory_step import MemoryModelError, NotAStep
from course_utils.resnet import small_resnet
from course_utils.roofline import MeasuredPeak
from course_utils.timing import Timing

CE = nn.CrossEntropyLoss()


def images(count=4, size=64):
    return torch.randn(count, 3, size, size), torch.randint(0, 10, (count,))


def small_net():
    """All kinds of layers that the course's model has, few of each."""
    first = nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    return nn.Sequential(*first, nn.Conv2d(8, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def summed(output, _targets):
    return output.sum()


def peak(flops_per_s=1e12, datasheet=None):
    return MeasuredPeak(flops_per_s, 1024, torch.float32, "cpu", Timing((0.1,), "cpu", "perf_counter"), datasheet)


class Checkpointed(nn.Module):
    def __init__(self, block, use_reentrant=False):
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


class Attention(nn.Module):
    """Attention over (N, heads, length, width), and nothing else that multiplies."""

    def __init__(self, width=8):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x * self.scale
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class Grouped(nn.Module):
    def __init__(self, groups, transposed=False):
        super().__init__()
        kind = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.first, self.conv = nn.Conv2d(32, 32, 1), kind(32, 64, 3, padding=1, groups=groups)

    def forward(self, x):
        return self.conv(self.first(x)).mean((2, 3))


# --- what is counted


def test_resnet_50_takes_24_gflop_an_image_and_with_checkpointing_32():
    """FACTS 18: the model's FLOPs stay, the hardware's grow by the forward pass of the blocks."""
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet50()
    batch = torch.randn(2, 3, 224, 224), torch.randint(0, 1000, (2,))
    for name in ("layer1", "layer2", "layer3", "layer4"):
        setattr(model, name, nn.Sequential(*map(Checkpointed, getattr(model, name))))
    found = count_flops(model, batch, CE)
    assert found.samples == 2
    assert found.per_sample == pytest.approx(24.3e9, rel=0.005)
    # 32.3 here: the layers before the blocks, which are 0.2 of the forward pass's 8.2, are not computed again.
    assert found.hardware_flops / 2 == pytest.approx(32.5e9, rel=0.01)
    assert found.total == found.hardware_flops == found.model_flops + found.recompute


def test_everything_checkpointed_is_the_whole_forward_pass_again():
    model, batch = small_net(), images()
    plain = count_flops(model, batch, CE)
    whole = count_flops(Checkpointed(model), batch, CE)
    # But for the last layer: its input is the last thing that is kept, and there it stops.
    assert whole.recompute == plain.forward - plain.by_operator["addmm"]
    assert whole.model_flops == plain.model_flops


def test_reentrant_checkpointing_counts_as_recompute_too():
    first, rest = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    batch = torch.randn(4, 8), torch.randn(4, 8)
    plain = count_flops(nn.Sequential(first, rest), batch, nn.MSELoss())
    again = count_flops(nn.Sequential(first, Checkpointed(rest, use_reentrant=True)), batch, nn.MSELoss())
    assert again.model_flops == plain.model_flops
    assert again.recompute == 2 * 4 * (8 * 16 + 16 * 8)


def test_where_torchs_counter_is_right_it_is_the_same():
    model, batch = small_resnet(10, 8), images()
    ours = count_flops(model, batch, CE)
    with FlopCounterMode(display=False) as counter:
        CE(model(batch[0]), batch[1]).backward()
    assert ours.total == counter.get_total_flops()
    theirs = {operation.__name__: count for operation, count in counter.get_flop_counts()["Global"].items()}
    assert ours.by_operator == theirs
    assert list(ours.by_operator.values()) == sorted(theirs.values(), reverse=True)


def test_a_multiply_add_is_two_and_the_first_input_needs_no_gradient():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    found = count_flops(model, (torch.randn(5, 8), torch.randint(0, 4, (5,))), CE)
    assert found.forward == 2 * 5 * (8 * 16 + 16 * 4)
    assert found.backward == 2 * 5 * (8 * 16 + 2 * 16 * 4)
    model[0].requires_grad_(False)
    assert count_flops(model, (torch.randn(5, 8), torch.randint(0, 4, (5,))), CE).backward == 2 * 5 * 16 * 4


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("groups", [1, 4, 32])
def test_a_grouped_convolution_counts_its_groups_once(groups, transposed):
    """torch's formula gives the backward pass of `groups` too many (pytorch/pytorch PR#183405)."""
    found = count_flops(Grouped(groups, transposed), (torch.randn(2, 32, 16, 16), torch.zeros(2)), summed)
    first, grouped = 2 * 2 * 16 * 16 * 32 * 32, 2 * 2 * 16 * 16 * 32 * 64 * 9 // groups
    assert found.forward == first + grouped
    assert found.backward == first + 2 * grouped


def test_attention_counts_on_a_cpu_and_the_scores_computed_again_are_recompute():
    """torch 2.14's counter gives 0 (pytorch/pytorch#195460)."""
    batch = torch.randn(2, 4, 64, 8), torch.zeros(2)
    found = count_flops(Attention(), batch, summed)
    product = 2 * 2 * 4 * 64 * 64 * 8
    assert (found.forward, found.backward, found.recompute) == (2 * product, 4 * product, product)


def test_attention_inside_checkpointing_is_computed_again():
    batch = torch.randn(2, 4, 64, 8), torch.zeros(2)
    found = count_flops(Checkpointed(Attention()), batch, summed)
    product = 2 * 2 * 4 * 64 * 64 * 8
    assert (found.forward, found.backward, found.recompute) == (2 * product, 4 * product, 3 * product)


def test_kernels_that_hide_their_products_are_kept_away():
    steps, batch, width = 5, 2, 16
    lstm = count_flops(nn.LSTM(width, width), torch.randn(steps, batch, width))
    assert lstm.forward == 2 * steps * batch * (2 * width) * (4 * width)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    trained, used = (count_flops(each, torch.randn(2, 8, 32)) for each in (layer.train(), layer.eval()))
    products = 2 * 2 * 8 * (4 * 32 * 32 + 2 * 32 * 64) + 2 * 2 * (2 * 4 * 8 * 8 * 8)
    assert trained.forward == used.forward == products
    frozen = layer.requires_grad_(False)
    assert count_flops(frozen, torch.randn(2, 8, 32)).forward == products


def test_a_product_with_a_vector_counts():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.vector = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return x @ self.vector

    assert count_flops(Scores(), torch.randn(3, 6)).forward == 2 * 3 * 6


def test_without_a_loss_only_the_forward_pass_counts_and_inputs_may_come_alone():
    model, (inputs, labels) = small_net(), images()
    alone = count_flops(model, inputs)
    assert alone.backward == alone.recompute == 0
    assert (
        alone.forward
        == count_flops(model, (inputs, labels)).forward
        == count_flops(model, (inputs, labels), CE).forward
    )


def test_a_dict_of_inputs_goes_by_keyword():
    class Two(nn.Linear):
        def forward(self, left, right):
            return super().forward(left + right)

    batch = {"left": torch.randn(3, 4), "right": torch.randn(3, 4)}
    assert count_flops(Two(4, 5), batch).forward == 2 * 3 * 4 * 5


def test_a_trained_model_is_counted_in_train_mode_and_stays_in_eval_mode():
    class Twice(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return super().forward(x) if self.training else x

    model = Twice(4, 4).eval()
    assert count_flops(model, torch.randn(2, 4)).forward == 2 * 2 * 4 * 4
    assert count_flops(model, (torch.randn(2, 4), torch.zeros(2)), summed).forward == 2 * 2 * 2 * 4 * 4
    assert not model.training


def test_autocast_changes_no_count():
    model, batch = small_net(), images()
    assert count_flops(model, batch, CE, autocast=torch.bfloat16) == count_flops(model, batch, CE)


# --- what it leaves behind


def test_nothing_changes_and_nothing_stays_alive():
    from torch._subclasses.fake_tensor import FakeTensor

    def fakes():
        gc.collect()
        return [thing for thing in gc.get_objects() if type(thing) is FakeTensor]

    others = fakes()  # other tests keep predictions; held here, so that none of their addresses is given again
    model, batch = small_net().eval(), images()
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    flags = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count_flops(model, batch, CE)
        bytes_moved(model, batch, CE)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training and not model._forward_hooks
    assert torch.equal(random_state, torch.get_rng_state())
    assert flags == (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled) == (True, True)
    known = {id(thing) for thing in others}
    assert [thing for thing in fakes() if id(thing) not in known] == []


def test_a_step_that_needs_values_says_which_line_and_leaves_the_flags_as_they_were():
    class Picky(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.sum().item()

    with pytest.raises(MemoryModelError, match=r"\.item\(\).*needs values.*x\.sum\(\)\.item\(\).*are counted"):
        count_flops(Picky(4, 4), (torch.randn(2, 4), torch.zeros(2)), summed)
    assert torch.backends.mha.get_fastpath_enabled() and torch.backends.mkldnn.enabled


def test_what_the_learner_keeps_of_a_forward_pass_gets_no_fake_tensors():
    kept = []

    class Keeps(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            kept.append(out)
            return out

    assert count_flops(Keeps(4, 4), (torch.randn(2, 4), torch.zeros(2)), summed).forward == 64
    assert kept == []


def test_arguments_that_do_not_fit_together():
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match="must be an nn"):
        count_flops("model", torch.randn(2, 4))
    with pytest.raises(ValueError, match="batch must be"):
        count_flops(model, torch.randn(2, 4), CE)
    with pytest.raises(NotAStep, match="one number"):
        count_flops(model, (torch.randn(2, 4), torch.zeros(2)), lambda output, _: output)
    with pytest.raises(MemoryModelError, match="does not run"):
        count_flops(model, torch.randn(2, 5))


def test_a_formula_of_torchs_that_moves_is_noticed():
    """The tally takes FlopCounterMode's formulas on shapes: they are decorated functions."""
    aten = torch.ops.aten
    mapping = OperationTally().counter().flop_registry
    for operation in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution):
        assert mapping[operation].__wrapped__.__qualname__.startswith("OperationTally")


# --- shares of a peak


def test_mfu_and_hfu_against_both_peaks():
    flops = Flops(samples=10, forward=100, backward=200, recompute=100, by_operator={"mm": 400})
    found = utilisation(flops, 2.0, peak(1000.0, datasheet=3000.0))
    assert (found.mfu, found.hfu) == (0.15, 0.2)
    assert (found.datasheet_mfu, found.datasheet_hfu) == (0.05, pytest.approx(200 / 3000))
    assert mfu(300, 2.0, 1000.0) == 0.15
    assert "15.0%" in repr(found) and "20.0%" in repr(found) and "<table>" in found._repr_html_()


def test_without_a_datasheet_there_is_no_share_of_it():
    found = utilisation(Flops(1, 100, 200, 0, {}), 1.0, peak())
    assert found.datasheet_mfu is None and found.datasheet_hfu is None
    assert "n/a" in repr(found)
    assert mfu(100, 1.0, None) is None


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, True, "1"], ids=str)
def test_seconds_and_peaks_are_positive_numbers(bad):
    with pytest.raises(ValueError, match="seconds must be a positive number"):
        mfu(100, bad, 1e12)
    with pytest.raises(ValueError, match="peak_flops_per_s must be a positive number"):
        mfu(100, 1.0, bad)


def test_utilisation_wants_what_count_flops_gave():
    with pytest.raises(TypeError, match="what count_flops returned"):
        utilisation(1e9, 1.0, peak())
    with pytest.raises(ValueError, match="model_flops"):
        mfu(-1, 1.0, 1e12)


def test_the_table_shows_each_part_and_escapes_names():
    found = Flops(2, 600, 1200, 200, {f"<op{i}>": 200 for i in range(10)})
    assert [line.split("  ")[0] for line in repr(found).splitlines()[2:6]] == [
        "forward",
        "backward",
        "recompute",
        "total",
    ]
    assert "4 others" in repr(found) and "&lt;op0&gt;" in found._repr_html_()
    assert "n/a" in repr(Flops(1, 0, 0, 0, {}))


def test_prefixes():
    assert [si(value, "FLOP") for value in (0, 7, 999, 999.6e3, 2.43e10, 1.5e21)] == [
        "0 FLOP",
        "7 FLOP",
        "999 FLOP",
        "1.00 MFLOP",
        "24.3 GFLOP",
        "1,500 EFLOP",
    ]
    assert si(0.5, "FLOP/s") == "0.500 FLOP/s" and si(None, "FLOP") == "n/a"
    assert [percent(share) for share in (None, 0.0, 0.123, 1.5)] == ["n/a", "0.0%", "12.3%", "150%"]


# --- bytes moved


def moved(forward, *inputs):
    """Bytes by operation of a module without parameters, forward only."""

    class Module(nn.Module):
        def forward(self, *given):
            return forward(*given)

    return dict(bytes_moved(Module(), (inputs, ())).by_operator)


def test_each_operation_reads_its_inputs_and_writes_its_outputs():
    a, b = torch.randn(4, 8), torch.randn(4, 8)
    assert moved(lambda a, b: a + b, a, b) == {"add": 3 * 128}
    assert moved(lambda a, b: a @ b.T, a, b) == {"mm": 2 * 128 + 4 * 4 * 4}
    assert moved(lambda a: a.half(), a) == {"_to_copy": 128 + 64}


def test_views_are_free_and_nothing_counts_twice_or_more_than_is_stored():
    a, row = torch.randn(4, 8), torch.randn(1, 8)
    assert moved(lambda a: a.view(8, 4).t()[2:].unsqueeze(0), a) == {}
    assert moved(lambda a: a * a, a) == {"mul": 2 * 128}
    assert moved(lambda row: row.expand(4, 8).relu(), row) == {"relu": 32 + 128}
    assert moved(lambda a: torch.empty_like(a), a) == {}


def test_what_changes_a_tensor_in_place_reads_and_writes_it():
    a, b = torch.randn(4, 8), torch.randn(4, 8)
    assert moved(lambda a: a.relu_(), a) == {"relu_": 2 * 128}
    assert moved(lambda a, b: a.copy_(b), a, b) == {"copy_": 2 * 128}
    assert moved(lambda a: a.zero_(), a) == {"zero_": 128}


def test_of_a_table_only_the_rows_count_that_are_looked_up():
    found = bytes_moved(nn.Embedding(1000, 8), torch.zeros(4, 2, dtype=torch.long))
    assert dict(found.by_operator) == {"embedding": 2 * (8 * 8 * 4) + 8 * 8}


def test_a_linear_step_by_hand():
    model = nn.Linear(8, 16, bias=False)
    found = bytes_moved(model, (torch.randn(4, 8), torch.zeros(4)), summed)
    weight, rows, output = 8 * 16 * 4, 4 * 8 * 4, 4 * 16 * 4
    # Forward: the product, its sum. Backward: a 1, which is expanded for free, and the weight's gradient.
    assert found.by_operator["mm"] == (rows + weight + output) + (4 + rows + weight)
    assert found.by_operator["sum"] == output + 4
    assert found.least_bytes == rows + 4 * 4 + 2 * weight
    assert found.unfused_bytes == sum(found.by_operator.values())


def test_lower_precision_moves_less_and_checkpointing_more():
    model, batch = small_net(), images(16)
    plain = bytes_moved(model, batch, CE)
    assert plain.least_bytes < plain.unfused_bytes / 5
    assert bytes_moved(model, batch, CE, autocast=torch.bfloat16).unfused_bytes < 0.75 * plain.unfused_bytes
    assert bytes_moved(Checkpointed(model), batch, CE).unfused_bytes > 1.2 * plain.unfused_bytes
    assert bytes_moved(model, images(32), CE).unfused_bytes == pytest.approx(2 * plain.unfused_bytes, rel=0.05)


def test_the_table_of_bytes():
    found = bytes_moved(small_net(), images(), CE)
    assert "unfused" in repr(found) and "at least" in repr(found) and "<table>" in found._repr_html_()
    assert "n/a" in repr(bytes_moved(nn.Identity(), torch.randn(2, 3)))
