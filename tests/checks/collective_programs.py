"""Random programs of collectives, and what NumPy says each rank must end with.

`programs(size)` is a hypothesis strategy of programs for `size` ranks; `run_program` executes
one of them on the calling rank, through the public API, and compares. Every rank can compute the
inputs of all ranks, so that checking needs no communication.

Read in this order: `Step` (one line of a program), `programs`, `Scene` (the inputs of a step and
NumPy's answers), `Act` (a call and its expectation; one function and one row of `ACTS` per
operation), `run_program`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import hpcdist as dist
from hpcdist.comm.exchanges import exchange
from hpcdist.transport.call.call import Give, Read

Array = Any
Op = dist.ReduceOp

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64", "longdouble")
COMPLEX = ("complex64", "complex128", "clongdouble")
COMPARED = ("datetime64[ns]", "pair")
"""Reduced, but not added."""
MOVED = ("float8_e4m3fn", "S5", "record")
LAYOUTS = ("C", "F", "strided", "reversed", "swapped")
FORMS = ("sync", "async", "plan")
GIVEN = ("empty", "list", "array")
MEMORY = ("ordinary", "shared", "mixed")
LONG = ((257,), (257,), (5003,), (5003,), (5003,), (70_001,))
"""Shapes beside the small ones: beyond what fits into a control block, a part, a stage."""

_TOLERANCE = {
    "float16": 2e-3,
    "bfloat16": 2e-2,
    "float32": 1e-5,
    "float64": 1e-12,
    "complex64": 1e-5,
    "complex128": 1e-12,
    "longdouble": 16 * float(np.finfo("longdouble").eps),
    "clongdouble": 16 * float(np.finfo("longdouble").eps),
}


class Step(NamedTuple):
    """One operation of a group. What an operation has no use for is ignored by it."""

    operation: str
    members: tuple[int, ...]
    root: int
    dtype: str
    shape: tuple[int, ...]
    op: Op
    layout: int
    """Rank r of the group uses ``LAYOUTS[(layout + r) % len(LAYOUTS)]``."""
    form: str
    given: str
    """Whether lists are handed over empty, as lists of arrays or as one array."""
    uneven: bool
    seed: int
    memory: str = "ordinary"
    """Whose contiguous arrays are made by `hpcdist.empty`: nobody's, everybody's, or (mixed)
    those of rank r of the group where ``seed + r`` is odd."""


Program = tuple[Step, ...]


def dtype_of(name: str) -> np.dtype:
    """Return the dtype behind a name in a `Step`."""
    if name == "record":
        return np.dtype([("id", "i4"), ("x", "f8", (2,)), ("on", "?")])
    if name == "pair":
        return np.dtype([("value", "f4"), ("index", "i4")])
    return np.dtype(getattr(ml_dtypes, name, name))


def operators(dtype: str) -> tuple[Op, ...]:
    """Return the operators that have a meaning for `dtype`."""
    exact = () if "long" in dtype else (Op.REPRODUCIBLE_SUM,)
    if dtype in FLOATS:
        return Op.SUM, Op.PROD, Op.MAX, Op.MIN, Op.AVG, *exact
    if dtype in COMPLEX:
        return Op.SUM, Op.PROD, Op.AVG, *exact
    if dtype in COMPARED:
        return (Op.MAXLOC, Op.MINLOC) if dtype == "pair" else (Op.MAX, Op.MIN)
    return Op.SUM, Op.PROD, Op.MAX, Op.MIN, *_UFUNCS


# ---- the strategy


def programs(size: int, max_steps: int = 6) -> st.SearchStrategy[Program]:
    """Return a strategy of programs for a world of `size` ranks."""
    return st.lists(steps(size), min_size=1, max_size=max_steps).map(tuple)


def steps(size: int) -> st.SearchStrategy[Step]:
    """Return a strategy of single operations in a world of `size` ranks."""
    return st.sampled_from(sorted(ACTS)).flatmap(lambda name: _steps_of(name, size))


@st.composite
def _steps_of(draw: Callable[[Any], Any], operation: str, size: int) -> Step:
    world = tuple(range(size))
    members = draw(st.just(world) | st.sets(st.sampled_from(world), min_size=1).map(_in_order))
    reduces = operation in _REDUCTIONS
    dtypes = ("bool", *INTEGERS, *FLOATS, *COMPLEX, *COMPARED, *(() if reduces else MOVED))
    dtype = draw(st.sampled_from(dtypes))
    return Step(
        operation=operation,
        members=members,
        root=draw(st.integers(0, len(members) - 1)),
        dtype=dtype,
        shape=draw(st.lists(st.integers(0, 3), max_size=3).map(tuple) | st.sampled_from(LONG)),
        op=draw(st.sampled_from(operators(dtype))),
        layout=draw(st.integers(0, len(LAYOUTS) - 1)),
        form=draw(st.sampled_from(FORMS)),
        given=draw(st.sampled_from(GIVEN)),
        uneven=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 16)),
        memory=draw(st.sampled_from(MEMORY)),
    )


def _in_order(ranks: set[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


# ---- inputs and answers


@final
class Scene:
    """A step as rank `me` of its group sees it; `salt` gives the same scene other numbers."""

    def __init__(self, step: Step, me: int, salt: int = 0) -> None:
        self.step = step
        self.me = me
        self.size = len(step.members)
        self.at_root = me == step.root
        self.root = step.members[step.root]
        self._salt = salt

    def random(self, rank: int, block: int = 0) -> np.random.Generator:
        """Return the source of the numbers that `rank` keeps in its block number `block`."""
        name = f"{self.step.seed} {self._salt} {rank} {block}"
        return np.random.default_rng(zlib.crc32(name.encode()))

    def values(self, rank: int, block: int = 0, shape: Sequence[int] | None = None) -> Array:
        """Return what `rank` contributes: positive numbers for sums, any bits otherwise."""
        step, dtype = self.step, dtype_of(self.step.dtype)
        shape = step.shape if shape is None else tuple(shape)
        random = self.random(rank, block)
        if step.dtype == "bool":
            return random.integers(0, 2, shape).astype(bool)
        if step.dtype == "pair":  # with ties
            pairs = np.zeros(shape, dtype)
            pairs["value"] = random.choice([-np.inf, -1, 0, 1, np.inf, np.nan], shape)
            pairs["index"] = random.integers(0, 5, shape)
            return pairs
        if "longdouble" in step.dtype:  # not all bits are numbers
            return random.uniform(0.5, 2.0, shape).astype(dtype)
        rounds = step.dtype in FLOATS + COMPLEX and step.op not in (Op.MAX, Op.MIN)
        if rounds and step.operation in _REDUCTIONS:
            return random.uniform(0.5, 2.0, shape).astype(dtype)
        count = int(np.prod(shape))
        bits = np.frombuffer(random.bytes(count * dtype.itemsize), np.uint8).copy()
        if step.dtype == "record":
            bits[dtype.itemsize - 1 :: dtype.itemsize] &= 1
        return bits.view(dtype).reshape(shape)

    def laid(self, values: Array) -> Array:
        """Return a writable array that holds `values` in this rank's layout."""
        layout = LAYOUTS[(self.step.layout + self.me) % len(LAYOUTS)]
        if layout == "F":
            return values.copy(order="F")
        if layout == "swapped" and self.step.dtype not in vars(ml_dtypes):
            return values.astype(values.dtype.newbyteorder())
        if layout == "strided" and values.ndim:
            array = np.zeros([2 * length for length in values.shape], values.dtype)
            array = array[(slice(None, None, 2),) * values.ndim]
        elif layout == "reversed" and values.ndim:
            array = np.zeros(values.shape, values.dtype)[::-1]
        elif self._is_shared():
            array = dist.empty(values.shape, values.dtype)
        else:
            return values.copy()
        array[...] = values
        return array

    def _is_shared(self) -> bool:
        memory = self.step.memory
        return memory == "shared" or (memory == "mixed" and (self.step.seed + self.me) % 2 == 1)

    def blank(self, shape: Sequence[int] | None = None) -> Array:
        """Return an output in this rank's layout."""
        shape = self.step.shape if shape is None else tuple(shape)
        return self.laid(np.zeros(shape, dtype_of(self.step.dtype)))

    def reduced(self, arrays: list[Array]) -> Array:
        """Return what NumPy says is the reduction of `arrays`."""
        op, dtype, stack = self.step.op, dtype_of(self.step.dtype), np.stack(arrays)
        if op in _UFUNCS:
            return _UFUNCS[op].reduce(stack, 0).astype(dtype)
        if self.step.dtype == "bool":
            return np.any(stack, 0) if op in (Op.SUM, Op.MAX) else np.all(stack, 0)
        if op in (Op.MAX, Op.MIN):
            return _extremes(op, stack)
        if op in (Op.MAXLOC, Op.MINLOC):
            return _locations(op, stack)
        ufunc = np.multiply if op is Op.PROD else np.add
        if self.step.dtype in INTEGERS:
            return ufunc.reduce(stack, 0, dtype=dtype)
        wide = _wide(dtype)
        total = ufunc.reduce(stack.astype(wide), 0) / (len(arrays) if op is Op.AVG else 1)
        with np.errstate(over="ignore"):
            return np.asarray(total).astype(dtype)

    def some_object(self, rank: int, block: int = 0) -> Any:
        """Return a picklable object of a size from nothing to some large arrays and bytes."""
        random = self.random(rank, block)
        count = int(random.choice([0, 3, 600, 3000, 12_000]))
        array = random.integers(0, 100, count)
        pair = np.stack([array, array])
        return {"from": rank, "x": [array, np.asfortranarray(pair)], "raw": [pair.tobytes()]}


