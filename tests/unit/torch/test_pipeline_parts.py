"""The parts of a pipeline, alone: headers, backward passes in two parts, descriptions, pictures."""

import itertools

import pytest

torch = pytest.importorskip("torch", minversion="2.11")

from torch import nn  # noqa: E402

from hpcdist.errors import MismatchError, UsageError  # noqa: E402
from hpcdist.parallel.hybrid_options import Pipeline  # noqa: E402
from hpcdist.torch.pipeline import LayerDesc, SharedLayerDesc  # noqa: E402
from hpcdist.torch.pipeline.batches import (  # noqa: E402
    as_batch,
    common_rows,
    cut,
    cuts_of,
    rows_of,
)
from hpcdist.torch.pipeline.schedule import plan_pipeline, times_of  # noqa: E402
from hpcdist.torch.pipeline.split_backward import (  # noqa: E402
    backward_inputs,
    backward_weights,
)
from hpcdist.torch.pipeline.timeline import (  # noqa: E402
    check_picture,
    measured_bubble,
    picture_of,
)
from hpcdist.torch.pipeline.wire import DTYPES, HEADER, Kind, header_of, kinds_in  # noqa: E402

# ---- headers


@pytest.mark.parametrize("is_tuple", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_header_tells_what_follows(count, is_tuple):
    shapes = [(), (3,), (0, 2), (4, 5, 6), (1, 1, 1, 1)]
    kinds = [Kind(DTYPES[place], shapes[place], bool(place % 2)) for place in range(count)]
    assert kinds_in(header_of(kinds, is_tuple)) == (kinds, is_tuple)


def test_a_header_can_tell_of_a_failure():
    assert kinds_in(header_of(None)) is None


def test_what_a_header_cannot_tell_is_refused():
    with pytest.raises(UsageError, match=r"torch\.float8"):
        header_of([Kind(torch.float8_e4m3fn, (1,), False)])
    many = [Kind(torch.float32, (1,), False)] * (HEADER // 4 + 1)
    with pytest.raises(UsageError, match="concatenate"):
        header_of(many)


# ---- backward passes in two parts


class Tied(nn.Module):
    """Uses one weight three times, at both ends of another one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4, dtype=torch.float64) + 0.1)
        self.other = nn.Linear(4, 4).double()

    def forward(self, x):
        x = torch.tanh(x @ self.weight)
        x = torch.tanh(self.other(x @ self.weight.t()))
        return x @ self.weight


class Bypass(nn.Module):
    """Two outputs, one of which depends on no input; and a weight that is not used."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.linspace(0, 1, 4, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        apart = torch.sin(self.own * self.scale)
        return x * self.scale + apart, apart


class Double(torch.autograd.Function):
    """A function in Python, with a weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, slope):
        x, weight = ctx.saved_tensors
        return slope * weight, (slope * x).sum(0)


class InPython(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4, dtype=torch.float64))

    def forward(self, x):
        return Double.apply(torch.tanh(Double.apply(x, self.weight)), self.weight)


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double(),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).double(),
    "tied": Tied,
    "bypass": Bypass,
    "python": InPython,
    "no weights": nn.Tanh,
    "nothing": nn.Identity,
}


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_a_backward_pass_in_two_parts_is_one(model, needs_input):
    torch.manual_seed(3)
    module = MODELS[model]()
    x = torch.randn(3, 4, dtype=torch.float64).unsqueeze(0)
    weights = list(module.parameters())

    def passed():
        leaf = x.clone().requires_grad_(needs_input)
        outputs = [each for each in as_tuple(module(leaf)) if each.requires_grad]
        return leaf, outputs, [torch.cos(each.detach()) for each in outputs]

    leaf, outputs, slopes = passed()
    if not outputs:
        return
    torch.autograd.backward(outputs, slopes)
    expected = [leaf.grad, *(each.grad for each in weights)]
    for each in weights:
        each.grad = None
    leaf, outputs, slopes = passed()
    found, left = backward_inputs(outputs, slopes, [leaf] if needs_input else [])
    assert all(each.grad is None for each in weights)
    backward_weights(left)
    gradients = [*(found or [None]), *(each.grad for each in weights)]
    for one, other in zip(gradients, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_two_backward_passes_in_two_parts_add_up():
    module = Tied()
    x = torch.ones(2, 4, dtype=torch.float64)
    lefts = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        output = module(leaf)
        lefts.append(backward_inputs([output], [torch.ones_like(output)], [leaf])[1])
    for left in lefts:
        backward_weights(left)
    twice = module.weight.grad.clone()
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(twice, 2 * module.weight.grad)


# ---- descriptions


def test_a_description_builds_its_layer_anew_each_time():
    desc = LayerDesc(nn.Linear, 3, out_features=2)
    assert desc.name == "Linear"
    one, other = desc.build_layer(), desc.build_layer()
    assert one is not other
    assert one.weight.shape == (2, 3)
    assert repr(desc) == "LayerDesc(Linear, 3, out_features=2)"


def test_what_makes_no_module_is_refused():
    with pytest.raises(UsageError, match="got 3"):
        LayerDesc(3)
    with pytest.raises(UsageError, match="made an int"):
        LayerDesc(int, 3).build_layer()


def test_shared_layers_have_the_weight_that_they_name():
    desc = SharedLayerDesc("embed", nn.Embedding, None, "weight", 5, 3)
    layer = desc.build_layer()
    assert desc.weight_of(layer) is layer.weight
    deep = SharedLayerDesc("deep", nn.Sequential, None, "0.weight", nn.Linear(3, 5, bias=False))
    other = deep.build_layer()
    deep.give_weight(other, layer.weight)
    assert other[0].weight is layer.weight
    wrong = SharedLayerDesc("embed", nn.Linear, None, "kernel", 5, 3)
    with pytest.raises(UsageError, match="no parameter 'kernel'; it has weight, bias"):
        wrong.weight_of(wrong.build_layer())
    with pytest.raises(UsageError, match=r"different kinds: .*\(4, 5\).*\(5, 3\)"):
        SharedLayerDesc("embed", nn.Linear, None, "weight", 5, 4).give_weight(
            nn.Linear(5, 4), layer.weight
        )
    with pytest.raises(UsageError, match="come after shared_weight_attr"):
        SharedLayerDesc("embed", nn.Embedding, 5, 3)
    with pytest.raises(UsageError, match="come after it"):
        SharedLayerDesc("embed", nn.Embedding, None, 5, 3)


# ---- batches


def test_the_last_micro_batch_is_what_is_left():
    options = Pipeline(micro_batch_size=4, accumulate_steps=4)
    assert cuts_of(16, options) == [0, 4, 8, 12, 16]
    assert cuts_of(14, options) == [0, 4, 8, 12, 14]
    assert cuts_of(3, options) == [0, 3]
    with pytest.raises(UsageError, match=r"a batch of 17 samples.*micro_batch_size=5"):
        cuts_of(17, options)


def test_micro_batches_are_views_of_all_tensors_of_a_batch():
    x, y = torch.arange(6), torch.arange(12).view(6, 2)
    parts = cut({"x": x, "more": [y, "text"]}, [0, 4, 6])
    assert [each["x"].tolist() for each in parts] == [[0, 1, 2, 3], [4, 5]]
    assert parts[1]["more"][0].tolist() == [[8, 9], [10, 11]]
    assert parts[1]["more"][1] == "text"
    assert parts[0]["x"].data_ptr() == x.data_ptr()


def test_what_is_no_batch_is_refused():
    assert as_batch(None) == (None, None)
    for wrong in (torch.ones(2), (1, 2, 3), "ab"):
        with pytest.raises(UsageError, match=r"take \(inputs, labels\)"):
            as_batch(wrong)
    assert rows_of(None, "labels") is None
    with pytest.raises(UsageError, match="have no tensor"):
        rows_of("abc", "labels")
    with pytest.raises(UsageError, match=r"\[2, 3\] rows"):
        rows_of((torch.ones(2), torch.ones(3)), "inputs")
    with pytest.raises(UsageError, match=r"\[0\] rows"):
        rows_of(torch.tensor(1.0), "labels")
    with pytest.raises(UsageError, match=r"\[0\] rows"):
        rows_of(torch.ones(0, 3), "inputs")
    with pytest.raises(UsageError, match="no rank has a batch"):
        common_rows([(0, 0), (1, 0)])
    with pytest.raises(MismatchError, match="rank 0 has 4 samples, but rank 3 has 5"):
        common_rows([(0, 4), (1, 0), (3, 5)])
    assert common_rows([(0, 4), (1, 0), (3, 4)]) == 4


# ---- pictures


def test_a_picture_has_a_box_for_each_action():
    plan = plan_pipeline("ZBH1", 2, 3)
    spans = times_of(plan)
    picture = picture_of(spans, "a & b", in_seconds=False)
    actions = list(itertools.chain(*plan.table))
    assert picture.count("<title>") == len(actions)
    assert "a &amp; b" in picture
    assert "backward, weights" in picture
    assert "rank 1" in picture


def test_pictures_are_svg():
    assert check_picture("a.svg").name == "a.svg"
    with pytest.raises(UsageError, match=r"end it in \.svg"):
        check_picture("a.png")


def test_a_bubble_begins_with_the_first_action():
    spans = times_of(plan_pipeline("1F1B", 2, 4))
    late = [
        [each._replace(begin=each.begin + 7, end=each.end + 7) for each in own] for own in spans
    ]
    assert measured_bubble(late) == pytest.approx(0.2)
