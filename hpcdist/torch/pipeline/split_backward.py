"""A backward pass in two parts: gradients of the inputs first, those of the weights later.

The graph of autograd from the outputs to the inputs is a path from which branches lead to weights.
The first part follows the path, and keeps the gradients that arrive where branches begin; the
second part follows the branches. A branch that several places of the path share is followed from
all of them at once, and what flows along the path between them is replaced by what was kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hpcdist.named_tuple import NamedTuple

Gradients = tuple[Any, ...]


class WeightsLeft(NamedTuple):
    """What the second part needs; `outputs` keep the graph alive."""

    outputs: tuple[torch.Tensor, ...]
    branches: list[_Branch]
    kept: dict[Node, Gradients]


class _Branch(NamedTuple):
    """Weights, and where on the path, or at which outputs, the gradients come from."""

    forks: list[Node]
    roots: list[tuple[GradientEdge, torch.Tensor]]
    weights: list[torch.Tensor] | None
    """None: all that there are."""


def backward_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor | None], WeightsLeft]:
    """Return the gradients of `inputs`, and what is left to do for the weights.

    Args:
        outputs: they need gradients.
        gradients: those of the outputs.
        inputs: leaves that need gradients; none if there is nothing before this stage.

    """
    ends = [get_gradient_edge(each) for each in outputs]
    if not inputs:
        everything = _Branch([], list(zip(ends, gradients, strict=True)), None)
        return [], WeightsLeft(tuple(outputs), [everything], {})
    graph = _Graph([get_gradient_edge(each).node for each in inputs])
    for end in ends:
        graph.explore(end.node)
    apart = [
        (end, gradient)
        for end, gradient in zip(ends, gradients, strict=True)
        if end.node not in graph.path
    ]
    branches = _join(graph, apart)
    kept: dict[Node, Gradients] = {}
    handles = [
        fork.register_prehook(_keeper(kept, fork)) for branch in branches for fork in branch.forks
    ]
    through = [
        (output, gradient)
        for output, end, gradient in zip(outputs, ends, gradients, strict=True)
        if end.node in graph.path
    ]
    found: Sequence[torch.Tensor | None] = [None] * len(inputs)
    try:
        if through:
            found = torch.autograd.grad(
                [output for output, _ in through],
                inputs,
                [gradient for _, gradient in through],
                retain_graph=True,
                allow_unused=True,
            )
    finally:
        for handle in handles:
            handle.remove()
    return list(found), WeightsLeft(tuple(outputs), branches, kept)


def backward_weights(left: WeightsLeft) -> None:
    """Add the gradients of the weights to what they have."""
    for forks, roots, weights in left.branches:
        edges = [edge for edge, _ in roots]
        gradients = [gradient for _, gradient in roots]
        reached = [fork for fork in forks if fork in left.kept]
        for fork in reached:
            for number, gradient in enumerate(left.kept[fork]):
                if gradient is not None:
                    edges.append(GradientEdge(fork, number))
                    gradients.append(gradient)
        if not edges:
            continue
        several = reached if len(reached) > 1 else []
        handles = [fork.register_prehook(_replacer(left.kept[fork])) for fork in several]
        try:
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=weights)
        finally:
            for handle in handles:
                handle.remove()


def _keeper(kept: dict[Node, Gradients], fork: Node) -> Any:
    def keep(gradients: Gradients) -> None:
        kept[fork] = gradients

    return keep


def _replacer(gradients: Gradients) -> Any:
    return lambda _: gradients


class _Graph:
    """Which nodes lead to the inputs, and which weights the others lead to."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.path: dict[Any, None] = dict.fromkeys(inputs)  # in the same order on all ranks
        self.inputs = inputs
        self.weights: dict[Any, dict[int, torch.Tensor]] = {each: {} for each in inputs}
        """For each node that was seen the weights below it, without going along the path."""

    def explore(self, root: Node) -> None:
        """Visit all nodes from here on, those below a node before the node itself."""
        stack: list[tuple[Any, bool]] = [(root, False)]
        while stack:
            node, is_known_below = stack.pop()
            if node in self.weights:
                continue
            below = [each for each, _ in node.next_functions if each is not None]
            if not is_known_below:
                stack.append((node, True))
                stack += [(each, False) for each in below if each not in self.weights]
                continue
            if any(each in self.path for each in below):
                self.path[node] = None
            found: dict[int, torch.Tensor] = {}
            if hasattr(node, "variable"):
                found[id(node.variable)] = node.variable
            for each in below:
                if each not in self.path:
                    found |= self.weights[each]
            self.weights[node] = found

    def forks(self) -> Iterable[tuple[Any, dict[int, torch.Tensor]]]:
        """Give the nodes of the path from which branches lead to weights, and these."""
        for node in self.path:
            if self.weights[node]:
                yield node, self.weights[node]


def _join(graph: _Graph, apart: Sequence[tuple[GradientEdge, torch.Tensor]]) -> list[_Branch]:
    """Return branches that have no weight in common."""
    sources: list[tuple[dict[int, torch.Tensor], Any]] = [
        (weights, fork) for fork, weights in graph.forks()
    ]
    sources += [(graph.weights[edge.node], (edge, gradient)) for edge, gradient in apart]
    leader: dict[int, int] = {}

    def find(weight: int) -> int:
        while leader.setdefault(weight, weight) != weight:
            weight = leader[weight]
        return weight

    for weights, _ in sources:
        first, *others = weights or [0]
        for each in others:
            leader[find(each)] = find(first)
    branches: dict[int, _Branch] = defaultdict(lambda: _Branch([], [], []))
    known: set[int] = set()
    for weights, source in sources:
        if not weights:
            continue
        branch = branches[find(next(iter(weights)))]
        (branch.roots if isinstance(source, tuple) else branch.forks).append(source)
        assert branch.weights is not None
        branch.weights.extend(weight for key, weight in weights.items() if key not in known)
        known |= weights.keys()
    return [*branches.values()]