@np.errstate(invalid="ignore")
def _extremes(op: Op, stack: Array) -> Array:
    """NaN wins, and 0.0 is above -0.0."""
    best = np.max(stack, 0) if op is Op.MAX else np.min(stack, 0)
    if stack.dtype.kind in "iuM":
        return best
    wanted = np.signbit(stack) == (op is Op.MIN)
    has_wanted = np.any((stack == 0) & wanted, 0)
    zero = np.where(has_wanted == (op is Op.MAX), 0.0, -0.0).astype(stack.dtype)
    return np.where(best == 0, zero, best)


@np.errstate(invalid="ignore")
def _locations(op: Op, stack: Array) -> Array:
    """NaN wins, and of equal values the one with the smallest index."""
    values = stack["value"]
    pairs = np.empty(stack.shape[1:], stack.dtype)
    pairs["value"] = best = np.max(values, 0) if op is Op.MAXLOC else np.min(values, 0)
    is_best = (values == best) | (np.isnan(values) & np.isnan(best))
    pairs["index"] = np.where(is_best, stack["index"], np.iinfo("i4").max).min(0)
    return pairs


def _wide(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which numbers of `dtype` are compared."""
    numbers = dtype if dtype.kind in "fc" else np.dtype("f4")  # ml_dtypes are of another kind
    return np.result_type(np.float64, numbers)


_UFUNCS: dict[Op, Any] = {
    Op.BAND: np.bitwise_and,
    Op.BOR: np.bitwise_or,
    Op.BXOR: np.bitwise_xor,
    Op.LAND: np.logical_and,
    Op.LOR: np.logical_or,
    Op.LXOR: np.logical_xor,
}


# ---- one function per operation


class Act(NamedTuple):
    """A call, the arrays handed in, and what `watched` must hold when it has ended."""

    args: tuple[Any, ...]
    arrays: list[Array]
    watched: list[Any]
    expected: list[Any]
    options: dict[str, Any] = {}  # noqa: RUF012 (a NamedTuple default; nobody writes to it)


def _in_place(scene: Scene, expected: Array, *more: Any) -> Act:
    x = scene.laid(scene.values(scene.me))
    return Act((x, *more), [x], [x], [expected])


def _all_reduce(scene: Scene) -> Act:
    inputs = [scene.values(rank) for rank in range(scene.size)]
    return _in_place(scene, scene.reduced(inputs), scene.step.op)


def _reduce(scene: Scene) -> Act:
    inputs = [scene.values(rank) for rank in range(scene.size)]
    expected = scene.reduced(inputs) if scene.at_root else inputs[scene.me]
    return _in_place(scene, expected, scene.root, scene.step.op)


def _scan(scene: Scene) -> Act:
    inputs = [scene.values(rank) for rank in range(scene.me + 1)]
    return _in_place(scene, scene.reduced(inputs), scene.step.op)


def _exscan(scene: Scene) -> Act:
    inputs = [scene.values(rank) for rank in range(scene.me)]
    expected = scene.reduced(inputs) if inputs else scene.values(scene.me)
    return _in_place(scene, expected, scene.step.op)


def _reduce_scatter(scene: Scene) -> Act:
    size, shapes = scene.size, _shapes(scene)
    out = scene.blank(shapes[scene.me])
    blocks = [scene.values(scene.me, block, shapes[block]) for block in range(size)]
    given, arrays = _handed_over(scene, blocks)
    mine = [scene.values(rank, scene.me, shapes[scene.me]) for rank in range(size)]
    expected = scene.reduced(mine)
    return Act((out, given, scene.step.op), arrays, [out, *arrays], [expected, *_pristine(arrays)])


def _broadcast(scene: Scene) -> Act:
    return _in_place(scene, scene.values(scene.step.root), scene.root)


def _all_gather(scene: Scene) -> Act:
    return _gathering(scene, receives=True)


def _gather(scene: Scene) -> Act:
    act = _gathering(scene, receives=scene.at_root)
    target, x = act.args
    return act._replace(args=(x, target, scene.root))


def _gathering(scene: Scene, *, receives: bool) -> Act:
    shapes = _shapes(scene)
    inputs = [scene.values(rank, 0, shape) for rank, shape in enumerate(shapes)]
    x = scene.laid(inputs[scene.me])
    if not receives:
        return Act((None, x), [x], [x], [inputs[scene.me]])
    target = _room(scene, shapes)
    return Act((target, x), [x], [target, x], [inputs, inputs[scene.me]])


def _scatter(scene: Scene) -> Act:
    shapes = _shapes(scene)
    out, given = scene.blank(shapes[scene.me]), None
    arrays: list[Array] = []
    if scene.at_root:
        given, arrays = _handed_over(
            scene, [scene.values(scene.me, block, shape) for block, shape in enumerate(shapes)]
        )
    expected = scene.values(scene.step.root, scene.me, shapes[scene.me])
    return Act((out, given, scene.root), arrays, [out, *arrays], [expected, *_pristine(arrays)])


def _alltoall(scene: Scene) -> Act:
    step, me, size = scene.step, scene.me, scene.size
    uneven = step.uneven and step.given != "array"

    def block(source: int, to: int) -> Array:
        return scene.values(source, to, (source + 2 * to, *step.shape) if uneven else step.shape)

    given, arrays = _handed_over(scene, [block(me, to) for to in range(size)])
    expected = [block(source, me) for source in range(size)]
    out = _room(scene, [each.shape for each in expected])
    return Act((out, given), arrays, [out, *arrays], [expected, *_pristine(arrays)])


def _alltoall_single(scene: Scene) -> Act:
    step, me, size = scene.step, scene.me, scene.size

    def rows(source: int, to: int) -> int:
        return (step.seed + source * to) % 3 if step.uneven else 2

    def block(source: int, to: int) -> Array:
        return scene.values(source, to, (rows(source, to), *step.shape))

    x = scene.laid(np.concatenate([block(me, to) for to in range(size)]))
    expected = np.concatenate([block(source, me) for source in range(size)])
    out = scene.blank(expected.shape)
    splits = {
        "in_split_sizes": [rows(me, to) for to in range(size)],
        "out_split_sizes": [rows(source, me) for source in range(size)],
    }
    options = splits if step.uneven else {}
    return Act((out, x), [x], [out, x], [expected, *_pristine([x])], options)


def _exchange(scene: Scene) -> Act:
    """Move blocks as an alltoall does, which are runs of rows or of columns."""
    step, me, size = scene.step, scene.me, scene.size
    axis = len(step.shape) if step.seed % 2 else 0

    def rows(source: int, to: int) -> int:
        return (step.seed + source * to) % 3 if step.uneven else 2

    def block(source: int, to: int) -> Array:
        return np.moveaxis(scene.values(source, to, (rows(source, to), *step.shape)), 0, axis)

    def box(before: Sequence[int], length: int) -> tuple[slice, ...]:
        sides = [slice(0, each) for each in step.shape]
        return (*sides[:axis], slice(sum(before), sum(before) + length), *sides[axis:])

    def given_to(source: int, to: int) -> tuple[slice, ...]:
        return box([rows(source, each) for each in range(to)], rows(source, to))

    x = scene.laid(np.concatenate([block(me, to) for to in range(size)], axis))
    expected = np.concatenate([block(source, me) for source in range(size)], axis)
    out = scene.blank(expected.shape)
    reads, gives = [], []
    for other in range(size):
        total = sum(rows(other, to) for to in range(size))
        shape = (*step.shape[:axis], total, *step.shape[axis:])
        target = box([rows(each, me) for each in range(other)], rows(other, me))
        reads.append(Read(other, shape, given_to(other, me), target))
        gives.append(Give(other, given_to(me, other)))
    options = {"rule_op": None, "key": step.seed, "words": "blocks"}
    return Act((x, out, reads, gives), [x], [out, x], [expected, *_pristine([x])], options)


def _exchange_combined(scene: Scene) -> Act:
    """Combine the arrays of all ranks, or all but the first elements along each axis."""
    step, size = scene.step, scene.size
    inputs = [scene.values(rank) for rank in range(size)]
    x, out = scene.laid(inputs[scene.me]), scene.blank()
    expected = np.zeros(step.shape, x.dtype.newbyteorder("="))
    box = tuple(slice(min(int(step.uneven), length), length) for length in step.shape)
    expected[box] = scene.reduced(inputs)[box] if size > 1 else inputs[0][box]
    reads = [Read(rank, step.shape, box, box, rank > 0) for rank in range(size)]
    gives = [Give(rank, box) for rank in range(size)]
    options = {"rule_op": step.op, "key": step.seed, "words": "sums"}
    return Act((x, out, reads, gives), [x], [out, x], [expected, *_pristine([x])], options)


def _shapes(scene: Scene) -> list[tuple[int, ...]]:
    """Return the shape of each rank's block: longer ones, or of one axis more, where uneven."""
    step = scene.step
    if not step.uneven or step.given == "array":
        return [step.shape] * scene.size
    first, rest = (step.shape or (1,))[0], step.shape[1:]
    return [(first + rank, *rest, *[1] * (rank % 3)) for rank in range(scene.size)]


def _handed_over(scene: Scene, blocks: list[Array]) -> tuple[Any, list[Array]]:
    """Lay out one block per rank as a list or as one array; also return the arrays in it."""
    if scene.step.given == "array":
        whole = scene.laid(np.stack(blocks))
        return whole, [whole]
    laid = [scene.laid(block) for block in blocks]
    return laid, laid


def _room(scene: Scene, shapes: Sequence[Sequence[int]]) -> Any:
    """Return what receives one block per rank, of these `shapes`."""
    if scene.step.given == "empty":
        return []
    if scene.step.given == "array":
        return scene.blank((scene.size, *shapes[0]))
    return [scene.blank(shape) for shape in shapes]


def _pristine(arrays: list[Array]) -> list[Array]:
    return [array.copy() for array in arrays]


def _all_gather_object(scene: Scene) -> Act:
    out = [] if scene.step.given == "empty" else [None] * scene.size
    expected = [scene.some_object(rank) for rank in range(scene.size)]
    return Act((out, scene.some_object(scene.me)), [], [out], [expected])


def _gather_object(scene: Scene) -> Act:
    out: list[Any] | None = [] if scene.at_root else None
    expected = [scene.some_object(rank) for rank in range(scene.size)] if scene.at_root else None
    return Act((scene.some_object(scene.me), out, scene.root), [], [out], [expected])


def _broadcast_object_list(scene: Scene) -> Act:
    expected = [scene.some_object(scene.step.root, block) for block in range(2)]
    out = list(expected) if scene.at_root else [None, None]
    return Act((out, scene.root), [], [out], [expected])


def _scatter_object_list(scene: Scene) -> Act:
    given = None
    if scene.at_root:
        given = [scene.some_object(scene.me, block) for block in range(scene.size)]
    out = ["whatever", "was here"]
    expected = [scene.some_object(scene.step.root, scene.me)]
    return Act((out, given, scene.root), [], [out], [expected])


def _all_to_all_object(scene: Scene) -> Act:
    out: list[Any] = []
    given = [scene.some_object(scene.me, to) for to in range(scene.size)]
    expected = [scene.some_object(source, scene.me) for source in range(scene.size)]
    return Act((out, given), [], [out], [expected])


def _barrier(scene: Scene) -> Act:
    return Act((), [], [], [])


def _ring(scene: Scene) -> Act:
    """Messages around the group, see `_run_ring`: (outputs, inputs, next, previous)."""
    shift = 1 + scene.step.seed % scene.size
    to, source = (scene.me + shift) % scene.size, (scene.me - shift) % scene.size
    given = [scene.laid(scene.values(scene.me, tag)) for tag in range(3)]
    outs = [scene.blank() for _ in range(3)]
    expected = [scene.values(source, tag) for tag in range(3)]
    members = scene.step.members
    return Act((outs, given, members[to], members[source]), [], [outs], [expected])


def _disagreement(scene: Scene) -> Act:
    """All ranks but one reduce the same shape: see `_run_disagreement`."""
    x = scene.laid(scene.values(scene.me, 0, (4 if scene.at_root else 5,)))
    return Act((x,), [], [x], [x.copy()])


_KEPT = 2048
"""Bytes of a message that MPI takes from the sender although another is received first."""

_REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "exchange_combined"}
_EAGER_ONLY = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "all_to_all_object",
    "exchange",
    "exchange_combined",
}
"""Operations that have no plan."""

