"""Random programs of arrays across ranks, and what NumPy says each of their lines comes to.

A program is lines of Python that mean the same for NumPy's arrays and for arrays across ranks, as
``b = np.cumsum(moved(a, 17), axis=0)``. `program` writes one: it runs each line on NumPy's arrays,
so it knows shapes and dtypes, and drops what NumPy refuses. `run_program` runs it on the ranks of
a random mesh and compares after each line.

Read in this order: `Line`, `FAMILIES` (what lines are made of), `BLANKS`, `program` (how they are
written), `Spread` (what their functions mean across ranks), `run_program`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, final

import numpy as np

import hpcdist as dist
from hpcdist.mesh.layout import Layout, make_layout
from hpcdist.mesh.reshard import reshard_to

Array = Any
Random = np.random.Generator

NAMES = ("a", "b", "c", "d")
INTEGERS = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
NUMBERS = (*INTEGERS, "f2", "f4", "f8", "c8", "c16")
DTYPES = (*NUMBERS, "m8[s]", "M8[D]")
_USUAL = ("f8", "f8", "f8", "f4", "i8", "i4", "c16", "?", "i2")
_LETTERS = (
    *("ij,jk", "ij,jk->k", "ij,kj->ik", "i,i", "ij,j->i", "ij,ij->i", "bij,bjk->bik", "ij,ik->jk"),
    *("i,j", "ij,i", "ij->ji", "ij->j", "ijk->ki", "ij->", "...i->i..."),
)
_NDIMS = (0, 1, 1, 2, 2, 2, 2, 3)
_WIDEST, _LARGEST = 4, 10_000

BOUNDARIES = {"periodic": "wrap", "reflect": "reflect", "symmetric": "symmetric", "nearest": "edge"}
"""Boundaries of `map_overlap`, by the names that `np.pad` has for them."""


class Line(NamedTuple):
    """An assignment to one of `NAMES`.

    `digits` says up to how many binary digits it is what NumPy says; None: it has NumPy's bits on
    any number of ranks, as no number was rounded in a way that depends on the order of additions.
    `contributes` says that it may have come to contributions, which few functions can change.
    """

    text: str
    target: str
    digits: int | None = None
    contributes: bool = False


class Program(NamedTuple):
    """Lines that were written from a seed; `largest` is the longest dimension that is made."""

    seed: int
    largest: int
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines)


# ---- what lines are made of


class Family(NamedTuple):
    """Templates of lines, one in each line of a text, and what holds for all of them.

    Attributes:
        text: expressions, or what is done to a copy of the target; `BLANKS` fills the braces.
        adds: numbers are added up, which is exact for whole numbers that are not too large.
        multiplies: the same of products of many numbers.
        rounds: the last bits depend on how the elements are taken together.
        jumps: what differs by a rounding may come to something else altogether.
        settles: contributions are taken for their value.
        contributes: the result may stay contributions.
        orders: numbers are compared, so that they must not be complex.
        changes: it is a statement.

    """

    text: str
    adds: bool = False
    multiplies: bool = False
    rounds: bool = False
    jumps: bool = False
    orders: bool = False
    settles: bool = True
    contributes: bool = False
    changes: bool = False

    @property
    def templates(self) -> list[str]:
        """The templates."""
        return [each for each in map(str.strip, self.text.splitlines()) if each]


FAMILIES = {
    "spreading": Family("""
        spread(numbers({shape}, {dtype}, {seed}), {how})
        moved({x}, {how})
        elsewhere({x}, {how})
        np.zeros_like({x})
        np.full_like({x}, {n})
    """),
    "contributions": Family("""
        contributed({x}, {how})
        summands({x}, {how})
        summands({x}, {how}) + summands({y}, {how2})
        elsewhere(summands({x}, {how}), {how2})
    """, contributes=True, adds=True),
    "pointwise": Family("""
        {x} + {y}
        {y} - {x}
        {x} * {y}
        {x} + {n}
        {n} - {x}
        {x} * {n}
        ({x} * 2 + {y}) * {n} - {x}
        -{x}
        abs({x})
        np.square({x})
        np.conj({x})
        np.real({x})
        {x}.imag
        {x} / {k}
        {x} / (abs({y}) + 1)
        np.sqrt(abs({x}))
        np.where(np.isnan({x}), {n}, {x})
        np.nan_to_num({x})
        {x}.astype({float})
    """),
    "limits": Family("""
        np.maximum({x}, {y})
        np.fmin({x}, {n})
        np.clip({x}, {n}, {n2})
        np.clip({x}, None, {y})
    """, orders=True),
    "functions": Family("""
        np.exp({x} / 9)
        np.sin({x})
        np.hypot({x}, {y})
        np.logaddexp({x}, {y})
        np.log1p(abs({x}))
        np.sinc({x})
    """, rounds=True),
    "angles": Family("""
        np.angle({x}, {flag})
        np.arctan2({x}, {y})
        np.copysign({x}, {y})
        np.nextafter({x}, {y})
    """, rounds=True, jumps=True, settles=False),
    "choices": Family("""
        {x} // {k}
        {x} % {k}
        np.divmod({x}, {k})[1]
        np.modf({x} / 2)[{flag:d}]
        {x} > {y}
        {x} == {y}
        {x} <= {n}
        np.sign({x})
        np.round({x}, {count})
        np.floor({x})
        np.trunc({x})
        np.where({x} > {n}, {x}, {y})
        np.where({x} > {n}, np.nan, {x})
        {x} & {y}
        {x} ^ {n}
        ~{x}
        {x} << {count}
        np.isin({x} * 1, [1, 2, {n}])
        np.logical_or({x}, {y})
        np.isclose({x}, {y})
        np.digitize({x}, [-3, 0, 2])
        {x}.astype({dtype})
    """, jumps=True),
    "sums": Family("""
        np.sum({x}, axis={axes}, keepdims={flag})
        {x}.sum({axis})
        np.sum({x}, axis={axis}, dtype={number})
        np.sum({x}, {axes}, initial={n})
        np.sum({x}, axis={axis}, where={x} == {x})
        np.add.reduce({x}, axis={axis})
        np.nansum({x}, axis={axes})
        np.mean({x}, axis={axes}, keepdims={flag})
        np.nanmean({x}, axis={axis})
        np.average({x}, {axis}, weights=({x} == {x}) + 1)
        np.cumsum({x}, axis={axis})
        np.cumsum({x})
        np.cumsum({x}, {axis}, {number})
        np.trace({x}, {n})
        np.convolve({x}, {y}, {mode})
        np.linalg.norm({x}, axis={axis}, keepdims={flag})
        np.linalg.norm({x})
    """, adds=True),
    "variances": Family("""
        np.var({x}, axis={axes})
        np.std({x}, axis={axis}, ddof={flag:d}, keepdims={flag2})
    """, rounds=True),
    "products": Family("""
        np.prod({x}, axis={axes}, keepdims={flag})
        np.cumprod({x}, axis={axis})
        np.multiply.reduce({x}, axis={axis})
    """, multiplies=True, jumps=True),
    "extremes": Family("""
        np.max({x}, axis={axes}, keepdims={flag})
        {x}.min({axis})
        np.max({x}, axis={axis}, initial={n})
        np.nanmax({x}, axis={axis})
        np.nanmin({x})
        np.ptp({x}, axis={axis})
        np.maximum.reduce({x}, axis={axis})
    """, orders=True),
    "counts": Family("""
        np.any({x}, axis={axes})
        np.all({x}, axis={axis}, keepdims={flag})
        np.count_nonzero({x}, axis={axes})
        np.argmax({x}, axis={axis})
        np.argmin({x}, axis={axis}, keepdims={flag})
        np.argmax({x})
        np.bincount({x}, minlength={count})
        np.histogram({x}, [-5, -1, 0, 2, 9])[0]
        np.histogram({x}, 4)[{flag:d}]
    """, jumps=True, orders=True),
    "matrices": Family("""
        {x} @ {y}
        {x} @ {x}.T
        {x}.T @ {y}
        np.dot({x}, {y})
        np.inner({x}, {y})
        np.vdot({x}, {x})
        np.tensordot({x}, {y}, {count})
        np.tensordot({x}, {y}, ([{axis}], [{axis2}]))
        np.einsum({letters}, {x}, {y})
        np.einsum({letters1}, {x})
        np.matmul(np.expand_dims({x}, 0), {y})
    """, adds=True),
    "outer products": Family("""
        np.outer({x}, {y})
        np.multiply.outer({x}, {y})
        np.cross({x}, {y})
    """),
    "shapes": Family("""
        {x}.T
        np.transpose({x}, {order})
        np.swapaxes({x}, {axis}, {axis2})
        np.moveaxis({x}, {axis}, {axis2})
        np.expand_dims({x}, {axis})
        np.squeeze({x})
        {x}.reshape({new_shape})
        np.ravel({x})
        np.flip({x}, {axes})
        np.roll({x}, {n}, {axis})
        np.roll({x}, {n})
        np.roll({x}, ({n}, {n2}), ({axis}, {axis2}))
        np.broadcast_to({x}, ({count}, *{x}.shape))
        np.concatenate([{x}, {y}], axis={axis})
        np.concatenate([{x}, {y}, {x}], axis=None)
        np.stack([{x}, {y}], axis={axis})
        np.hstack([{x}, {y}])
        np.array_split({x}, {k}, axis={axis})[-1]
        np.repeat({x}, {count}, axis={axis})
        np.tile({x}, {reps})
        np.pad({x}, {widths}, {pad_mode})
        np.pad({x}, {widths}, constant_values={n})
        np.take({x}, {places}, axis={axis}, mode="wrap")
        np.take({x}, {places}, axis={axis})
        np.tril({x}, {n})
        np.triu({x})
        np.diagonal({x}, {n})
        np.atleast_2d({x})
        np.meshgrid({x}, {y})[{flag:d}]
        np.diff({x}, axis={axis})
        np.diff({x}, {k}, {axis}, prepend={n})
        np.fft.fftshift({x}, axes={axis})
    """),
    "slices": Family("""
        {x}.copy()
        {x}[{index}]
        {x}[{index}]
        {x}[{index}][..., None]
        {x}[{places}]
        {x}[:, {places}]
    """, settles=False),
    "masks": Family("""
        {x}[{x} > {n}]
        {x}[{x}[:, 0] == {x}[:, 0]]
        np.compress([True, False, True], {x}, {axis})
        np.nonzero({x})[-1]
        np.argwhere({x})
        np.flatnonzero({x} > {n})
    """, jumps=True, settles=False),
    "order": Family("""
        np.sort({x}, axis={axis})
        np.sort({x}, axis=None)
        np.argsort({x}, axis={axis}, kind="stable")
        np.argsort({x}, axis=None, kind="stable")
        np.unique({x})
        np.unique({x}, return_counts=True)[1]
        np.unique({x}, return_inverse=True)[1]
        np.unique({x}, return_index=True)[1]
        np.searchsorted(np.sort({x}, axis=None), {n})
        np.searchsorted(np.sort({x}, axis=None), {y}, side="right")
        np.median({x}, axis={axis})
        np.median({x})
        np.quantile({x}, [0.1, 0.5, 1.0], axis={axis})
        np.percentile({x}, 30)
    """, jumps=True),
    "differences": Family("""
        np.gradient({x}, axis={axis})
        np.interp({x}, [-4, 0, 5], [0.0, 1.0, 8.0])
    """),
    "overlaps": Family("""
        smoothed({x}, {depth}, {bounds})
        smoothed({x}, {depth}, {bounds}, {k})
        smoothed(summands({x}, {how}), {depth}, {bounds})
    """, adds=True, orders=True),
    "transforms": Family("""
        np.fft.fft({x}, axis={axis})
        np.fft.ifft({x}, {k}, axis={axis}, norm="ortho")
        np.fft.rfft({x}, axis={axis})
        np.fft.irfft({x}, axis={axis})
        np.fft.fft2({x})
        np.fft.fftn({x}, axes={axes})
    """, rounds=True),
    "assignments": Family("""
        {name}[{index}] = {n}
        {name}[{index}] = {y}
        {name}[{index}] = {name}[{index2}]
        {name}[{name} > {n}] = {n2}
        {name}[{name} == {name}] = {name}[{name} == {name}] * 2
        {name}.fill({n})
        {name}.sort({axis})
    """, jumps=True, settles=False, changes=True),
    "updates": Family("""
        {name} += {y}
        {name} *= {n}
        {name} -= {x}
        {name}[{index}] += {n}
        np.add({x}, {y}, out={name})
        np.multiply({x}, {n}, out={name}, where={x} == {x})
        np.sum({x}, axis={axis}, out={name})
    """, settles=False, changes=True, adds=True),
}  # fmt: skip


@final
class Blanks(dict[str, Any]):
    """What fills the braces of a template: drawn when it is asked for, the same every time."""

    def __init__(
        self, random: Random, arrays: dict[str, Array], family: Family, contributing: set[str]
    ) -> None:
        super().__init__()
        self.random, self.arrays, self.family = random, arrays, family
        self.contributing = contributing
        self.own: str = self.one_of([*arrays])
        self.x = arrays[self.own]
        self.operands: set[str] = set()

    def __missing__(self, name: str) -> Any:
        self[name] = BLANKS[name.rstrip("0123456789")](self)
        return self[name]

    def one_of(self, choices: Sequence[Any]) -> Any:
        """Return one of some choices."""
        return choices[int(self.random.integers(len(choices)))]

    def below(self, end: int) -> int:
        """Return a number from 0 to before `end`."""
        return int(self.random.integers(end))

    def chance(self, share: float) -> bool:
        """Return True in a share of all cases."""
        return bool(self.random.random() < share)

    def operand(self) -> str:
        """Return the name of `x`, which is one of the operands."""
        self.operands.add(self.own)
        return self.own

    def dimension(self) -> int:
        """Return a dimension of `x`, maybe from the end."""
        return int(self.random.integers(-self.x.ndim, max(self.x.ndim, 1)))

    def wrapped(self, text: str) -> str:
        """Return an operand as it is, or moved."""
        if self.family.settles and self.chance(0.08):
            return f"contributed({text}, {self.below(1000)})"
        return f"moved({text}, {self.below(1000)})" if self.chance(0.15) else text


def _other(blanks: Blanks) -> str:
    """Return an operand beside `x`: another array, part of one, or an ordinary array."""
    name = blanks.one_of([*blanks.arrays])
    kind = blanks.below(8)
    if kind == 0:
        shape, dtype = blanks.x.shape[-1:], blanks.one_of(_USUAL)
        return f"numbers({shape}, {dtype!r}, {blanks.below(1000)})"
    name = blanks.own if kind < 3 else name
    blanks.operands.add(name)
    form = blanks.one_of(["{}", "{}", "{}", "{}[:1]", "{}[..., :1]", "{}.T"]) if kind < 6 else "{}"
    form = form if name not in blanks.contributing else "{}"  # an index needs values
    return blanks.wrapped(form.format(name))


def _index(blanks: Blanks) -> str:
    """Return the inside of the brackets of a basic index."""
    items = []
    for length in blanks.x.shape[: blanks.below(blanks.x.ndim + 1)]:
        kind = blanks.below(4)
        if kind == 0 and length:
            items.append(str(int(blanks.random.integers(-length, length))))
        elif kind == 1:
            items.append(":")
        else:
            low, high = (int(each) for each in blanks.random.integers(-length - 1, length + 2, 2))
            ends = ["" if blanks.chance(0.3) else str(each) for each in (low, high)]
            items.append(f"{ends[0]}:{ends[1]}:{blanks.one_of(['', '', 1, 2, 3, -1, -2])}")
    if blanks.chance(0.2):
        items.insert(blanks.below(len(items) + 1), "None")
    return ", ".join([*items, "..."])


def _new_shape(blanks: Blanks) -> tuple[int, ...]:
    """Return a shape of as many elements as `x`."""
    rest, shape = blanks.x.size, []
    for _ in range(blanks.below(3)):
        divisors = [each for each in range(1, min(rest, 40) + 1) if rest % each == 0] or [1]
        shape.append(blanks.one_of(divisors))
        rest //= shape[-1]
    shape.append(rest)
    if blanks.x.size and blanks.chance(0.3):
        shape[blanks.below(len(shape))] = -1
    return tuple(shape)


def _axes(blanks: Blanks) -> Any:
    kind = blanks.below(4)
    if kind == 0 or not blanks.x.ndim:
        return None
    if kind < 3:
        return blanks.dimension()
    count = 1 + blanks.below(blanks.x.ndim)
    return tuple(blanks.random.permutation(blanks.x.ndim)[:count].tolist())


def _depth(blanks: Blanks) -> list[tuple[int, ...]]:
    return [tuple(blanks.random.integers(0, 4, 2).tolist()) for _ in range(blanks.x.ndim)]


def _bounds(blanks: Blanks) -> list[Any]:
    return [blanks.one_of([*BOUNDARIES, 0, 3]) for _ in range(blanks.x.ndim)]


BLANKS: dict[str, Callable[[Blanks], Any]] = {
    "name": Blanks.operand,
    "x": lambda blanks: blanks.wrapped(blanks.operand()),
    "y": _other,
    "n": lambda blanks: int(blanks.random.integers(-4, 10)),
    "k": lambda blanks: blanks.one_of([1, 2, 3, 4, 5, 7]),
    "count": lambda blanks: blanks.below(4),
    "flag": lambda blanks: blanks.chance(0.5),
    "axis": Blanks.dimension,
    "axes": _axes,
    "order": lambda blanks: tuple(blanks.random.permutation(blanks.x.ndim).tolist()),
    "shape": lambda blanks: blanks.x.shape,
    "new_shape": _new_shape,
    "dtype": lambda blanks: repr(blanks.one_of(DTYPES)),
    "number": lambda blanks: repr(blanks.one_of(NUMBERS)),
    "float": lambda blanks: repr(blanks.one_of(["f4", "f8", "c8", "c16"])),
    "seed": lambda blanks: blanks.below(1000),
    "how": lambda blanks: blanks.below(1000),
    "index": _index,
    "places": lambda blanks: blanks.random.integers(-4, 5, 1 + blanks.below(5)).tolist(),
    "reps": lambda blanks: tuple(blanks.random.integers(0, 3, 1 + blanks.below(3)).tolist()),
    "widths": lambda blanks: blanks.random.integers(0, 3, (blanks.x.ndim, 2)).tolist(),
    "mode": lambda blanks: repr(blanks.one_of(["full", "same", "valid"])),
    "depth": _depth,
    "bounds": _bounds,
    "pad_mode": lambda blanks: repr(blanks.one_of(["edge", "reflect", "symmetric", "wrap"])),
    "letters": lambda blanks: repr(blanks.one_of(_LETTERS)),
}


# ---- how a program is written


def program(seed: int, length: int = 20, largest: int = 8) -> Program:
    """Return the program of a seed, the same wherever it is written.

    Args:
        seed: any number.
        length: how many lines it has.
        largest: of which length the dimensions of new arrays are, at most; of some tens, for there
            are outer products.

    """
    random = np.random.default_rng([seed, length, largest])
    names = names_of(Whole())
    lines: list[Line] = []
    known: dict[str, Line] = {}
    with warnings.catch_warnings(), np.errstate(over="raise", divide="raise", invalid="raise"):
        warnings.simplefilter("error")
        for target in NAMES[:3]:
            known[target] = _written(f"{target} = {_new(random, largest)}", target, names)
            lines.append(known[target])
        while len(lines) < length:
            line = _next(random, names, known, largest)
            if line is not None:
                lines.append(line)
                known[line.target] = line
    return Program(seed, largest, tuple(lines))


def _new(random: Random, largest: int) -> str:
    least = 0 if random.random() < 0.1 else 1
    ndim = _NDIMS[random.integers(len(_NDIMS))]
    shape = tuple(random.integers(least, largest, ndim).tolist())
    while math.prod(shape) > largest * largest:
        shape = shape[1:]
    dtype = _USUAL[random.integers(len(_USUAL))] if random.random() < 0.7 else None
    dtype = dtype or DTYPES[random.integers(len(DTYPES))]
    seed, how = random.integers(1000, size=2)
    return f"spread(numbers({shape}, {dtype!r}, {seed}), {how})"


def _written(text: str, target: str, names: dict[str, Any]) -> Line:
    exec(text, names)
    return Line(text, target)


def _next(
    random: Random, names: dict[str, Any], known: dict[str, Line], largest: int
) -> Line | None:
    """Return the next line, and run it; None if what has been drawn makes no sense."""
    if random.random() < 0.03:
        target = NAMES[random.integers(len(NAMES))]
        return _written(f"{target} = {_new(random, largest)}", target, names)
    family = [*FAMILIES.values()][random.integers(len(FAMILIES))]
    contributing = {name for name, line in known.items() if line.contributes}
    blanks = Blanks(random, {name: names[name] for name in known}, family, contributing)
    template = blanks.one_of(family.templates)
    text = template.format_map(blanks)
    target = blanks.own if family.changes else blanks.one_of(NAMES)
    used = [names[name] for name in sorted(blanks.operands)]
    told = [known[name].digits for name in blanks.operands]
    digits = [each for each in told if each is not None]
    if family.jumps and digits:
        return None
    if not family.settles and contributing & blanks.operands:
        return None
    if family.orders and any(each.dtype.kind == "c" for each in used):
        return None
    text = f"{target} = {target}.copy(); {text}" if family.changes else f"{target} = {text}"
    trial = dict(names)
    try:
        exec(text, trial)
        made = np.asarray(trial[target])
    except Exception:  # whatever NumPy says of what makes no sense
        return None
    if not _is_fit(made, largest) or (made.size < 2 and random.random() < 0.8):
        return None
    if digits and made.dtype.kind == "m":  # durations are cut off
        return None
    names[target] = made
    if made.dtype.kind in "fc" and (digits or not _stays_exact(family, used, made)):
        digits = [*digits, *[_digits(each.dtype) for each in (*used, made)]]
        return Line(text, target, min(digits), family.contributes)
    return Line(text, target, contributes=family.contributes)


def _is_fit(made: Array, largest: int) -> bool:
    """Return whether one can go on with an array: it is not large, nor are its numbers."""
    if made.dtype.kind not in "?biufcmM" or made.ndim > _WIDEST:
        return False
    if made.size > max(1000, 4 * largest * largest):
        return False
    sizes = np.abs(made.view("i8") if made.dtype.kind in "mM" else made)
    return bool(np.all((sizes <= _LARGEST) | (sizes != sizes)))


def _stays_exact(family: Family, used: Iterable[Array], made: Array) -> bool:
    """Return whether the order in which numbers are taken together does not matter."""
    arrays = [*used, made]
    if family.rounds:
        return False
    if not (family.adds or family.multiplies):
        return True
    digits = min([_digits(each.dtype) for each in arrays])
    if not all(map(_is_whole, arrays if family.multiplies else arrays[:-1])):
        return False
    with np.errstate(over="ignore"):
        sizes = [np.abs(each).astype("f8") for each in arrays[:-1] if each.dtype.kind in "iufc"]
        if family.multiplies:
            most = max([float(np.prod(np.maximum(each, 1))) for each in sizes], default=1)
        else:
            most = math.prod([1 + float(each.sum()) for each in sizes])
    return most < 2.0**digits


def _digits(dtype: np.dtype) -> int:
    """Return up to how many binary digits whole numbers of a dtype are exact."""
    return int(np.finfo(dtype).nmant) if dtype.kind in "fc" else 53


def _is_whole(array: Array) -> bool:
    if array.dtype.kind not in "fc":
        return True
    return bool(np.all(np.isfinite(array)) and np.all(array == np.rint(array)))


# ---- what the functions of a program mean


def numbers(shape: Sequence[int], dtype: str, seed: int) -> Array:
    """Return an array of small whole numbers, with which much can be computed exactly."""
    kind = np.dtype(dtype)
    values = np.random.default_rng(seed).integers(-4, 6, shape)
    if kind.kind == "b":
        return np.asarray(values > 0)
    if kind.kind == "c":
        return np.asarray(
            values + 1j * np.asarray(values)[..., ::-1] if shape else values + 2j, kind
        )
    return np.asarray(np.abs(values) if kind.kind == "u" else values).astype(kind)


@final
class Whole:
    """The functions for NumPy's arrays, which are nowhere else."""

    def spread(self, x: Array, how: int) -> Array:
        return x

    moved = elsewhere = contributed = summands = spread

    def smoothed(self, x: Array, depth: Sequence[Any], bounds: Any, times: int = 1) -> Array:
        for _ in range(times):
            around = x
            for dim, (pair, bound) in enumerate(zip(depth, bounds, strict=True)):
                widths = [pair if each == dim else (0, 0) for each in range(x.ndim)]
                mode = BOUNDARIES.get(bound, "constant")
                more = {} if bound in BOUNDARIES else {"constant_values": bound}
                around = _pad(around, widths, mode, **more)
            x = np.clip(_stencil(around, depth), -9, 9)
        return x


