"""A JAX primitive for each verb: its shape, what becomes of it in `jvp`, `grad` and `vmap`.

Each is of a *form*, which says what it does to shapes, with n the ranks of the group:

| form | shape of the result |
|---|---|
| `SAME` | that of the operand |
| `GATHERED` | (n, *shape of the operand) |
| `SCATTERED` | that of the operand without its first axis, which is n long |
| `EXCHANGED` | that of the operand, whose first axis is n long |

All primitives but messages are linear, up to the operators MAX, MIN and PROD, so the tangent takes
the way of the value, and the cotangent the way back (`TRANSPOSES`).

[Note: order] Each rank has to begin its operations in the order of the program, and none may be
left out. JAX promises both for effects that are ordered. That of an ordered `jax.debug.callback`
is the only one that it lets through `checkpoint`, `custom_vjp` and a `vmap` of loops as well.
Where a process has several devices, it is that of `io_callback`, the only one that JAX orders over
them; then these three are refused. Both are read from traced functions: they have no public names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from hpcdist.errors import UsageError
from hpcdist.jax import handler
from hpcdist.jax.running import IN_PLACE, Site, beside, called_back, called_in_place, operation
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.reduction import ReduceOp

Params = dict[str, Any]


def _effect_of(function: Callable[[], Any]) -> Any:
    (effect,) = jax.make_jaxpr(function)().effects
    return effect


@cache
def ordered() -> Any:
    """Return the effect of all primitives; see [Note: order]."""
    if jax.local_device_count() > 1:
        return _effect_of(lambda: io_callback(lambda: None, None, ordered=True))
    return _effect_of(lambda: jax.debug.callback(lambda: None, ordered=True))


class Form(NamedTuple):
    """What a verb does to shapes, and to the axis over which it is batched."""

    shape: Callable[[tuple[int, ...], int], tuple[int, ...]]
    batch_in: Callable[[int], int]
    """Where the axis has to be, of an operand that has it there."""
    batch_out: Callable[[int], int]
    """Where it then is in the result."""


SAME = Form(lambda shape, n: shape, lambda at: at, lambda at: at)
GATHERED = Form(lambda shape, n: (n, *shape), lambda at: at, lambda at: at + 1)
SCATTERED = Form(lambda shape, n: shape[1:], lambda at: 1, lambda at: 0)
EXCHANGED = Form(lambda shape, n: shape, lambda at: 1, lambda at: 1)

FORMS: dict[str, Form | None] = {
    "all_reduce": SAME,
    "reduce": SAME,
    "broadcast": SAME,
    "sendrecv": SAME,
    "recv": SAME,
    "all_gather": GATHERED,
    "gather": GATHERED,
    "reduce_scatter": SCATTERED,
    "scatter": SCATTERED,
    "alltoall": EXCHANGED,
    "send": None,
    "barrier": None,
}
"""None: without a result."""

TRANSPOSES: dict[str, Callable[[Params], tuple[str, Params]]] = {
    "all_reduce": lambda params: ("all_reduce", params),
    "alltoall": lambda params: ("alltoall", params),
    "all_gather": lambda params: ("reduce_scatter", {**params, "op": ReduceOp.SUM}),
    "reduce_scatter": lambda params: ("all_gather", _without(params, "op")),
    "broadcast": lambda params: (
        "reduce",
        {**_without(params, "src"), "dst": params["src"], "op": ReduceOp.SUM},
    ),
    "reduce": lambda params: (
        "broadcast",
        {**_without(params, "dst", "op"), "src": params["dst"]},
    ),
    "scatter": lambda params: ("gather", {**_without(params, "src"), "dst": params["src"]}),
    "gather": lambda params: ("scatter", {**_without(params, "dst"), "src": params["dst"]}),
    "sendrecv": lambda params: (
        "sendrecv",
        {**params, "src": params["dst"], "dst": params["src"]},
    ),
}
"""The way back of each verb, and what it is called with."""

GATHERS = {"all_reduce": "all_gather", "reduce": "gather", "reduce_scatter": "alltoall"}
"""What brings a rank all that such a reduction reduces."""


NONLINEAR: dict[Any, Callable[..., Any]] = {
    ReduceOp.MAX: jnp.max,
    ReduceOp.MIN: jnp.min,
    ReduceOp.PROD: jnp.prod,
}
"""Operators with derivatives of their own: what they are on one array, over its first axis."""


def _without(params: Params, *names: str) -> Params:
    return {name: value for name, value in params.items() if name not in names}


def bind(verb: str, *operands: Any, **params: Any) -> Any:
    """Do `verb`, or trace it; `params` are its arguments, checked, and those of every verb.

    These are the `group`, the number `n` of its ranks, the `site`, and whether `several` devices
    run the program.
    """
    return PRIMITIVES[verb].bind(*operands, **params)


def _make(verb: str, form: Form | None) -> Primitive:
    primitive = Primitive(f"hpcdist_{verb}")
    primitive.multiple_results = form is None
    primitive.def_impl(partial(_at_once, verb))
    primitive.def_effectful_abstract_eval(partial(_abstract, form))
    mlir.register_lowering(primitive, partial(_lower, verb))
    mlir.register_lowering(primitive, partial(_lower_in_place, verb), platform="cpu")
    batching.primitive_batchers[primitive] = partial(_batch, verb, form)
    ad.primitive_jvps[primitive] = partial(_jvp if verb in TRANSPOSES else _refuse_jvp, verb)
    if verb in TRANSPOSES:
        ad.primitive_transposes[primitive] = partial(_transpose, verb)
    return primitive


def _at_once(verb: str, *operands: Any, **params: Any) -> Any:
    form = FORMS[verb]
    shapes = [_shaped(form, x, params["n"]) for x in operands if form]
    results = beside(verb, shapes, operation(verb, params), *operands)
    return jnp.asarray(results[0]) if form else []


def _shaped(form: Form, x: Any, n: int) -> Any:
    return ShapedArray(form.shape(x.shape, n), x.dtype)


def _abstract(
    form: Form | None, *operands: Any, n: int, several: bool, **params: Any
) -> tuple[Any, set[Any]]:
    if form is None:
        return [], {ordered()}
    (x,) = operands
    y = _shaped(form, x, n)
    if not several:
        return y, {ordered()}
    placed = NamedSharding(x.sharding.mesh, PartitionSpec(*[None] * y.ndim))
    return x.update(shape=y.shape, weak_type=False, sharding=placed), {ordered()}


def _lower(verb: str, ctx: Any, *operands: Any, **params: Any) -> Any:
    if params["several"]:
        return _lower_over_devices(verb, ctx, *operands, **params)
    effect = ordered()
    results, token, _ = mlir.emit_python_callback(
        ctx,
        called_back(verb, ctx.avals_out, params),
        ctx.tokens_in.get(effect),
        list(operands),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
    )
    ctx.set_tokens_out(mlir.TokenSet({effect: token}))
    return results


def _lower_in_place(verb: str, ctx: Any, *operands: Any, **params: Any) -> Any:
    if params["several"] or not handler.IS_THERE:
        return _lower(verb, ctx, *operands, **params)
    effect = ordered()
    number = handler.number_of(called_in_place(verb, [*ctx.avals_in, *ctx.avals_out], params))
    token, results = handler.lower(
        ctx, number, ctx.tokens_in.get(effect), operands, in_place=verb in IN_PLACE
    )
    ctx.set_tokens_out(mlir.TokenSet({effect: token}))
    _be_waited_for(ctx)
    return results


def _be_waited_for(ctx: Any) -> None:
    """Let JAX run the program on the thread of its caller, as it does where one has callbacks.

    XLA leaves out this one, for nobody uses its result.
    """
    nothing = ShapedArray((), np.dtype("int32"))
    alone = ctx.replace(avals_in=[], avals_out=[nothing])
    mlir.emit_python_callback(alone, lambda: (0,), None, [], [], [nothing], has_side_effect=False)


def _lower_over_devices(verb: str, ctx: Any, *operands: Any, **params: Any) -> Any:
    shapes = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in ctx.avals_out)
    callback = partial(io_callback, called_back(verb, shapes, params), shapes, ordered=True)
    return mlir.lower_fun(callback, multiple_results=True)(ctx, *operands)


def _batch(verb: str, form: Form | None, operands: Any, axes: Any, **params: Any) -> Any:
    (x,), (axis,) = operands, axes
    if form is None:
        return bind(verb, jnp.moveaxis(x, axis, 0), **params), []
    there = form.batch_in(axis)
    return bind(verb, jnp.moveaxis(x, axis, there), **params), form.batch_out(there)


def _jvp(verb: str, primals: Any, tangents: Any, **params: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    y = bind(verb, x, **params)
    if type(tangent) is ad.Zero:
        return y, _zero_like(y)
    if params.get("op") not in NONLINEAR:
        return y, bind(verb, tangent, **params)
    return y, jax.jvp(partial(_as_gathered, verb, **params), (x,), (tangent,))[1]


def _as_gathered(verb: str, x: Any, *, op: ReduceOp, **params: Any) -> Any:
    """Reduce `x` by a function of one array: MAX divides the gradient among equals, as JAX does."""
    return NONLINEAR[op](bind(GATHERS[verb], x, **params), axis=0)


def _refuse_jvp(verb: str, primals: Any, tangents: Any, **params: Any) -> Any:
    if all(type(each) is ad.Zero for each in tangents):
        y = bind(verb, *primals, **params)
        return y, _zero_like(y) if FORMS[verb] else []
    raise UsageError(
        f"hpcdist.jax.{verb}, {_where(params)}, has no derivative: nothing tells the other rank "
        "to send a gradient back; use sendrecv or permute, whose gradients take the way back, or "
        "give it jax.lax.stop_gradient(x)"
    )


def _zero_like(y: Any) -> Any:
    zero: Any = ad.Zero
    return zero.from_primal_value(y)


def _where(params: Params) -> str:
    site: Site = params["site"]
    return f"at {site.file}:{site.line}"


def _transpose(verb: str, cotangent: Any, x: Any, **params: Any) -> Any:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval)]
    back, its_params = TRANSPOSES[verb](params)
    given = bind(back, cotangent, **its_params)
    is_mean = params.get("op") is ReduceOp.AVG and "op" not in its_params
    return [given / params["n"] if is_mean else given]


PRIMITIVES = {verb: _make(verb, form) for verb, form in FORMS.items()}