_INTERNAL = {"exchange": exchange, "exchange_combined": exchange}
"""Operations that have no public name."""

ACTS: dict[str, Callable[[Scene], Act]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scan": _scan,
    "exscan": _exscan,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "alltoall_single": _alltoall_single,
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "scatter_object_list": _scatter_object_list,
    "all_to_all_object": _all_to_all_object,
    "exchange": _exchange,
    "exchange_combined": _exchange_combined,
    "barrier": _barrier,
    "ring": _ring,
    "disagreement": _disagreement,
}


# ---- running


def run_program(program: Program) -> None:
    """Execute `program` on this rank and compare with NumPy; collective over the world."""
    rank = dist.get_rank()
    groups: dict[tuple[int, ...], dist.Group] = {}
    pending: list[Callable[[], None]] = []
    for step in program:
        if rank not in step.members:
            continue
        if step.members not in groups:
            groups[step.members] = dist.new_group(step.members)
        group = groups[step.members]
        check = _RUN.get(step.operation, _run_collective)(Scene(step, group.rank), group)
        pending.append(check)
        if step.form != "async":
            check()
    for check in reversed(pending):
        check()
    for group in groups.values():
        dist.destroy_process_group(group)


def _run_collective(scene: Scene, group: dist.Group) -> Callable[[], None]:
    step = scene.step
    act = ACTS[step.operation](scene)
    if step.form == "plan" and step.operation not in _EAGER_ONLY:
        _run_plan(scene, act, group)
        return lambda: None
    function = _INTERNAL.get(step.operation) or getattr(dist, step.operation)
    work = function(*act.args, group=group, sync_op=step.form != "async", **act.options)

    def check() -> None:
        work.wait()
        assert work.is_completed()
        _compare(scene, act.watched, act.expected)

    return check


