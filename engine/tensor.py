"""Tensor: a NumPy array with a place in the graph. Its operators and methods are the elementary ops.

An op computes with the `.data` of its tensors and returns `record(result, parents, backward)`. `backward`
turns the result's gradient `dy` into a gradient for each parent; `dx` is the gradient of the loss by `x`.
`backward` runs once, so it may overwrite arrays that forward left for it. The reverse pass of graph.py does
the rest: it sums where NumPy stretched a parent, and it adds the gradients of a tensor that was used several
times. A GPT's layers are in ops.py.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from amp import policy
from amp.formats import round_to
from engine.graph import Backward, Node, backpropagate, is_recording

Op = TypeVar("Op", bound=Callable[..., "Tensor"])
Axes = int | tuple[int, ...] | None  # None: all


def record(data: np.ndarray, parents: Sequence["Tensor"], backward: Backward) -> "Tensor":
    """The result of an op: a Tensor of `data`, whose node remembers the parents and `backward`.

    `backward` may hold arrays, but not the result. Without that cycle, memory is freed as soon as nothing
    names the result.
    """
    return record_nodes(data, [parent.node for parent in parents], backward)


def record_nodes(data: np.ndarray, parents: Sequence[Node | None], backward: Backward) -> "Tensor":
    """Does what `record` does, where the nodes of the parents are known and their tensors are not."""
    result = Tensor(data)
    if is_recording() and any(parents):
        result.node = Node(result.data, tuple(parents), backward)
    return result


def cast(x: "Tensor", dtype: str) -> "Tensor":
    """x rounded to "bf16" or "fp16"; backward rounds its gradient, too. fp64 is not rounded, as in PyTorch."""
    if x.data.dtype == np.float64:
        return x
    return record(x.data_in(dtype), (x,), lambda dy: (round_to(dy, dtype),))


def op(row: str | None = None) -> Callable[[Op], Op]:
    """Makes an op of a function of tensors. `row` names its rule in the TABLE of amp/policy.py; None means fp32.

    The op casts operands and result as the rule says for the active compute dtype. Its first argument may be
    an array. Where shapes do not fit, its ValueError names the op and the shapes.
    """
    rule = policy.TABLE[row] if row else policy.EXACT

    def decorate(function) -> Any:
        @wraps(function)
        def apply(x, *others, **options):
            args = [as_tensor(x), *others]
            dtype = policy.compute_dtype()
            if dtype != "fp32" and rule.operands == policy.LOW:
                args = [cast(arg, dtype) if isinstance(arg, Tensor) else arg for arg in args]
            try:
                result = function(*args, **options)
            except ValueError as error:  # NumPy's
                shapes = " and ".join(str(arg.shape) for arg in args if isinstance(arg, Tensor))
                name = function.__name__.strip("_")
                raise ValueError(f"{name}: shapes {shapes} do not fit: {error}") from None
            return cast(result, dtype) if dtype != "fp32" and rule.result == policy.LOW else result

        return apply

    return decorate


def as_tensor(value: "Tensor | ArrayLike", like: "Tensor | None" = None) -> "Tensor":
    """Makes a Tensor of numbers, in the dtype of `like` so that 2 * x is no wider than x. A Tensor stays."""
    if isinstance(value, Tensor):
        return value
    return Tensor(value if like is None else np.asarray(value, like.data.dtype))


class Tensor:
    """An array `data` and its place in the graph, `node`, which is None where no gradient is required.

    The array is fp32 or fp64; it is not copied. Numbers of another dtype become fp32, and anything else is a
    TypeError. A 16-bit number is held as an fp32 number that was rounded.
    """

    __array_ufunc__ = None  # makes NumPy leave array * tensor to the tensor

    def __init__(self, data: ArrayLike, requires_grad: bool = False):
        data = np.asarray(data)
        if data.dtype not in (np.float32, np.float64):
            if data.dtype.kind not in "fiub":
                raise TypeError(f"a Tensor holds numbers, not {data.dtype}")
            data = data.astype(np.float32)
        self.data: np.ndarray = data
        self.node: Node | None = Node(data) if requires_grad else None

    @property
    def requires_grad(self) -> bool:
        return self.node is not None

    @property
    def grad(self) -> np.ndarray | None:
        """A leaf's gradient: an array of its shape and dtype, or None before the first backward."""
        return None if self.node is None else self.node.grad

    @grad.setter
    def grad(self, gradient: np.ndarray | None) -> None:
        if self.node is None:
            raise RuntimeError("this tensor requires no gradient, so it has none to set")
        self.node.grad = gradient

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def item(self) -> float:
        return self.data.item()

    def data_in(self, dtype: str) -> np.ndarray:
        """The numbers rounded to "bf16" or "fp16", as an fp32 array."""
        return round_to(self.data, dtype)

    def detach(self) -> "Tensor":
        """A Tensor of the same array, outside the graph."""
        return Tensor(self.data)

    def backward(self, gradient: np.ndarray | None = None) -> None:
        """Adds this tensor's gradient by each leaf that it was computed from to the `grad` of the leaf.

        `gradient` is the gradient of this tensor, an array of its shape; a loss, which is one number, has the
        gradient 1. It is a RuntimeError if the tensor requires no gradient, if it is no loss and `gradient` is
        missing, or if backward has run through its graph before.
        """
        if self.node is None:
            reason = "it is detached, or nothing it came from requires one"
            raise RuntimeError(f"this tensor requires no gradient: {reason}")
        if gradient is None:
            if self.data.size != 1:
                raise RuntimeError(f"a tensor of shape {self.shape} is no loss: pass its gradient to backward()")
            gradient = np.ones_like(self.data)
        if np.shape(gradient) != self.shape:
            given = np.shape(gradient)
            raise ValueError(f"backward: a gradient of shape {given} for a tensor of shape {self.shape}")
        for leaf, dleaf in backpropagate(self.node, np.asarray(gradient, self.data.dtype)).items():
            if leaf.grad is None:
                leaf.grad = dleaf.copy()  # leaves may share dleaf; clipping works in place
            else:
                leaf.grad += dleaf

    def __repr__(self) -> str:
        return f"Tensor({self.data}{', requires_grad=True' if self.requires_grad else ''})"

    # ---- arithmetic

    @op("residual")
    def __add__(self, other):
        other = as_tensor(other, like=self)
        return record(self.data + other.data, (self, other), lambda dy: (dy, dy))

    @op()
    def __mul__(self, other):
        other = as_tensor(other, like=self)
        return record(self.data * other.data, (self, other), lambda dy: (dy * other.data, dy * self.data))

    @op()
    def __truediv__(self, other):
        other = as_tensor(other, like=self)

        def backward(dy):
            return dy / other.data, -dy * self.data / other.data**2

        return record(self.data / other.data, (self, other), backward)

    @op()
    def __pow__(self, exponent: float):
        def backward(dy):
            return (dy * exponent * self.data ** (exponent - 1) if exponent else np.zeros_like(dy),)

        return record(self.data**exponent, (self,), backward)

    def __neg__(self):
        return self * -1

    def __sub__(self, other):
        return self + (-other)

    def __radd__(self, number):
        return self + number

    def __rsub__(self, number):
        return -self + number

    def __rmul__(self, number):
        return self * number

    def __rtruediv__(self, number):
        return as_tensor(number, like=self) / self

    @op()
    def exp(self):
        y = np.exp(self.data)
        return record(y, (self,), lambda dy: (dy * y,))

    @op()
    def log(self):
        return record(np.log(self.data), (self,), lambda dy: (dy / self.data,))

    @op()
    def tanh(self):
        y = np.tanh(self.data)
        return record(y, (self,), lambda dy: (dy * (1 - y * y),))

    # ---- products

    @op("matmul")
    def matmul(self, other: "Tensor"):
        """The last two axes are matrices, the axes before them a batch."""
        if self.data.ndim < 2 or other.data.ndim < 2:
            raise ValueError("matmul takes matrices, or batches of them")

        def backward(dy):
            return dy @ other.data.swapaxes(-1, -2), self.data.swapaxes(-1, -2) @ dy

        return record(self.data @ other.data, (self, other), backward)

    def __matmul__(self, other):
        return self.matmul(as_tensor(other, like=self))

    def __rmatmul__(self, array):
        return as_tensor(array, like=self).matmul(self)

    # ---- shapes: their backward holds a shape alone, so that the numbers of `self` can be freed

    @op()
    def reshape(self, *shape: int):
        before = self.shape
        return record(self.data.reshape(shape), (self,), lambda dy: (dy.reshape(before),))

    @op()
    def transpose(self, *axes: int):
        """The axes in the order given; without any, from the last to the first."""
        back = np.argsort([axis % len(axes) for axis in axes]) if axes else None
        return record(self.data.transpose(axes or None), (self,), lambda dy: (dy.transpose(back),))

    @op()
    def __getitem__(self, index):
        """self[index] by whole numbers and slices. Rows by an array of numbers: `embedding`."""
        for part in index if isinstance(index, tuple) else (index,):
            is_number = isinstance(part, int | np.integer) and not isinstance(part, bool)
            if not is_number and not isinstance(part, slice | type(None) | type(Ellipsis)):
                kind = type(part).__name__
                raise TypeError(f"getitem: an index is a whole number or a slice, not {kind}: use embedding")
        shape = self.shape

        def backward(dy):
            dx = np.zeros(shape, dy.dtype)
            dx[index] = dy
            return (dx,)

        return record(self.data[index], (self,), backward)

    def split(self, parts: int, axis: int = -1) -> list["Tensor"]:
        """`parts` tensors of equal size along an axis."""
        size, rest = divmod(self.shape[axis], parts)
        if rest:
            raise ValueError(f"split: shape {self.shape} does not fit: axis {axis} in {parts} equal parts")
        before = (slice(None),) * (axis % len(self.shape))
        return [self[(*before, slice(start, start + size))] for start in range(0, size * parts, size)]

    # ---- reductions, over one axis, several, or all

    @op("reduction")
    def sum(self, axis: Axes = None, keepdims: bool = False):
        shape = self.shape

        def backward(dy):
            return (np.broadcast_to(restore_axes(dy, shape, axis, keepdims), shape),)

        return record(self.data.sum(axis, keepdims=keepdims), (self,), backward)

    @op("reduction")
    def mean(self, axis: Axes = None, keepdims: bool = False):
        shape = self.shape
        y = self.data.mean(axis, keepdims=keepdims)
        share = y.size / self.data.size

        def backward(dy):
            return (np.broadcast_to(restore_axes(dy * share, shape, axis, keepdims), shape),)

        return record(y, (self,), backward)

    @op("reduction")
    def max(self, axis: Axes = None, keepdims: bool = False):
        """Where several numbers are the largest, they share the gradient."""
        shape = self.shape
        y = self.data.max(axis, keepdims=True)

        def backward(dy):
            is_largest = self.data == y
            dy = restore_axes(dy, shape, axis, keepdims)
            return (dy * is_largest / is_largest.sum(axis, keepdims=True),)

        return record(self.data.max(axis, keepdims=keepdims), (self,), backward)


def restore_axes(dy: np.ndarray, shape: tuple[int, ...], axis: Axes, keepdims: bool) -> np.ndarray:
    """dy with the axes that a reduction of `shape` removed, each of length 1."""
    if keepdims:
        return dy
    return np.expand_dims(dy, tuple(range(len(shape))) if axis is None else axis)
