"""`HybridParallelOptimizer`: any optimizer of torch, for a model that is trained on a grid.

[Note: either order] A model and its optimizer are given to fleet one after the other, in any order.
Sharding replaces parameters (stages 2 and 3), and divides the optimizer's state by what the model
is (stage 1). So the optimizer that really steps is made when it is first needed, and parameters
that have been replaced are followed where the optimizer's groups are read.

[Note: one list] The groups are those of the optimizer that was given, so a group that is added to
either is a group of both. The optimizer that takes its place (ZeRO, LARS, LAMB) is told of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch.utils.weak import TensorWeakRef

from hpcdist.comm.states import verify_states
from hpcdist.errors import UsageError
from hpcdist.parallel.clipping import Measured, clip_factor
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.torch.hybrid.given import check_optimizer, norm_limit, states_of_group, with_latest
from hpcdist.torch.hybrid.gradients import Gradients, reduce_all
from hpcdist.torch.hybrid.model import cuts_parameters
from hpcdist.torch.hybrid.replacements import arguments_of, as_asked, ask_group
from hpcdist.torch.hybrid.states import Number, Part, State, as_state, fill, states_in
from hpcdist.torch.on_grid import (
    DATA_AXES,
    Role,
    latest,
    local_of,
    measure_on_grid,
    role_of,
)
from hpcdist.torch.optimizers import (
    initial_state,
    is_dampened,
    loss_of,
    materialize_states,
    set_aside,
)
from hpcdist.torch.sharded import shard_states
from hpcdist.torch.zero import ZeroRedundancyOptimizer
from hpcdist.transport.call.reduction import ReduceOp


@final
class HybridParallelOptimizer(torch.optim.Optimizer):  # type: ignore[misc] # torch is untyped
    """Steps the parameters of a model of `fleet.distributed_model`.

    `step` is collective over the grid. It makes gradients those of the whole batch, as far as the
    backward pass has not, clips them, steps, and with localsgd averages weights. With gradient
    merge it does so every `k_steps` calls, and in the others only counts; `zero_grad` then keeps
    gradients that are gathered.

    Args:
        optimizer: one of torch, of the model's parameters.
        hcg: the grid.
        strategy: what to do; None for nothing special.
        clip_norm: the largest norm of the gradients, taken over the whole model, or an object that
            has it as `clip_norm`, such as Paddle's ``ClipGradByGlobalNorm``; None does not clip.

    Attributes:
        inner: the optimizer that was given.

    Raises:
        UsageError: it is no optimizer of torch, or has taken steps.

    Example:
        >>> import torch, hpcdist as dist
        >>> _ = dist.fleet.init(dp=-1)
        >>> model = dist.fleet.distributed_model(torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = dist.fleet.distributed_optimizer(optimizer)
        >>> model(torch.ones(4, 8)).sum().backward()
        >>> _ = optimizer.step()

    """

    inner: Any = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        hcg: HybridCommunicateGroup,
        strategy: HybridOptions | None = None,
        *,
        clip_norm: Any = None,
    ) -> None:
        options = strategy or HybridOptions()
        if isinstance(optimizer, HybridParallelOptimizer):
            raise UsageError("this optimizer is a distributed one already; use it as it is")
        check_optimizer(optimizer, options)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner, self.grid, self.options = optimizer, hcg, options  # see [Note: one list]
        self.clip_norm = clip_norm
        self.state = optimizer.state
        self._engine: Any = None
        self._gradients = Gradients(hcg, options)
        self._steps = 0
        self._cleared: list[tuple[Any, TensorWeakRef]] = []
        self._told: object = self  # the largest norm that the other ranks have heard of

    # ---- parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters, those of the optimizer that was given.

        Options that are changed here, for example by a scheduler, hold from the next step on.
        """
        groups = self._groups if self.inner is None else self.inner.param_groups
        for group in groups:
            if any(latest(each) is not each for each in group["params"]):
                group["params"] = [latest(each) for each in group["params"]]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, such as layers that were frozen so far.

        They are trained from the next step on, as torch's optimizers do. Collective over the ranks
        that have the same stage of a pipeline.

        Args:
            param_group: the parameters as ``"params"``, and options that differ from the defaults.

        Raises:
            UsageError: it is no group, has parameters that are in one already, or this step's
                gradients have been unscaled or clipped; the other ranks get a `RemoteError`.
            MismatchError: ranks add other groups.

        """
        if self.inner is None:  # torch lists the groups of the optimizer that was given
            super().add_param_group(param_group)
            return
        problem: UsageError | None = None
        states: list[Any] = []
        before = len(self.param_groups)
        try:
            self._check_between_steps()
            self.inner.add_param_group(with_latest(param_group))
            states = states_of_group(self.param_groups[-1])
        except (UsageError, TypeError, ValueError) as error:
            problem = error if isinstance(error, UsageError) else UsageError(f"{error}")
        try:
            verify_states(states, self.grid.fused(*DATA_AXES, "mp"), "group", problem)
        except Exception:
            del self.param_groups[before:]
            raise

    def _check_between_steps(self) -> None:
        if self._gradients.are_settled(self._parameters()):
            raise UsageError(
                "add_param_group was called after gradients were unscaled or clipped, and before "
                "the step that takes them; call it after step()"
            )

    def _follow(self, engine: Any) -> None:
        """Give the optimizer that steps, if it has a list of its own, the groups it has not."""
        for group in self.param_groups[len(engine.param_groups) :]:
            ask_group(group, self.options)
            engine.add_param_group(group)

    def _parameters(self) -> list[Any]:
        return [each for group in self.param_groups for each in group["params"]]

    def get_lr(self) -> float:
        """Return the learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, value: float) -> None:
        """Set the learning rate of all groups.

        Args:
            value: a positive number.

        """
        for group in self.param_groups:
            group["lr"] = value

    # ---- steps

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of the gradients; may be changed."""
        return self._clip_norm

    @clip_norm.setter
    def clip_norm(self, clip: Any) -> None:
        self._clip_norm = norm_limit(clip)

    @property
    def is_merging(self) -> bool:
        """Whether the next call of `step` only counts: gradient merge needs more passes."""
        return self._gradients.are_merging(self._parameters())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the parameters; see above. Collective.

        Args:
            closure: computes the loss and its gradients, and returns it; called once.

        Returns:
            What `closure` returned.

        """
        loss = loss_of(closure)
        self.inner._opt_called = True  # a scheduler that was made of it asks for that
        if self.is_merging:
            self._gradients.passes += 1
            return loss
        self._drop_cleared()
        self._compare_options()
        self.settle_gradients()
        if self.clip_norm is not None:
            norm, scale = self.measure_gradients(2.0)
            factor = clip_factor(norm, self.clip_norm)
            if factor != 1:
                scale(factor)
        engine = self._made()
        if not self._steps and is_dampened(self._stepping()):
            set_aside(self._stepping())  # what a checkpoint had before the first step
        engine.step()
        self._gradients.begin_again()
        self._steps += 1
        self._average_weights()
        return loss

    def _compare_options(self) -> None:
        """Refuse other options than those of other ranks, before the first step. Collective then.

        The largest norm is compared again where it changes.
        """
        if self._told == self.clip_norm:
            return
        limit = [(f"clip_norm={self.clip_norm}", (), "")]
        verify_states(limit, self.grid.mesh.group, "option")
        if self._told is self:
            states = [state for group in self.param_groups for state in states_of_group(group)]
            verify_states([*limit, *states], self.grid.fused(*DATA_AXES, "mp"), "option")
        self._told = self.clip_norm

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Call `step`, after ``loss.backward()``; arguments are accepted for Paddle's sake.

        Args:
            loss: accepted: its backward pass has been done.
            startup_program: accepted.
            parameter_list: accepted.
            no_grad_set: accepted.

        Returns:
            An empty list, and the parameters with their gradients.

        """
        pairs = [(each, each.grad) for each in self._parameters() if each.grad is not None]
        self.step()
        return [], pairs

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, unless gradient merge is gathering them.

        Args:
            set_to_none: give their memory back, instead of writing zeros.

        """
        if self._gradients.passes and not self._gradients.are_settled(self._parameters()):
            return
        self.skip_step()
        super().zero_grad(set_to_none)
        gradients = [] if set_to_none else [(each, each.grad) for each in self._parameters()]
        self._cleared = [
            (each, TensorWeakRef(grad)) for each, grad in gradients if grad is not None
        ]

    def _drop_cleared(self) -> None:
        """Drop gradients of what is frozen that are zeros since the last step: it is no part of it.

        torch's optimizers go on with their momentum, where there is a gradient.
        """
        for parameter, cleared in self._cleared:
            grad = parameter.grad
            is_same = grad is not None and grad is cleared()
            if is_same and not parameter.requires_grad and not local_of(grad).any():
                parameter.grad = None
        self._cleared = []

    def skip_step(self) -> None:
        """Drop the gradients of this step and begin the next one; for scalers."""
        self._gradients.begin_again()

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Call `zero_grad` (Paddle's name).

        Args:
            set_to_zero: write zeros, instead of giving their memory back.

        """
        self.zero_grad(set_to_none=not set_to_zero)

    def _made(self) -> Any:
        """Return the optimizer that steps; see [Note: either order]. Collective the first time."""
        if self._engine is None:
            self._roles()
            optimizer = as_asked(self.inner, self.param_groups, self.options)
            if self.grid.degree("sharding") > 1 and not cuts_parameters(self.grid, self.options):
                optimizer = shard_states(
                    type(optimizer),
                    self.param_groups,
                    arguments_of(optimizer),
                    self.grid["sharding"],
                )
            elif any(latest(each) is not each for each in optimizer.state):
                optimizer.state = initial_state(optimizer)  # such as Adagrad's
            self._engine = optimizer
            self.state = self._stepping().state
        self._follow(self._engine)
        return self._engine

    def _stepping(self) -> Any:
        """Return the optimizer that steps what is this rank's."""
        engine = self._made()
        return engine.optim if isinstance(engine, ZeroRedundancyOptimizer) else engine

    def _roles(self) -> list[Role]:
        """Return the roles of the parameters.

        Raises:
            UsageError: some are of no model of this grid.

        """
        roles = [role_of(each) for each in self._parameters()]
        strange = sum(role is None or role.grid is not self.grid for role in roles)
        if strange:
            raise UsageError(
                f"{strange} of the optimizer's {len(roles)} parameters are of no model that "
                "distributed_model has seen, so nobody averages their gradients; give it the "
                "model, too, and use what it returns"
            )
        return [role for role in roles if role is not None]

    # ---- gradients

    def settle_gradients(self) -> None:
        """Complete the gradients to those of the whole batch, once for each step. Collective.

        `step` does so by itself; call it before looking at gradients.

        Raises:
            UsageError: gradient merge is gathering them.

        """
        parameters = self._parameters()
        if not self._gradients.are_settled(parameters):
            self._gradients.settle(parameters, self._roles())

    norm_is_collective = True

    def measure_gradients(self, norm_type: float) -> Measured:
        """Return the norm of all gradients, and a function that scales them. Collective.

        Args:
            norm_type: the power: 2 for the Euclidean norm, ``inf`` for the largest absolute value.

        """
        self.settle_gradients()
        return measure_on_grid(self._parameters(), self.grid, norm_type)

    def unscale_(self, scale: float) -> bool:
        """Divide all gradients by `scale`; return whether they are finite on all ranks. Collective.

        For `hpcdist.GradScaler`.

        Args:
            scale: the factor of the loss.

        """
        self.settle_gradients()
        return self._gradients.unscale(self._parameters(), scale)

    # ---- weights

    def _average_weights(self) -> None:
        """Average weights over dp, where localsgd is due. Collective then."""
        local = self.options.localsgd
        if local is None or self.grid.degree("dp") == 1:
            return
        if self._steps > local.begin_step and self._steps % local.k_steps:
            return
        masters = [
            states["master"] for states in self._stepping().state.values() if "master" in states
        ]
        weights = [local_of(each.detach()) for each in self._parameters()]
        reduce_all([*weights, *masters], self.grid["dp"], ReduceOp.AVG)

    # ---- states

    def sharded_state_dict(self) -> State:
        """Return this rank's part of the state by parameter names. The first call is collective.

        Whole tensors, `LocalSlice`s of what is cut over mp or sharding, and numbers. All are views:
        a checkpoint can be loaded into them in place.
        """
        parts, numbers = self._entries()
        return {
            **as_state(parts),
            **{each.name: each.read() for each in numbers},
            "learning_rates": [float(group["lr"]) for group in self.param_groups],
            "steps": self._steps,
        }

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `sharded_state_dict` returned, or whole tensors, on any grid.

        Args:
            state: by name; what this rank does not need may be missing.

        Raises:
            UsageError: something that this rank needs is missing or has another shape.

        """
        parts, numbers = self._entries()
        rates = state.get("learning_rates", ())
        missing = [each.name for each in numbers if each.name not in state]
        if missing or len(rates) != len(self.param_groups) or "steps" not in state:
            raise UsageError(
                f"the state has no {missing[0]!r}; load one of the same model and optimizer, one "
                "that another grid has saved with hpcdist.checkpoint"
                if missing
                else "the state has other groups; load one of the same model and optimizer"
            )
        fill(parts, state)
        for each in numbers:
            each.write(state[each.name])
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        self._steps = int(state["steps"])

    def state_dict(self) -> State:
        """Alias of `sharded_state_dict`."""
        return self.sharded_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Alias of `load_sharded_state_dict`."""
        self.load_sharded_state_dict(state)

    set_state_dict = load_state_dict

    def _entries(self) -> tuple[list[Part], list[Number]]:
        self._made()
        stepping = self._stepping()
        materialize_states(stepping)
        self.state = stepping.state
        names = {
            id(each): role.name
            for each, role in zip(self._parameters(), self._roles(), strict=True)
        }
        found = list(states_in(stepping, names))
        return (
            [each for each in found if isinstance(each, Part)],
            [each for each in found if isinstance(each, Number)],
        )

    def __repr__(self) -> str:
        return f"HybridParallelOptimizer({self.inner!r}, {self.grid!r})"