@final
class Spread:
    """The functions for arrays across the ranks of a mesh; `how` is a seed of a layout."""

    def __init__(self, mesh: dist.ProcessMesh) -> None:
        self.mesh = mesh

    def spread(self, x: Array, how: int) -> dist.DistArray:
        """Return this rank's part of an array in any layout."""
        layout = any_layout(self.mesh, x.shape, how)
        here = self.mesh.coordinate
        assert here is not None
        part = x[tuple(slice(lo, hi) for lo, hi in layout.box(here))].copy()
        return dist.DistArray._of(np.asarray(part), layout)

    def moved(self, a: dist.DistArray, how: int) -> Any:
        """Return an array in any other layout."""
        if not isinstance(a, dist.DistArray):
            return a
        return reshard_to(a, any_layout(self.mesh, a.shape, how))

    def elsewhere(self, a: dist.DistArray, how: int) -> Any:
        """Return an array that has been on a mesh of some of the ranks, in any order."""
        some = 1 + how % self.mesh.size
        other = mesh_of(self.mesh.process_ids[:some], how)
        there = reshard_to(a, any_layout(other, a.shape, how + 1))
        return reshard_to(there, any_layout(self.mesh, a.shape, how + 2))

    def smoothed(self, a: Any, depth: Sequence[Any], bounds: Any, times: int = 1) -> Any:
        """Return what a chain of stencils makes of an array."""
        if not isinstance(a, dist.DistArray):
            return Whole().smoothed(a, depth, bounds, times)
        around = {"depth": dict(enumerate(depth)), "boundary": dict(enumerate(bounds))}
        for _ in range(times):
            a = np.clip(dist.map_overlap(lambda part: _stencil(part, depth), a, **around), -9, 9)
        return a

    def contributed(self, a: dist.DistArray, how: int) -> Any:
        """Return an array as contributions, if there are any of its dtype."""
        if not isinstance(a, dist.DistArray) or a.dtype.kind in "mM":
            return a
        random = np.random.default_rng(how)
        kinds = _KINDS.get(a.dtype.kind, _KINDS["i"])
        kind = kinds[random.integers(len(kinds))]
        axes = [dist.Replicate(), *map(dist.Shard, range(a.ndim)), *[dist.Partial(kind)] * 3]
        chosen = random.integers(len(axes), size=self.mesh.ndim)
        return dist.reshard(a, self.mesh, [axes[each] for each in chosen])

    def summands(self, a: dist.DistArray, how: int) -> Any:
        """Return an array of numbers as sums, to which every rank contributes something else."""
        if not isinstance(a, dist.DistArray) or a.dtype.kind not in "iufc" or a.dtype == np.half:
            return a
        axis = how % self.mesh.ndim
        layout = any_layout(self.mesh, a.shape, how)
        placements = [*layout.placements]
        placements[axis] = dist.Partial()
        made = dist.reshard(a, self.mesh, placements)
        here = self.mesh.coordinate
        assert here is not None
        box = made.layout.box(here)
        given = np.random.default_rng([how, *np.ravel(box)]).integers(0, 5, made.local.shape)
        if here[axis] == 0:
            made.local[...] += given.astype(a.dtype)
        if here[axis] == self.mesh.shape[axis] - 1:
            made.local[...] -= given.astype(a.dtype)
        return made


