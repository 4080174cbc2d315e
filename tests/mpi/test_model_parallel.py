"""Layers cut over the ranks compute what one process computes, on the ranks of this MPI job."""

import copy
import weakref

import numpy as np
import pytest
from tiers import first_of

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import hpcdist as dist  # noqa: E402
from hpcdist.parallel.hybrid import (  # noqa: E402
    HybridCommunicateGroup,
    current_grid,
    set_current_grid,
)
from hpcdist.parallel.topology import CommunicateTopology  # noqa: E402
from hpcdist.torch.model_parallel import functions  # noqa: E402
from hpcdist.torch.model_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from hpcdist.torch.model_parallel.random import (  # noqa: E402
    get_rng_state_tracker,
    model_parallel_random_seed,
)
from hpcdist.torch.model_parallel.sequence import (  # noqa: E402
    AllGatherOp,
    ColumnSequenceParallelLinear,
    GatherOp,
    ReduceScatterOp,
    RowSequenceParallelLinear,
    ScatterOp,
    is_sequence_parallel_parameter,
    mark_as_sequence_parallel_parameter,
    register_sequence_parallel_allreduce_hooks,
)
from hpcdist.torch.model_parallel.states import is_cut  # noqa: E402
from hpcdist.torch.model_parallel.ulysses import UlyssesAttention, sep_attention  # noqa: E402
from hpcdist.torch.recompute import recompute, recompute_hybrid  # noqa: E402

WIDTH, HEADS, LENGTH, WORDS, ROWS = 24, 12, 12, 24, 5  # go evenly into 1, 2, 3 and 4 ranks
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
DTYPES = first_of([torch.float64, torch.float32])


def assert_near(got, expected):
    tolerance = TOLERANCE[expected.dtype] * max(1.0, float(expected.detach().abs().max()))
    assert got.shape == expected.shape
    assert float((got - expected).detach().abs().max()) <= tolerance


def own(x, world, dim):
    return x.chunk(world.nranks, dim)[world.rank]


def seeded(make, seed=3):
    torch.manual_seed(seed)
    return make()


def drawn(*shape, dtype=torch.float64, seed=7, grad=False):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return values.requires_grad_(grad)


def assert_same_gradients(layer, reference, world):
    """Each rank has its part of the gradients of the whole layer."""
    for name, parameter in layer.named_parameters():
        expected = reference.get_parameter(name).grad
        if parameter.is_distributed:
            expected = own(expected, world, parameter.split_axis)
        assert_near(parameter.grad, expected)


# ---- tensors on their way

PAIRS = [
    (functions.copy_to, {}),
    (functions.reduce_from, {}),
    (functions.scatter_to, {"dim": -1}),
    (functions.gather_from, {"dim": 1}),
    (functions.all_gather, {"dim": 0}),
    (functions.all_gather, {"dim": 1}),
    (functions.reduce_scatter, {"dim": 0}),
    (functions.reduce_scatter, {"dim": -1}),
    (functions.all_to_all, {"cut": 0, "join": 1}),
    (functions.all_to_all, {"cut": -1, "join": 0}),
]


def in_numpy(function, options, all_x, rank):
    """Return what a move makes of what all ranks have."""
    size, name = len(all_x), function.__name__
    dim = options.get("dim", 0)
    if name == "copy_to":
        return all_x[rank]
    if name == "reduce_from":
        return sum(all_x)
    if name == "scatter_to":
        return np.array_split(all_x[rank], size, dim)[rank]
    if name in ("gather_from", "all_gather"):
        return np.concatenate(all_x, dim)
    if name == "reduce_scatter":
        return np.array_split(sum(all_x), size, dim)[rank]
    cut, join = options["cut"], options["join"]
    return np.concatenate([np.array_split(each, size, cut)[rank] for each in all_x], join)


BACKWARD = {
    "copy_to": (functions.reduce_from, {}),
    "reduce_from": (functions.copy_to, {}),
    "scatter_to": (functions.gather_from, {}),
    "gather_from": (functions.scatter_to, {}),
    "all_gather": (functions.reduce_scatter, {}),
    "reduce_scatter": (functions.all_gather, {}),
    "all_to_all": (functions.all_to_all, {}),
}


