"""Tensor: an array that remembers what it was computed from, and the reverse pass that makes gradients of it."""

import heapq
import itertools
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

_recording: ContextVar[bool] = ContextVar("operations are recorded", default=True)
_ages = itertools.count()


class Node:
    """What a tensor remembers: where it came from. Not its numbers: an op keeps of them what its derivative needs."""

    def __init__(self, data: np.ndarray, parents: tuple["Node | None", ...] = (), derive: Callable | None = None):
        self.shape, self.dtype, self.grad = data.shape, data.dtype, None
        self.parents = parents  # None for one that requires no gradient
        self.derive = derive  # the gradient of this node -> a gradient for each of its parents; a leaf has none
        self.age = next(_ages)  # above those of its parents


class Tensor:
    """`data`, which is not copied, and `grad` are fp32 or fp64. A 16-bit number is an fp32 one that was rounded."""

    __array_ufunc__ = None  # array * tensor is then asked of the tensor

    def __init__(self, data, requires_grad: bool = False):
        data = np.asarray(data)
        if data.dtype not in (np.float32, np.float64):
            if data.dtype.kind not in "fiub":
                raise TypeError(f"a Tensor holds numbers, not {data.dtype}")
            data = data.astype(np.float32)
        self.data, self.node = data, Node(data) if requires_grad else None

    @property
    def requires_grad(self) -> bool:
        return self.node is not None

    @property
    def grad(self) -> np.ndarray | None:
        return self.node and self.node.grad

    @grad.setter
    def grad(self, gradient: np.ndarray | None) -> None:
        self.node.grad = gradient

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def item(self) -> float:
        return self.data.item()

    def detach(self) -> "Tensor":
        """The same numbers without a memory."""
        return Tensor(self.data)

    def backward(self, gradient: np.ndarray | None = None) -> None:
        """Adds the gradient of this tensor by every leaf that it was computed from into the leaf's `grad`. Once."""
        if not self.requires_grad:
            raise RuntimeError("this tensor requires no gradient: it is detached, or nothing it came from requires one")
        if gradient is None:
            if self.data.size != 1:
                raise RuntimeError(f"a tensor of shape {self.shape} is no loss: pass its gradient to backward()")
            gradient = np.ones_like(self.data)
        if np.shape(gradient) != self.shape:
            raise ValueError(f"backward: a gradient of shape {np.shape(gradient)} for a tensor of shape {self.shape}")
        for leaf, dleaf in backpropagate(self.node, np.asarray(gradient, self.data.dtype)).items():
            if leaf.grad is None:
                leaf.grad = dleaf.copy()  # it may be a view of another one, and whoever clips does so in place
            else:
                leaf.grad += dleaf

    def __repr__(self) -> str:
        return f"Tensor({self.data}{', requires_grad=True' if self.requires_grad else ''})"


def record(data: np.ndarray, parents: tuple[Tensor, ...], derive: Callable) -> Tensor:
    """What an op returns: its result, which remembers its parents and how to derive by them.

    `derive` holds on to arrays, never to the result itself: with no cycles, memory goes when the last name of it goes.
    """
    return remember(data, tuple(parent.node for parent in parents), derive)


def remember(data: np.ndarray, parents: tuple[Node | None, ...], derive: Callable) -> Tensor:
    """`record` for those who know the parents' nodes alone."""
    result = Tensor(data)
    if _recording.get() and any(parents):
        result.node = Node(result.data, parents, derive)
    return result


def backpropagate(root: Node, gradient: np.ndarray, since: int = 0) -> dict[Node, np.ndarray]:
    """The gradients of leaves and of nodes made before `since`, at which it stops. It consumes the graph.

    The youngest node goes first. All that came from a node is younger than it, so when its turn comes its gradient is
    complete. A heap instead of recursion: a graph may be as deep as memory allows.
    """
    gradients, turns, found = {root: gradient}, [(-root.age, root)], {}
    while turns:
        _, node = heapq.heappop(turns)
        dy, parents, derive = gradients.pop(node), node.parents, node.derive
        if is_source(node, since):
            found[node] = dy
            continue
        node.parents, node.derive = (), _consumed  # what is no longer needed goes at once
        for parent, dx in zip(parents, derive(dy), strict=True):
            if parent is None or dx is None:
                continue
            dx = undo_broadcast(np.asarray(dx, parent.dtype), parent.shape)
            if parent in gradients:
                gradients[parent] = gradients[parent] + dx  # not in place: dx may be another's gradient, too
            else:
                gradients[parent] = dx
                heapq.heappush(turns, (-parent.age, parent))
    return found


def is_source(node: Node, since: int) -> bool:
    return node.derive is None or node.age < since


def sources(roots: Iterable[Tensor], since: int = 0) -> tuple[Node, ...]:
    """The nodes whose gradients `backpropagate` would find, the oldest first."""
    waiting, seen = [root.node for root in roots], set()
    while waiting:
        node = waiting.pop()
        if node and node not in seen:
            seen.add(node)
            waiting += () if is_source(node, since) else node.parents
    return tuple(sorted((node for node in seen if is_source(node, since)), key=lambda node: node.age))


def now() -> int:
    """An age between those of the nodes that there are and those to come."""
    return next(_ages)


def undo_broadcast(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A number that was used in many places gets the sum of their gradients."""
    if gradient.shape == shape:
        return gradient
    gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
    stretched = tuple(axis for axis, size in enumerate(shape) if size == 1 and gradient.shape[axis] != 1)
    return gradient.sum(stretched, keepdims=True).reshape(shape)


def _consumed(dy):
    raise RuntimeError("backward has run through this tensor before, and what it needed is freed")


@contextmanager
def recording(on: bool):
    """Whether operations are remembered inside the block; after it, also after an exception, what was before."""
    token = _recording.set(on)
    try:
        yield
    finally:
        _recording.reset(token)


def no_grad():
    """Nothing inside the block is remembered: for evaluation."""
    return recording(False)


def is_recording() -> bool:
    return _recording.get()