def _run_plan(scene: Scene, act: Act, group: dist.Group) -> None:
    """Start a plan twice, the second time on other numbers in the same arrays."""
    step = scene.step
    plan = getattr(dist, f"plan_{step.operation}")(*act.args, group=group, **act.options)
    plan.start().wait()
    _compare(scene, act.watched, act.expected)
    again = ACTS[step.operation](Scene(step, scene.me, salt=1))
    for array, values in zip(act.arrays, again.arrays, strict=True):
        array[...] = values
    for target in act.watched:
        if isinstance(target, list) and step.given == "empty":
            target.clear()
    plan.start().wait()
    _compare(scene, act.watched, again.expected)
    plan.free()


def _run_ring(scene: Scene, group: dist.Group) -> Callable[[], None]:
    act = _ring(scene)
    outs, given, to, source = act.args
    any_source = None if scene.step.uneven else source
    tags = [7 + tag + 10 * scene.step.seed for tag in range(3)]
    works: list[dist.Work] = []
    if scene.step.form == "sync":
        for x, tag in zip(given, tags, strict=True):
            dist.send(x, to, group, tag=tag)
        pairs = list(zip(outs, tags, strict=True))
        for out, tag in reversed(pairs) if outs[0].nbytes <= _KEPT else pairs:
            work = dist.recv(out, any_source, group, tag=tag)
            assert work.source == source
    else:
        sends = [
            dist.P2POp(dist.isend, x, to, group, tag) for x, tag in zip(given, tags, strict=True)
        ]
        receives = [
            dist.P2POp(dist.irecv, x, any_source, group, tag)
            for x, tag in zip(outs, tags, strict=True)
        ]
        works = dist.batch_isend_irecv([*receives, *sends])

    def check() -> None:
        for work in works:
            work.wait()
        _compare(scene, act.watched, act.expected)

    return check


