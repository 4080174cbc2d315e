"""`Runner`: does what a plan has for this rank, and exchanges messages with the other stages.

[Note: a stage fails] Whoever fails hands on nothing ("void") from then on, but does exchange all
messages of the plan, and so does whoever receives a void. So nobody waits for a message that never
comes, none is left over for the next step, and all ranks are soon at the end of it, where they tell
each other what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, final

import torch

from hpcdist.comm.group import Group
from hpcdist.errors import UsageError, add_note
from hpcdist.torch.pipeline.schedule import Action, Kind, Plan, Span
from hpcdist.torch.pipeline.stage import Autocast, Stage
from hpcdist.torch.pipeline.wire import Bundle, Wire

Finish = Callable[[int, Any], Any]
"""Called with the number of a micro-batch and what the last layer returns for it."""

_IN_WORDS: dict[Kind, str] = {
    "F": "forward pass",
    "B": "backward pass",
    "I": "backward pass",
    "W": "backward pass (weights)",
}


@final
class Runner:
    """One step of a pipeline, on this rank.

    Attributes:
        failure: what has failed here; None where nothing has, or only on other ranks.
        spans: what was computed when, in seconds from the beginning of the step.

    """

    def __init__(
        self,
        plan: Plan,
        group: Group,
        stages: Sequence[Stage],
        device: torch.device,
        autocast: Autocast = nullcontext,
        describe_stage: Callable[[int], str] = "stage {}".format,
    ) -> None:
        self.plan, self.group, self.autocast = plan, group, autocast
        self.failure: BaseException | None = None
        self.spans: list[Span] = []
        self._stages = {stage.number: stage for stage in stages}
        self._device, self._describe_stage = device, describe_stage
        self._wire = Wire(group, device)
        self._here: dict[tuple[Kind, int, int], Bundle | None] = {}
        """What stages of this rank have handed on to each other."""
        self._is_void = False

    def run(self, inputs: Sequence[Any], finish: Finish) -> None:
        """Run all actions. What a stage raises becomes `failure`; errors of messages are raised.

        Args:
            inputs: those of each micro-batch, on the rank of the first stage.
            finish: computes what the last stage has to say, and where its backward pass begins.

        """
        began = perf_counter()
        for action in self.plan.table[self.group.rank]:
            if action.kind == "F":
                self._forward(action, inputs, finish, began)
            elif action.kind == "W":
                self._weights(action, began)
            else:
                self._backward(action, began)
        self._wire.flush()
        for stage in self._stages.values():
            stage.forget()

    def _forward(self, action: Action, inputs: Sequence[Any], finish: Finish, began: float) -> None:
        _, number, micro = action
        stage, is_last = self._stages[number], number == self.plan.stages - 1
        given = self._take(action) if number else None if self._is_void else inputs[micro]
        to_end = (lambda output: finish(micro, output)) if is_last else None
        made = self._attempt(
            action, began, lambda: stage.forward(micro, given, to_end, self.autocast)
        )
        if not is_last:
            self._hand_on(Action("F", number + 1, micro), made)

    def _backward(self, action: Action, began: float) -> None:
        kind, number, micro = action
        stage = self._stages[number]
        given = None if number == self.plan.stages - 1 else self._take(action)
        made = self._attempt(action, began, lambda: stage.backward(micro, given, whole=kind == "B"))
        if number:
            self._hand_on(Action(kind, number - 1, micro), made)

    def _weights(self, action: Action, began: float) -> None:
        stage = self._stages[action.stage]
        self._attempt(action, began, lambda: stage.backward_weights(action.micro))

    def _attempt(self, action: Action, began: float, do: Callable[[], Any]) -> Any:
        """Return what `do` returns; None if it fails, or something has failed before."""
        if self._is_void:
            return None
        begin = perf_counter()
        try:
            with self._precision(action):
                made = do()
        except BaseException as error:  # an interrupt or exit, too: the others wait for this rank
            self._fail(action, error)
            return None
        self.spans.append(Span(action, begin - began, perf_counter() - began))
        return made

    def _precision(self, action: Action) -> AbstractContextManager[Any]:
        """Return where an action computes: backward passes never choose a precision."""
        kind = self._device.type
        if action.kind == "F" or not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, enabled=False)  # type: ignore[no-any-return]

    def _fail(self, action: Action, error: BaseException) -> None:
        """Note that an action has failed; see [Note: a stage fails]."""
        what = f"{_IN_WORDS[action.kind]} of micro-batch {action.micro}"
        where = f"in the {what}, {self._describe_stage(action.stage)}, rank {self.group.world_rank}"
        self._is_void = True
        add_note(error, where)
        self.failure = error

    # ---- messages

    def _take(self, action: Action) -> Bundle | None:
        """Return what an action begins with."""
        _, number, micro = action
        before = number - 1 if action.kind == "F" else number + 1
        source = self.plan.rank_of(before)
        if source == self.group.rank:
            found = self._here.pop((action.kind, number, micro))
        else:
            found = self._wire.receive(source, self._tag(action))
        self._is_void = self._is_void or found is None
        return found

    def _hand_on(self, action: Action, made: Bundle | None) -> None:
        """Give `made` to the stage that needs it for `action`."""
        target = self.plan.rank_of(action.stage)
        if target == self.group.rank:
            self._here[action] = None if made is None else _detached(made)
            return
        tag = self._tag(action)
        try:
            self._wire.send(made, target, tag)
        except UsageError as error:  # before anything was sent
            self._fail(action, error)
            self._wire.send(None, target, tag)

    def _tag(self, action: Action) -> int:
        direction = 0 if action.kind == "F" else self.plan.stages
        return (direction + action.stage) * self.plan.microbatches + action.micro


def _detached(bundle: Bundle) -> Bundle:
    """Return tensors as another rank would get them, without copying them."""
    own = (each.detach().requires_grad_(each.requires_grad) for each in bundle.tensors)
    return Bundle(tuple(own), bundle.is_tuple)