@pytest.mark.parametrize(("function", "options"), PAIRS)
def test_a_tensor_and_its_gradient_are_moved(world, function, options):
    size = world.nranks
    all_x = [drawn(12, 2, 24, seed=each).numpy() for each in range(size)]
    x = torch.tensor(all_x[world.rank], requires_grad=True)
    y = function(x, world, **options)
    expected = in_numpy(function, options, all_x, world.rank)
    assert np.allclose(y.detach().numpy(), expected, rtol=1e-14)
    all_slopes = [drawn(*y.shape, seed=100 + each).numpy() for each in range(size)]
    y.backward(torch.tensor(all_slopes[world.rank]))
    back, more = BACKWARD[function.__name__]
    turned = dict(zip(options, reversed(options.values()), strict=True)) | more
    expected = in_numpy(back, turned, all_slopes, world.rank)
    assert np.allclose(x.grad.numpy(), expected, rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_tensors_of_every_dtype_are_moved(world, dtype):
    x = torch.full((12, 2), world.rank + 1).to(dtype)
    total = functions.reduce_from(x, world)
    assert total.dtype == dtype
    assert (total == sum(range(1, world.nranks + 1))).all()
    assert functions.all_gather(x, world).dtype == dtype
    assert functions.all_to_all(x, world, 0, 1).shape == (12 // world.nranks, 2 * world.nranks)


def test_what_is_given_stays_as_it_is_and_need_not_be_contiguous(world):
    x = drawn(24, 12).t()
    before = x.clone()
    for function, options in PAIRS:
        function(x, world, **options)
    assert torch.equal(x, before)
    if world.nranks > 1:  # what is computed is new memory
        functions.reduce_from(x, world).zero_()
        functions.gather_from(x, world, 0).zero_()
        functions.scatter_to(x, world).zero_()
        assert torch.equal(x, before)


def test_gradients_of_gradients_are_those_of_one_process(world):
    first, second = drawn(WIDTH, WIDTH, grad=True), drawn(WIDTH, WIDTH, seed=8)
    x = drawn(ROWS, WIDTH, seed=9)

    def penalty(forward, weight):
        y = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(forward(y).pow(3).sum(), y, create_graph=True)
        slope.pow(2).sum().backward()
        return weight.grad

    expected = penalty(lambda y: torch.tanh(y @ first.t()) @ second.t(), first)
    part = own(first.detach(), world, 0).clone().requires_grad_()
    there = own(second, world, 1)
    got = penalty(
        lambda y: functions.reduce_from(
            torch.tanh(functions.copy_to(y, world) @ part.t()) @ there.t(), world
        ),
        part,
    )
    assert_near(got / expected.abs().max(), own(expected, world, 0) / expected.abs().max())


# ---- initialization

LAYERS = {
    "column": (
        lambda group: ColumnParallelLinear(24, 48, has_bias=True, mp_group=group),
        lambda: nn.Linear(24, 48),
    ),
    "row": (lambda group: RowParallelLinear(24, 10, mp_group=group), lambda: nn.Linear(24, 10)),
    "row without bias": (
        lambda group: RowParallelLinear(24, 10, has_bias=False, mp_group=group),
        lambda: nn.Linear(24, 10, bias=False),
    ),
    "embedding": (
        lambda group: VocabParallelEmbedding(24, 6, mp_group=group),
        lambda: nn.Embedding(24, 6),
    ),
    "column, sequence": (
        lambda group: ColumnSequenceParallelLinear(
            24, 12, has_bias=True, gather_output=False, mp_group=group
        ),
        lambda: nn.Linear(24, 12),
    ),
    "row, sequence": (
        lambda group: RowSequenceParallelLinear(24, 5, input_is_parallel=True, mp_group=group),
        lambda: nn.Linear(24, 5),
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_one_seed_makes_one_model_to_the_bit_however_it_is_cut(world, kind):
    make, make_whole = LAYERS[kind]
    layer = seeded(lambda: make(world))
    after = torch.rand(1)
    reference = seeded(make_whole)
    assert after == torch.rand(1)  # and so does all that is drawn later
    assert [name for name, _ in layer.named_parameters()] == [
        name for name, _ in reference.named_parameters()
    ]
    for name, parameter in layer.named_parameters():
        expected = reference.get_parameter(name).detach()
        if parameter.is_distributed:
            expected = own(expected, world, parameter.split_axis)
        assert torch.equal(parameter, expected)


def test_weight_attr_fills_the_whole_weight(world):
    layer = seeded(lambda: RowParallelLinear(24, 6, nn.init.xavier_normal_, mp_group=world))

    def make():
        whole = nn.Linear(24, 6)
        nn.init.xavier_normal_(whole.weight)
        return whole.weight.detach()

    assert torch.equal(layer.weight, own(seeded(make), world, 1))


def test_parameters_tell_what_they_are_a_part_of_also_after_a_copy(world):
    layer = ColumnParallelLinear(6, 24, has_bias=True, mp_group=world)
    for each in (layer, copy.deepcopy(layer), copy.deepcopy(layer).double()):
        assert each.group is world
        assert each.weight.is_distributed == each.bias.is_distributed == (world.nranks > 1)
        if world.nranks > 1:
            assert (each.weight.split_axis, each.weight.global_shape) == (0, (24, 6))
            assert each.bias.global_offsets == (24 // world.nranks * world.rank,)


# ---- layers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gathers", [True, False])
def test_a_column_parallel_layer_is_the_layer(world, dtype, gathers):
    layer = seeded(
        lambda: ColumnParallelLinear(7, 24, has_bias=True, gather_output=gathers, mp_group=world)
    ).to(dtype)
    reference = seeded(lambda: nn.Linear(7, 24)).to(dtype)
    x = drawn(3, ROWS, 7, dtype=dtype, grad=True)
    other = x.detach().clone().requires_grad_()
    slope = drawn(3, ROWS, 24, dtype=dtype, seed=1)
    expected = reference(other)
    expected.backward(slope)
    got = layer(x)
    if gathers:
        assert_near(got, expected)
        got.backward(slope)
    else:
        assert_near(got, own(expected, world, -1))
        got.backward(own(slope, world, -1))
    assert_near(x.grad, other.grad)
    assert_same_gradients(layer, reference, world)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_parts", [True, False])
def test_a_row_parallel_layer_is_the_layer_and_adds_its_bias_once(world, dtype, in_parts):
    layer = seeded(lambda: RowParallelLinear(24, 7, input_is_parallel=in_parts, mp_group=world)).to(
        dtype
    )
    reference = seeded(lambda: nn.Linear(24, 7)).to(dtype)
    x = drawn(3, ROWS, 24, dtype=dtype, grad=True)
    other = x.detach().clone().requires_grad_()
    slope = drawn(3, ROWS, 7, dtype=dtype, seed=1)
    expected = reference(other)
    expected.backward(slope)
    mine = own(x.detach(), world, -1).clone().requires_grad_() if in_parts else x
    got = layer(mine)
    assert_near(got, expected)
    got.backward(slope)
    assert_near(mine.grad, own(other.grad, world, -1) if in_parts else other.grad)
    assert_same_gradients(layer, reference, world)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vocab_parallel_embedding_is_the_embedding(world, dtype):
    layer = seeded(lambda: VocabParallelEmbedding(WORDS, 6, mp_group=world)).to(dtype)
    reference = seeded(lambda: nn.Embedding(WORDS, 6)).to(dtype)
    x = torch.arange(2 * WORDS).reshape(4, -1) % WORDS
    slope = drawn(*x.shape, 6, dtype=dtype)
    expected = reference(x)
    expected.backward(slope)
    got = layer(x)
    assert torch.equal(got, expected)
    got.backward(slope)
    assert_same_gradients(layer, reference, world)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [False, True], ids=["labels (...)", "labels (..., 1)"])
def test_a_parallel_cross_entropy_is_the_cross_entropy(world, dtype, column):
    logits = (3 * drawn(ROWS, 4, WORDS)).to(dtype).requires_grad_()
    labels = torch.arange(4 * ROWS).reshape(ROWS, 4) % WORDS
    labels[1, 2] = labels[0, 0] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    expected = expected.reshape(labels.shape)
    slope = drawn(ROWS, 4, dtype=dtype)
    (whole,) = torch.autograd.grad(expected, logits, slope)
    mine = own(logits.detach(), world, -1).clone().requires_grad_()
    given = labels.unsqueeze(-1) if column else labels
    loss = ParallelCrossEntropy(mp_group=world)(mine, given)
    assert loss.shape == given.shape
    assert_near(loss.reshape(labels.shape), expected)
    loss.backward(slope.reshape(loss.shape))
    assert_near(mine.grad, own(whole, world, -1))
    assert (mine.grad[1, 2] == 0).all()


def test_another_label_is_ignored_if_it_is_told(world):
    logits, labels = drawn(ROWS, WORDS), torch.tensor([0, 5, 5, 7, WORDS - 1])
    expected = F.cross_entropy(logits, labels, reduction="none", ignore_index=5)
    loss = ParallelCrossEntropy(mp_group=world, ignore_index=5)(own(logits, world, -1), labels)
    assert_near(loss, expected)


def test_a_parallel_cross_entropy_of_extreme_logits_is_finite(world):
    logits = torch.zeros(3, WORDS, dtype=torch.float64)
    logits[0], logits[1], logits[2, 3] = -1e30, 1e30, 1e6
    labels = torch.tensor([0, WORDS - 1, 3])
    mine = own(logits, world, -1).clone().requires_grad_()
    loss = ParallelCrossEntropy(mp_group=world)(mine, labels)
    assert_near(loss, F.cross_entropy(logits, labels, reduction="none"))
    loss.sum().backward()
    assert mine.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_16_bit_logits_is_float32(world, dtype):
    logits, labels = drawn(ROWS, WORDS).to(dtype), torch.arange(ROWS)
    mine = own(logits, world, -1).clone().requires_grad_()
    loss = ParallelCrossEntropy(mp_group=world)(mine, labels)
    assert loss.dtype == torch.float32
    assert_near(loss, F.cross_entropy(logits.float(), labels, reduction="none"))
    loss.sum().backward()
    assert mine.grad.dtype == dtype


def test_a_parallel_cross_entropy_never_has_all_logits(world):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for each in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(each, torch.Tensor):
                    self.numel = max(self.numel, each.untyped_storage().nbytes() // 8)
            return result

    mine = own(drawn(ROWS, 10 * WORDS), world, -1).clone().requires_grad_()
    with Largest() as largest:
        ParallelCrossEntropy(mp_group=world)(mine, torch.arange(ROWS)).sum().backward()
    assert 0 < largest.numel <= mine.numel()


def test_a_second_derivative_of_the_cross_entropy_is_refused(world):
    mine = own(drawn(ROWS, WORDS), world, -1).clone().requires_grad_()
    loss = ParallelCrossEntropy(mp_group=world)(mine, torch.arange(ROWS)).exp()
    (slope,) = torch.autograd.grad(loss.sum(), mine, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.sum().backward()


# ---- blocks


class Whole(nn.Module):
    """A word model of one block, in one process."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.second = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x, y):
        x = self.embedded(x)
        x = x + self.attention(self.norm(x))
        x = x + self.mlp(self.second(x))
        return self.loss(x, y)

    def embedded(self, x):
        return self.words(x)

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))

    def attention(self, x):  # [sequence, batch, width]
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).permute(1, 2, 0, 3)
            for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.permute(2, 0, 1, 3).flatten(2))

    def loss(self, x, y):
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class Cut(Whole):
    """The same, cut over the ranks."""

    def __init__(self, group):
        nn.Module.__init__(self)
        self.group = group

        def column(length):
            return ColumnParallelLinear(
                WIDTH, length, has_bias=True, gather_output=False, mp_group=group
            )

        def row(length):
            return RowParallelLinear(length, WIDTH, input_is_parallel=True, mp_group=group)

        self.words = VocabParallelEmbedding(WORDS, WIDTH, mp_group=group)
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (column(WIDTH) for _ in range(3))
        self.o = row(WIDTH)
        self.second = nn.LayerNorm(WIDTH)
        self.up, self.down = column(48), row(48)
        self.head = column(WORDS)
        self.cross_entropy = ParallelCrossEntropy(mp_group=group)

    def loss(self, x, y):
        return self.cross_entropy(self.head(x), y).mean()


class InParts(Whole):
    """The same, with parts of the sequence between the layers."""

    def __init__(self, group):
        nn.Module.__init__(self)
        self.group = group

        def column(length):
            return ColumnSequenceParallelLinear(
                WIDTH, length, has_bias=True, gather_output=False, mp_group=group
            )

        def row(length):
            return RowSequenceParallelLinear(length, WIDTH, input_is_parallel=True, mp_group=group)

        self.words = VocabParallelEmbedding(WORDS, WIDTH, mp_group=group)
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (column(WIDTH) for _ in range(3))
        self.o = row(WIDTH)
        self.second = nn.LayerNorm(WIDTH)
        self.up, self.down = column(48), row(48)
        self.head = column(WORDS)
        self.cross_entropy = ParallelCrossEntropy(mp_group=group)
        for norm in (self.norm, self.second):
            for each in norm.parameters():
                mark_as_sequence_parallel_parameter(each)

    def embedded(self, x):
        return ScatterOp.apply(self.words(x), mp_group=self.group)

    def loss(self, x, y):
        return self.cross_entropy(self.head(x), y).mean()


def words():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(WORDS, (LENGTH, 3), generator=generator) for _ in range(2)]


def whole_gradients(dtype):
    reference = seeded(Whole).to(dtype)
    loss = reference(*words())
    loss.backward()
    return loss, reference


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_that_is_cut_has_the_loss_and_the_gradients_of_the_whole(world, dtype):
    expected, reference = whole_gradients(dtype)
    model = seeded(lambda: Cut(world)).to(dtype)
    loss = model(*words())
    loss.backward()
    assert_near(loss, expected)
    for name, parameter in model.named_parameters():
        whole = reference.get_parameter(name).grad
        if is_cut(parameter):
            whole = own(whole, world, parameter.split_axis)
        assert_near(parameter.grad, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_so_has_one_with_parts_of_the_sequence(world, dtype):
    expected, reference = whole_gradients(dtype)
    model = seeded(lambda: InParts(world)).to(dtype)
    named = dict(model.named_parameters())
    marked = {name for name, each in named.items() if is_sequence_parallel_parameter(each)}
    norms = {f"{norm}.{each}" for norm in ("norm", "second") for each in ("weight", "bias")}
    assert marked == norms | ({"o.bias", "down.bias"} if world.nranks > 1 else set())
    register_sequence_parallel_allreduce_hooks(model, mp_group=world)
    loss = model(*words())
    loss.backward()
    assert_near(loss, expected)
    for name, parameter in model.named_parameters():
        whole = reference.get_parameter(name).grad
        if is_cut(parameter):
            whole = own(whole, world, parameter.split_axis)
        assert_near(parameter.grad, whole)


def test_mixed_precision_computes_in_16_bits_and_learns_in_32(world):
    def run(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*words())
        loss.backward()
        return loss.item()

    reference, model = seeded(Whole), seeded(lambda: Cut(world))
    assert abs(run(model) - run(reference)) < 0.02
    for name, parameter in model.named_parameters():
        whole = reference.get_parameter(name).grad
        if is_cut(parameter):
            whole = own(whole, world, parameter.split_axis)
        assert parameter.grad.dtype == torch.float32
        assert torch.allclose(parameter.grad, whole, atol=0.05 * float(whole.abs().max()) + 1e-4)


def test_gradients_of_marked_parameters_are_summed_once_per_accumulation(world):
    norm = nn.LayerNorm(6)
    for each in norm.parameters():
        mark_as_sequence_parallel_parameter(each)
    register_sequence_parallel_allreduce_hooks(norm, 3, mp_group=world)
    register_sequence_parallel_allreduce_hooks(norm, 3, mp_group=world)  # finds nothing any more
    assert not any(map(is_sequence_parallel_parameter, norm.parameters())) or world.nranks == 1
    for step in range(2):
        norm.zero_grad()
        for number in range(3):
            norm(torch.ones(2, 6)).sum().backward()
            count = 2 * (number + 1) * (world.nranks if number == 2 else 1)
            assert (norm.bias.grad == count).all(), step


@pytest.mark.parametrize(
    ("operation", "forward", "backward"),
    [
        (ScatterOp, "scatter_to", "gather_from"),
        (GatherOp, "gather_from", "scatter_to"),
        (AllGatherOp, "all_gather", "reduce_scatter"),
        (ReduceScatterOp, "reduce_scatter", "all_gather"),
    ],
)
def test_an_operation_on_the_sequence_is_the_pair_of_moves(world, operation, forward, backward):
    x = drawn(12, 2, seed=world.rank, grad=True)
    y = operation.apply(x, mp_group=world)
    assert torch.equal(y, getattr(functions, forward)(x.detach(), world, 0))
    slope = drawn(*y.shape, seed=50 + world.rank)
    y.backward(slope)
    assert torch.equal(x.grad, getattr(functions, backward)(slope, world, 0))


# ---- attention over sep


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["plain", "causal", "mask", "mask of heads", "grouped"])
def test_attention_of_parts_of_the_sequence_is_that_of_the_whole(world, dtype, variant):
    key_heads = HEADS if variant != "grouped" else 12 if world.nranks > 2 else 6
    shapes = [(2, heads, LENGTH, 4) for heads in (HEADS, key_heads, key_heads)]
    tensors = [
        drawn(*shape, dtype=dtype, seed=each, grad=True) for each, shape in enumerate(shapes)
    ]
    options = {
        "causal": {"is_causal": True},
        "mask": {"attn_mask": drawn(LENGTH, LENGTH, dtype=dtype)},
        "mask of heads": {"attn_mask": drawn(HEADS, LENGTH, LENGTH, dtype=dtype)},
        "grouped": {"enable_gqa": True},
    }.get(variant, {})
    expected = F.scaled_dot_product_attention(*tensors, **options)
    slope = drawn(*expected.shape, dtype=dtype, seed=9)
    expected.backward(slope)
    parts = [own(each.detach(), world, 2).clone().requires_grad_() for each in tensors]
    got = sep_attention(*parts, **options, sep_group=world)
    got.backward(own(slope, world, 2))
    assert_near(got, own(expected, world, 2))
    for part, whole in zip(parts, tensors, strict=True):
        assert_near(part.grad, own(whole.grad, world, 2))


def test_the_module_drops_out_in_training_alone(world):
    parts = [drawn(1, HEADS, 2, 4, dtype=torch.float32, seed=each) for each in range(3)]
    attention = UlyssesAttention(dropout_p=0.9, is_causal=True, sep_group=world)
    expected = sep_attention(*parts, is_causal=True, sep_group=world)
    assert not torch.equal(attention(*parts), expected)
    assert torch.equal(attention.eval()(*parts), expected)


# ---- random states


def everywhere(x, world):
    parts = []
    dist.all_gather(parts, x, world)
    return parts


def test_dropout_differs_between_ranks_in_the_tracker_alone(world):
    model_parallel_random_seed(11, mp_group=world)
    outside = [F.dropout(torch.ones(64)) for _ in range(2)]
    with get_rng_state_tracker().rng_state():
        inside = F.dropout(torch.ones(64))
    outside.append(F.dropout(torch.ones(64)))
    for each in outside:
        assert all(torch.equal(each, other) for other in everywhere(each, world))
    seen = {each.numpy().tobytes() for each in everywhere(inside, world)}
    assert len(seen) == world.nranks
    model_parallel_random_seed(11, mp_group=world)
    again = [F.dropout(torch.ones(64)) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(again, outside, strict=True))
    with get_rng_state_tracker().rng_state():  # whenever it is, inside is as before
        assert torch.equal(F.dropout(torch.ones(64)), inside)


def test_without_a_seed_the_ranks_agree_on_one(world):
    seen = set()
    for _ in range(2):
        model_parallel_random_seed(mp_group=world)
        x = torch.rand(8)
        assert all(torch.equal(x, other) for other in everywhere(x, world))
        seen.add(x.numpy().tobytes())
    assert len(seen) == 2


# ---- on a grid


@pytest.fixture
def grid(size):
    """Two rows of ranks, where they are an even number; each row is one of mp."""
    rows = 1 if size % 2 else 2
    topology = CommunicateTopology(["data", "model"], [rows, size // rows])
    set_current_grid(HybridCommunicateGroup(topology))
    yield current_grid()
    set_current_grid(None)


class OfGrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(6, 24, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(24, 4, input_is_parallel=True)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class OfOne(OfGrid):
    def __init__(self):
        nn.Module.__init__(self)
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 4)


def test_without_a_group_layers_are_cut_over_mp_and_dp_averages_their_parts(grid):
    x, y = drawn(12, 6), drawn(12, 4, seed=8)
    reference = seeded(OfOne).double()
    layers = seeded(OfGrid).double()
    assert layers.up.group.ranks == grid["mp"].ranks
    model = dist.DataParallel(layers, group=grid["dp"])
    ways = [
        (reference, torch.optim.SGD(reference.parameters(), 0.1), x, y),
        (
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            own(x, grid["dp"], 0),
            own(y, grid["dp"], 0),
        ),
    ]
    for each, optimizer, inputs, wanted in ways:
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(each(inputs), wanted).backward()
            optimizer.step()
    for name, parameter in layers.named_parameters():
        expected = reference.get_parameter(name)
        if is_cut(parameter):
            expected = own(expected, grid["mp"], parameter.split_axis)
        assert_near(parameter, expected)


# ---- computing again


@pytest.mark.parametrize("partition", [True, False])
def test_what_is_computed_again_has_the_gradients_of_the_model(world, partition):
    expected, reference = whole_gradients(torch.float64)
    model = seeded(lambda: Cut(world)).double()
    ctx = {"mp_group": world, "partition": partition}
    mlp, attention = model.mlp, model.attention
    model.mlp = lambda x: recompute_hybrid(ctx, mlp, x)
    model.attention = lambda x: recompute(attention, x)
    loss = model(*words())
    loss.backward()
    assert_near(loss, expected)
    for name, parameter in model.named_parameters():
        whole = reference.get_parameter(name).grad
        if is_cut(parameter):
            whole = own(whole, world, parameter.split_axis)
        assert_near(parameter.grad, whole)


def test_each_rank_keeps_a_part_of_what_is_gathered_for_the_second_time(world):
    given = drawn(7, 5, grad=True)
    x = given * 1.0
    seen = []

    def function(x):
        seen.append(x.detach().clone())
        return x.sin()

    ctx = {"mp_group": world, "partition": True}
    y = recompute_hybrid(ctx, function, x)
    memory = weakref.ref(x.untyped_storage())
    del x
    if world.nranks > 1:
        assert memory() is None  # the whole is not kept by anyone
    y.sum().backward()
    assert torch.equal(*seen)
    assert_near(given.grad, given.detach().cos())


def test_dropout_of_parts_is_the_same_the_second_time(world):
    def block(x):
        with get_rng_state_tracker().rng_state():
            x = F.dropout(x.sin())
        return F.dropout(x.exp())

    gradients = []
    for call in (lambda f, x: f(x), recompute):
        model_parallel_random_seed(3, mp_group=world)
        x = drawn(256, grad=True)
        call(block, call(block, x)).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


# ---- what is refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda g, n: ColumnParallelLinear(4, n, mp_group=g), "out_features"),
        (lambda g, n: RowParallelLinear(n, 4, mp_group=g), "in_features"),
        (lambda g, n: VocabParallelEmbedding(n, 4, mp_group=g), "num_embeddings"),
        (
            lambda g, n: ColumnSequenceParallelLinear(4, n, gather_output=False, mp_group=g),
            "out_features",
        ),
        (
            lambda g, n: RowSequenceParallelLinear(n, 4, input_is_parallel=True, mp_group=g),
            "in_features",
        ),
    ],
)
def test_a_size_without_equal_parts_is_refused_with_one_that_has_them(world, make, words):
    size, ranks = 12 * world.nranks + 1, world.nranks
    if ranks > 1:
        fitting = f"{words}.*divisible.*make it {size + ranks - 1}"
        with pytest.raises(dist.UsageError, match=fitting):
            make(world, size)
    with pytest.raises(dist.UsageError, match=f"{words} must be a positive integer"):
        make(world, 0)


@pytest.mark.usefixtures("and_the_world_goes_on")
@pytest.mark.parametrize("word", [-1, WORDS])
def test_a_word_that_is_in_no_table_is_an_error_on_every_rank(world, word):
    layer = VocabParallelEmbedding(WORDS, 4, mp_group=world)
    x = torch.zeros(2, 3, dtype=torch.long)
    x[1, 2] = word
    with pytest.raises(dist.UsageError, match=rf"word {word} at \[1, 2\].*from 0 to {WORDS - 1}"):
        layer(x)


@pytest.mark.usefixtures("and_the_world_goes_on")
@pytest.mark.parametrize("label", [-1, WORDS])
def test_a_label_that_is_no_class_is_an_error_on_every_rank(world, label):
    logits = own(drawn(ROWS, WORDS), world, -1)
    labels = torch.tensor([0, 1, label, -100, 3])
    with pytest.raises(dist.UsageError, match=rf"label {label} at \[2\].*-100, which is ignored"):
        ParallelCrossEntropy(mp_group=world)(logits, labels)


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_what_one_rank_alone_sees_to_be_wrong_every_rank_hears(world):
    layer, loss = VocabParallelEmbedding(WORDS, 4, mp_group=world), ParallelCrossEntropy(world)
    wrong = WORDS if world.rank == world.nranks - 1 else 1
    with pytest.raises((dist.UsageError, dist.RemoteError), match=f"{WORDS} at"):
        layer(torch.tensor([wrong]))
    with pytest.raises((dist.UsageError, dist.RemoteError), match=f"{WORDS} at"):
        loss(own(drawn(1, WORDS), world, -1), torch.tensor([wrong]))


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_labels_that_are_not_one_for_each_sample_are_refused(world):
    logits, loss = own(drawn(ROWS, WORDS), world, -1), ParallelCrossEntropy(world)
    with pytest.raises(dist.UsageError, match=r"\(4,\) are not one for each sample"):
        loss(logits, torch.zeros(4, dtype=torch.long))
    with pytest.raises(dist.UsageError, match="labels are integers"):
        loss(logits, torch.zeros(ROWS))


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_parts_of_the_classes_that_are_not_equal_are_an_error_on_every_rank(world):
    logits = torch.zeros(ROWS, 4 + (world.rank == 0))
    if world.nranks > 1:
        with pytest.raises(dist.MismatchError, match="logits of 4 to 5 classes"):
            ParallelCrossEntropy(world)(logits, torch.ones(ROWS, dtype=torch.long))


def test_a_layer_without_a_grid_says_who_makes_one():
    with pytest.raises(dist.UsageError, match=r"fleet.init\(mp=...\)"):
        ColumnParallelLinear(4, 4)
    with pytest.raises(dist.UsageError, match=r"fleet.init\(sep=...\)"):
        UlyssesAttention()


def test_a_rank_outside_the_group_is_refused(world):
    group = dist.new_group([0])
    if world.rank == 0:
        assert ColumnParallelLinear(4, 3, mp_group=group).weight.shape == (3, 4)
    else:
        with pytest.raises(dist.UsageError, match="is not in group"):
            ColumnParallelLinear(4, 3, mp_group=group)
        with pytest.raises(dist.UsageError, match="has no part of this tensor"):
            functions.reduce_from(torch.ones(2), group)
        with pytest.raises(dist.UsageError, match="is not in group"):
            recompute_hybrid({"mp_group": group, "partition": True}, torch.sin, torch.ones(2))


def test_settings_that_sequence_parallel_layers_cannot_have_are_refused(world):
    with pytest.raises(dist.UsageError, match="give gather_output=False"):
        ColumnSequenceParallelLinear(4, 12, mp_group=world)
    with pytest.raises(dist.UsageError, match="give input_is_parallel=True"):
        RowSequenceParallelLinear(12, 4, mp_group=world)
    cut = RowParallelLinear(12, 4, mp_group=world).weight
    if world.nranks > 1:
        with pytest.raises(dist.UsageError, match="cut over the ranks"):
            mark_as_sequence_parallel_parameter(cut)


def test_a_weight_attr_that_is_no_function_is_refused(world):
    with pytest.raises(dist.UsageError, match="weight_attr must be a function"):
        ColumnParallelLinear(4, 12, weight_attr=0.02, mp_group=world)


def test_attention_by_a_ring_is_refused_in_a_sentence(world):
    with pytest.raises(dist.UsageError, match="ring attention is not there"):
        UlyssesAttention(method="ring", sep_group=world)


def test_heads_that_cannot_be_divided_are_refused(world):
    x = torch.zeros(1, 12 * world.nranks + 1, 2, 4)
    if world.nranks > 1:
        with pytest.raises(dist.UsageError, match="heads of query must be divisible"):
            sep_attention(x, x, x, sep_group=world)
    with pytest.raises(dist.UsageError, match="has the shape"):
        sep_attention(x[0, 0], x, x, sep_group=world)


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_parts_of_a_sequence_that_are_not_equal_are_an_error_on_every_rank(world):
    if world.nranks > 1:
        x = torch.zeros(1, HEADS, 2 + (world.rank == 0), 4)
        with pytest.raises(dist.MismatchError):
            sep_attention(x, x, x, sep_group=world)


def test_a_dimension_without_equal_parts_is_refused(world):
    x = torch.zeros(12 * world.nranks + 1)
    if world.nranks > 1:
        for function in (functions.scatter_to, functions.reduce_scatter):
            with pytest.raises(dist.UsageError, match="no equal parts"):
                function(x, world, 0)
    with pytest.raises(dist.UsageError, match="has no dimension 1"):
        functions.gather_from(x, world, 1)


def test_parameters_that_are_cut_stay_when_the_others_are_made_equal(world):
    def make():
        return nn.Sequential(RowParallelLinear(12, 4, mp_group=world), nn.Linear(4, 4))

    model = seeded(make, seed=world.rank)
    before = model[0].weight.detach().clone()
    dist.sync_params_buffers(model, world, is_model_parallel=True)
    expected = seeded(lambda: nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 4)), seed=0)
    assert torch.equal(model[0].bias, expected[0].bias)
    assert torch.equal(model[1].weight, expected[1].weight)
    assert torch.equal(model[0].weight, before if world.nranks > 1 else expected[0].weight)