_KINDS = {
    "i": [dist.ReduceType.kRedSum, dist.ReduceType.kRedMax, dist.ReduceType.kRedMin],
    "b": [dist.ReduceType.kRedAny, dist.ReduceType.kRedAll],
    "c": [dist.ReduceType.kRedSum],
}
"""How contributions of a kind of dtype are reduced."""


_pad: Any = np.pad


def _stencil(part: Array, depth: Sequence[tuple[int, int]]) -> Array:
    """Return a sum of neighbours of each element, of a part with what is around it."""
    for dim, (before, behind) in enumerate(depth):
        count = part.shape[dim] - before - behind
        own, first, last = (
            part[(slice(None),) * dim + (slice(start, start + count),)]
            for start in (before, 0, before + behind)
        )
        part = own * 2 - first + last
    return part


def names_of(functions: Whole | Spread) -> dict[str, Any]:
    """Return what a program calls by name."""
    own = {name: getattr(functions, name) for name in vars(Whole) if not name.startswith("_")}
    return {"np": np, "numbers": numbers, **own}


def mesh_of(ranks: Sequence[int], how: int) -> dist.ProcessMesh:
    """Return a mesh of ranks in any order and shape."""
    random = np.random.default_rng([how, len(ranks)])
    order = random.permutation(ranks) if random.random() < 0.7 else np.array(ranks)
    divisors = [each for each in range(1, len(ranks) + 1) if len(ranks) % each == 0]
    if random.random() < 0.5:
        return dist.ProcessMesh(order)
    return dist.ProcessMesh(order.reshape(divisors[random.integers(len(divisors))], -1))