def _run_disagreement(scene: Scene, group: dist.Group) -> Callable[[], None]:
    act = _disagreement(scene)
    (x,) = act.args
    reducible = Op.SUM in operators(scene.step.dtype) and scene.step.dtype not in MOVED
    if scene.size == 1 or not reducible:
        return lambda: None
    work: dist.Work | None = None
    if scene.step.form == "async":
        work = dist.all_reduce(x, Op.SUM, group, sync_op=False)

    def check() -> None:
        with pytest.raises(dist.MismatchError, match="shape"):
            dist.all_reduce(x, Op.SUM, group) if work is None else work.wait()
        _compare(scene, act.watched, act.expected)

    if work is None:
        check()
        return lambda: None
    return check


_RUN: dict[str, Callable[[Scene, dist.Group], Callable[[], None]]] = {
    "ring": _run_ring,
    "disagreement": _run_disagreement,
}


# ---- comparing


def _compare(scene: Scene, watched: list[Any], expected: list[Any]) -> None:
    for got, wanted in zip(watched, expected, strict=True):
        _compare_one(scene.step, got, wanted)


def _compare_one(step: Step, got: Any, wanted: Any) -> None:
    if isinstance(wanted, list):
        assert len(got) == len(wanted)
        for each, other in zip(got, wanted, strict=True):
            _compare_one(step, each, other)
    elif not isinstance(wanted, np.ndarray):
        np.testing.assert_equal(got, wanted)
    else:
        _compare_arrays(step, got, wanted)


def _compare_arrays(step: Step, got: Array, wanted: Array) -> None:
    got = np.ascontiguousarray(np.asarray(got).astype(wanted.dtype)).reshape(got.shape)
    assert got.shape == wanted.shape
    inexact = step.operation in _REDUCTIONS and step.dtype in FLOATS + COMPLEX
    if not inexact and "longdouble" in step.dtype:  # some of its bytes mean nothing
        np.testing.assert_array_equal(got, wanted)
    elif not inexact:
        assert got.tobytes() == wanted.tobytes()
    elif step.op in (Op.MAX, Op.MIN):
        with np.errstate(invalid="ignore"):
            is_nan = np.isnan(wanted)
            assert (np.isnan(got) == is_nan).all()
            assert ((got == wanted) & (np.signbit(got) == np.signbit(wanted)))[~is_nan].all()
    else:
        kind = _wide(got.dtype)
        np.testing.assert_allclose(
            got.astype(kind), wanted.astype(kind), rtol=_TOLERANCE[step.dtype]
        )
