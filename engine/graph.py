"""The graph of a computation, and the reverse pass that makes gradients of it.

A node stands for one array that an op computed. It holds its parents, the nodes of the arrays that the op read,
and the op's `backward`. It does not hold the array: an op keeps only the numbers that its backward needs.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

# Takes the gradient of an op's result; returns a gradient for each parent.
Backward = Callable[[np.ndarray], Sequence[np.ndarray | None]]

_ages = itertools.count()
_recording: ContextVar[bool] = ContextVar("operations are recorded", default=True)


class Node:
    """An array's place in the graph. A leaf has no `backward`: its array was given, not computed."""

    def __init__(
        self, data: np.ndarray, parents: tuple["Node | None", ...] = (), backward: Backward | None = None
    ) -> None:
        self.shape = data.shape
        self.dtype = data.dtype
        self.grad: np.ndarray | None = None  # of leaves alone
        self.parents = parents  # None stands for a parent that requires no gradient
        self.backward = backward
        self.age = next_age()  # a node is younger than its parents, so its number is larger than theirs


def next_age() -> int:
    """A number larger than the age of every node so far, and smaller than that of every node to come."""
    return next(_ages)


def backpropagate(root: Node, gradient: np.ndarray, since: int = 0) -> dict[Node, np.ndarray]:
    """The gradient of every source of `root`, given the gradient of `root`. It consumes the graph.

    The pass visits the youngest node first. Every node that was computed from a node is younger, so the
    gradient of a node is complete when its turn comes. A heap holds the turns, since recursion would limit
    the depth of a graph.
    """
    gradients = {root: gradient}
    turns = [(-root.age, root)]
    gradients_of_sources = {}
    while turns:
        _, node = heapq.heappop(turns)
        dy = gradients.pop(node)
        if node.backward is None or node.age < since:
            gradients_of_sources[node] = dy
            continue
        parents = node.parents
        backward = node.backward
        node.parents = ()
        node.backward = _consumed  # frees the arrays that backward holds as soon as it has run
        for parent, dx in zip(parents, backward(dy), strict=True):
            if parent is None or dx is None:
                continue
            dx = unbroadcast(np.asarray(dx, parent.dtype), parent.shape)
            if parent in gradients:
                gradients[parent] = gradients[parent] + dx  # not in place: parents may share an array
            else:
                gradients[parent] = dx
                heapq.heappush(turns, (-parent.age, parent))
    return gradients_of_sources


def sources(roots: Iterable[Node | None], since: int = 0) -> tuple[Node, ...]:
    """The nodes where `backpropagate` ends, the oldest first: leaves, and nodes made before the age `since`."""
    waiting = list(roots)
    seen: set[Node] = set()
    ends = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.backward is None or node.age < since:
            ends.append(node)
        else:
            waiting += node.parents
    return tuple(sorted(ends, key=lambda node: node.age))


def unbroadcast(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of an array of this shape that NumPy stretched: the sum over the axes that were stretched."""
    if gradient.shape == shape:
        return gradient
    gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
    stretched = tuple(axis for axis, size in enumerate(shape) if size == 1 and gradient.shape[axis] != 1)
    return gradient.sum(stretched, keepdims=True).reshape(shape)


def _consumed(dy: np.ndarray) -> Sequence[np.ndarray | None]:
    raise RuntimeError("backward has run through this tensor before, and what it needed is freed")


@contextmanager
def recording(on: bool):
    """Whether ops inside the block add nodes to the graph. After the block the former state returns."""
    token = _recording.set(on)
    try:
        yield
    finally:
        _recording.reset(token)


def no_grad():
    """A block whose ops add nothing to the graph: for evaluation."""
    return recording(False)


def is_recording() -> bool:
    """Whether ops add nodes to the graph here."""
    return _recording.get()