def any_layout(mesh: dist.ProcessMesh, shape: tuple[int, ...], how: int) -> Layout:
    """Return a layout in which the axes of a mesh cut any dimensions, evenly or anywhere."""
    random = np.random.default_rng([how, *shape])
    axes: list[list[int]] = [[] for _ in shape]
    for axis in random.permutation(mesh.ndim).tolist():
        dim = int(random.integers(-1 if random.random() < 0.5 else 0, max(len(shape), 1)))
        if 0 <= dim < len(shape):
            axes[dim].append(axis)
    if random.random() < 0.4:
        return make_layout(mesh, shape, axes)
    cuts = []
    for length, cutting in zip(shape, axes, strict=True):
        inner = math.prod([mesh.shape[axis] for axis in cutting]) - 1
        cuts.append((0, *sorted(random.integers(0, length + 1, inner).tolist()), length))
    return make_layout(mesh, shape, axes, cuts)


# ---- running


def run_program(program: Program, ranks: Sequence[int] | None = None) -> list[str]:
    """Run a program on some ranks (None: all) and on NumPy's arrays, and compare each line.

    Collective over these ranks; the others return at once.

    Returns:
        For each line that is exact a digest of what it came to.

    Raises:
        AssertionError: a line came to something else; on all ranks, with the lines up to it.

    """
    ranks = range(dist.get_world_size()) if ranks is None else ranks
    mesh = mesh_of(ranks, program.seed)
    if mesh.coordinate is None:
        return []
    ours, theirs = names_of(Spread(mesh)), names_of(Whole())
    digests: list[str] = []
    told = [f"program({program.seed}, {len(program.lines)}, {program.largest}) on {mesh.mesh}:"]
    for line in program.lines:
        told.append(line.text)
        exec(line.text, theirs)
        theirs[line.target] = np.asarray(theirs[line.target])
        digest, problem = "", None
        try:
            exec(line.text, ours)
            told[-1] += f"  # {getattr(ours[line.target], 'layout', None)}"
            digest, whole = _compared(ours[line.target], theirs[line.target], line)
            theirs[line.target] = whole  # or what is rounded differently would be multiplied
        except Exception as error:
            problem = error
        _agreed(mesh, ours.get(line.target), problem, "\n".join(told))
        digests += [digest] if line.digits is None else []
    return digests


def _agreed(mesh: dist.ProcessMesh, found: Any, problem: Exception | None, told: str) -> None:
    """Check that no rank has a problem, and that ranks with the same part have equal bits of it."""
    words = None if problem is None else f"{type(problem).__name__}: {problem}"
    is_found = words is None
    mine = (found.layout.box(mesh.coordinate), _bits(found.local)) if is_found else None
    if is_found and found.layout.is_partial:
        mine = None
    everyone: list[Any] = [(words, mine)]
    if mesh.size > 1:
        everyone.clear()
        try:
            dist.all_gather_object(everyone, (words, mine), mesh.group)
        except dist.HpcdistError as error:
            raise AssertionError(f"{told}\n{words or error}") from problem or error
    failed = {
        rank: each[0] for rank, each in zip(mesh.group.ranks, everyone, strict=True) if each[0]
    }
    if failed:
        raise AssertionError(f"{told}\n{failed}") from problem
    held: dict[Any, str] = {}
    for box, digest in filter(None, (each[1] for each in everyone)):
        if held.setdefault(box, digest) != digest:
            raise AssertionError(f"{told}\nranks that have {box} have different bits of it")


def _compared(found: Any, wanted: Array, line: Line) -> tuple[str, Array]:
    """Check an array against NumPy's result; return a digest of it, and the whole of it."""
    assert isinstance(found, dist.DistArray), type(found)
    here = found.layout.mesh.coordinate
    assert here is not None
    assert type(found.local) is np.ndarray, type(found.local)
    assert found.local.shape == found.layout.local_shape(here), found.layout
    whole = dist.unshard_dtensor(found)
    assert found.shape == whole.shape == wanted.shape, (found.shape, wanted.shape)
    assert found.dtype == whole.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    if line.digits is None:
        np.testing.assert_array_equal(whole, wanted)
    else:
        tolerance = 2.0 ** (-0.6 * line.digits)
        scale = float(np.max(np.nan_to_num(np.abs(wanted)), initial=1))
        np.testing.assert_allclose(whole, wanted, rtol=tolerance, atol=tolerance * scale)
    return _digest(whole), whole


def _digest(array: Array) -> str:
    """Return a digest of the numbers of an array: of every NaN the same, and of both zeros."""
    if array.dtype.kind in "fc":
        array = np.where(array != array, np.nan, array + array.dtype.type(0)).astype(array.dtype)
    return _bits(array)


def _bits(array: Array) -> str:
    return sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
