"""`QArray`: an array stored as codes and scales."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jchop._common.bit_ops import CARRIERS, fit_sharding, parts_of_axes, reshape
from jchop._common.checks import check, check_instance, check_int
from jchop._common.on_demand import load_name
from jchop._core.scaled_bodies import flatten_scales, unflatten_scales
from jchop._spec.spec import Spec, parse
from jchop._storage import _axis_groupings as groupings
from jchop._storage import _codes, _notebook
from jchop.formats import ElementFormat, ScaledFormat


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("qvalue", "scale", "zero_point", "places"),
    meta_fields=("spec", "length", "dtype"),
)
@dataclass(frozen=True, eq=False, repr=False)
class QArray:
    """An array stored as codes, with scales and zero points for groups of them: a pytree of plain arrays.

    `jchop.quantize` returns one and `jchop.dequantize` converts it to numbers. The leaves pass through jit, vmap, scan,
    donation, sharding, checkpoints and `jax.export` like other arrays. The spec of the codes is static. Leading axes
    that vmap or scan add to the leaves or remove are axes of the QArray.

    Args:
        qvalue: the codes. Codes of fewer than 8 bits are packed along the last axis into uint8. Code i of a row has the
            bits [k i, k i + k) of the row's little-endian bit stream (low nibble first for 4 bits). Each row is padded
            to whole bytes. Codes of 8 bits are int8 or uint8 for integers and fixed point, float8_e4m3fn and
            float8_e5m2 for these formats, else uint8. A plain format may have up to 16 bits (uint16), or be one of
            float16, bfloat16, float32, float64.
        scale: the scales, one for each group, in as many axes as the array. They are numbers of the scale format's
            dtype if it is a float of 16 bits or more, else its codes. A tuple if a scale has several parts. Under the
            rule "two_level" these are the scales of the groups and the scale of the tensor. Under quantized scales they
            are the packed codes of the scales, their scales, and their zero points if any. None for a plain format.
        zero_point: int32, or stored like the scales if zero points are numbers. Shape of the scales. None for a format
            without zero points.
        spec: the spec of the codes, with the format's axes counted from the end.
        length: the length of the last axis, which packed codes do not determine; None for an array without axes.
        dtype: the dtype of the array, and the default of `dequantize`.
        places: the numbers that have codes, for a format with `sparse`. It has a bit for each number, packed along the
            last axis as codes of one bit. `qvalue` then has only their codes, in their order along the sparse axis.
            There are n of every m, and up to n of a shorter last group. The other numbers are +0. None for other
            formats.

    Example:
        >>> import jax.numpy as jnp, jchop as jc
        >>> q = jc.quantize(jnp.array([[1.0, -0.5, 0.25], [3.0, 2.0, -7.0]]), "int4(channel=0,scale=bfloat16)")
        >>> q.shape, q.qvalue.shape, q.scale.shape, q.nbytes
        ((2, 3), (2, 2), (2, 1), 8)
        >>> q[1]
        QArray([ 3.,  2., -7.], dtype=float32, spec='int4(scale=bfloat16)')
    """

    qvalue: Any
    scale: _codes.Scale
    zero_point: Any
    spec: Spec
    length: int | None
    dtype: np.dtype
    places: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.spec, str | ElementFormat | ScaledFormat):
            raise TypeError(
                f"spec={str(self.spec)!r} must be a Spec, under which the codes were made; for another one: "
                "jchop.quantize(jchop.dequantize(q), spec)"
            )

    # -- properties ----------------------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return _codes.qarray_shape(self.qvalue, self.length, self.places)

    @property
    def ndim(self) -> int:
        """Number of axes of the array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def bits_per_element(self) -> float:
        """Bits of all leaves divided by the number of elements; NaN if there are none."""
        return 8 * self.nbytes / self.size if self.size else math.nan

    @property
    def codes(self) -> np.ndarray:
        """The code of each number, unpacked: unsigned integers, which ``spec.element.decode`` reads."""
        fmt, count = self.spec.element, 1 if self.length is None else self.length
        dense, kept = (self, None) if self.places is None else self._whole()[:2]
        codes = _codes.unpack_entries(_codes.load_codes(np.asarray(dense.qvalue), fmt), fmt, count).reshape(self.shape)
        return codes if kept is None else np.where(kept, codes, fmt.encode(0).astype(codes.dtype))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a QArray without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        facts = f"dtype={np.dtype(self.dtype).name}, spec={str(self.spec)!r}"
        leaves = jax.tree.leaves(self)
        gradient = any(getattr(leaf, "dtype", None) == jax.dtypes.float0 for leaf in leaves)
        if gradient or not all(isinstance(leaf, Array | np.ndarray) for leaf in leaves):
            names = ("qvalue", "scale", "zero_point", *(() if self.places is None else ("places",)))
            parts = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
            return f"QArray({parts}, {facts})"
        in_trace = any(isinstance(leaf, Tracer) for leaf in leaves)
        if in_trace or self.size > _MOST_REPR_ELEMENTS:
            return f"QArray(shape={self.shape}, {facts})"
        with jax.enable_x64(True):
            values = np.asarray(self.__jax_array__())
        return f"QArray({np.array2string(values, separator=', ', prefix='QArray(')}, {facts})"

    def _repr_html_(self) -> str:
        return _notebook.qarray_html(self, self._quantized_scale)

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        return _notebook.qarray_treescope(self, path)

    def __jax_array__(self) -> Any:
        """Returns the numbers, for functions of `jax.numpy`: ``x @ q``, ``jnp.einsum(..., q)``."""
        return _codes.decode_qarray(self.form(), self.qvalue, self.scale, self.zero_point, self.places)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the numbers, for functions of NumPy. Without this method NumPy would make an array of QArrays."""
        check(copy is not False, "a QArray holds codes, so its numbers are a new array: copy=False cannot be had")
        return np.asarray(self.__jax_array__(), dtype)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Passes the numbers to functions of NumPy, also where they would index a QArray, as `numpy.flip` does."""
        if func in _SHAPE_FUNCTIONS:
            return func._implementation(*args, **kwargs)

        def has_codes(value: object) -> bool:
            return isinstance(value, QArray)

        args, kwargs = jax.tree.map(
            lambda value: np.asarray(value) if has_codes(value) else value, (args, kwargs), is_leaf=has_codes
        )
        return func(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        # Arrays and NumPy's scalars compare the numbers by themselves. QArrays are compared by identity, since jit
        # compares its static arguments; so are None and texts, by which libraries mark leaves.
        if isinstance(other, np.generic) or not isinstance(other, Number | list | tuple):
            return NotImplemented
        raise TypeError(
            f"'==' is not supported between a QArray and {type(other).__name__}; compare its numbers, "
            "jchop.dequantize(q) == ..."
        )

    __hash__ = object.__hash__

    def astype(self, dtype: Any) -> Any:
        """Returns the numbers in a carrier, as `jchop.dequantize` gives them; or the same numbers under another spec.

        Args:
            dtype: a dtype; or a scaled format, a `Spec` or a text of one, which must hold every number.

        Returns:
            An array, or a QArray.

        Raises:
            ValueError: for a number that the spec does not hold. The message names the first.

        Example:
            >>> import jax.numpy as jnp, jchop as jc
            >>> q = jc.quantize(jnp.linspace(-3, 3, 64).reshape(2, 32), "mxfp4")
            >>> eight = q.astype("float8_e4m3fn(channel=0)")
            >>> bool((jc.dequantize(eight) == jc.dequantize(q)).all()), eight.scale.tolist()
            (True, [[0.5], [0.5]])
        """
        if isinstance(dtype, Spec | ScaledFormat) or (isinstance(dtype, str) and dtype not in CARRIERS):
            return load_name("jchop._storage._cast", "cast_qarray")(self, dtype)
        return _codes.decode_qarray(self.form(dtype), self.qvalue, self.scale, self.zero_point, self.places)

    def __matmul__(self, other: Any) -> Any:
        return self.__jax_array__() @ other

    def form(self, dtype: Any = None) -> _codes.QArrayForm:
        """Returns the static data of `decode_qarray`, for results in `dtype` (default: the dtype of the array)."""
        dtype = np.dtype(self.dtype if dtype is None else dtype)
        return _codes.QArrayForm(_codes.spec_of_part(self.spec, self.ndim), self.length, dtype.name)

    # -- parts and shapes ----------------------------------------------------------------------------------------------
    @property
    def T(self) -> QArray:
        """The array with its axes reversed."""
        return self.transpose()

    def transpose(self, *axes: int | Sequence[int] | None) -> QArray:
        """Permutes the axes of the array.

        Codes packed along the last axis are packed again if another axis becomes the last.

        Args:
            axes: the old index of each axis, as integers or one sequence. Default: reversed.

        Raises:
            ValueError: if `axes` is not a permutation, or would move axes that vmap added before a tensor scale.
        """
        argument = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        order = list(range(self.ndim))[::-1]
        if argument:
            order = [check_int("axes", axis, -self.ndim, self.ndim - 1) % self.ndim for axis in argument]  # type: ignore
        check(sorted(order) == list(range(self.ndim)), f"axes={argument} must name each of the {self.ndim} axes once")
        if order == list(range(self.ndim)):
            return self
        if self.places is not None:
            dense, mask, axis, _ = self._whole()
            return dense.transpose(order).thinned(mask.transpose(order), self.spec, order.index(axis))
        kinds, lead = self._kinds()
        if order[:lead] != list(range(lead)):
            raise ValueError(f"axes={argument}: each of the first {lead} axes has a tensor scale; they cannot be moved")
        if order[-1] == self.ndim - 1:
            qvalue = self.qvalue.transpose(order)
        else:
            qvalue = _codes.pack_entries(self._entries().transpose(order), self.spec.element)
        grouping = [kinds[axis] for axis in order][lead:]
        return self._moved(qvalue, self.shape[order[-1]], grouping, lambda part: part.transpose(order))

    def reshape(self, *shape: int | Sequence[int]) -> QArray:
        """Returns the array in another shape, in which every group must be whole along an axis.

        Neighbouring axes with the same kind of grouping are reshaped together. An axis in blocks may be split between
        blocks: (..., n) to (..., n / m, m). If it holds whole blocks, axes before it may be joined to it.

        Args:
            shape: lengths, as integers or one sequence; one of them may be -1.

        Raises:
            ValueError: for another number of elements, or if a group would be split, or span several axes.
        """
        argument: Any = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        new = _complete_shape(tuple(argument), self.shape)
        if new == self.shape:
            return self
        if self.places is not None:
            dense, mask, axis, unit = self._whole()
            units = [unit if i == axis else groupings.OWN_SCALE for i in range(self.ndim)]
            sparse_flags = [isinstance(v, int) for v in groupings.reshape_groupings(units, self.shape, new) or ()]
            if not any(sparse_flags):
                raise ValueError(f"shape={new} would split groups of {unit} along axis {axis} of which "
                                 f"{self.spec.format} keeps some; dequantize, reshape and quantize")  # fmt: skip
            return dense.reshape(new).thinned(reshape(mask, new), self.spec, sparse_flags.index(True))
        kinds, lead = self._kinds()
        core = groupings.reshape_groupings(kinds[lead:], self.shape[lead:], new[lead:])
        if core is None or not new or new[:lead] != self.shape[:lead]:
            raise ValueError(
                f"shape={new} would split groups of {self.spec.format} in an array of shape {self.shape}, or leave "
                "them along several axes; dequantize, reshape and quantize"
            )
        scales = new[:lead] + groupings.scale_shape_of(core, new[lead:])
        packs = _codes.packs_codes(self.spec.element)
        if new[-1:] == self.shape[-1:] or not packs:
            qvalue = reshape(self.qvalue, (*new[:-1], self.qvalue.shape[-1] if packs else new[-1]))
        else:
            qvalue = _codes.pack_entries(reshape(self._entries(), new), self.spec.element)
        return self._moved(qvalue, new[-1], core, lambda part: reshape(part, scales))

    def __getitem__(self, index: Any) -> QArray:
        """Returns a part of the array: integers and slices along any axis, or an array of integers along one.

        No index may cut a group: along an axis in groups, only slices of whole groups, of step 1, are allowed.

        Raises:
            IndexError, TypeError: for an index of another kind, or out of range. A traced index out of range is
                clamped, as in JAX.
            ValueError: if a group would be cut.
        """
        entries = groupings.normalize_index(index, self.shape)
        kinds, lead = self._kinds()
        scales = tuple(
            groupings.scale_entry(axis, entry, kind, n)
            for axis, (entry, kind, n) in enumerate(zip(entries, kinds, self.shape, strict=True))
        )
        if all(entry == slice(None) for entry in entries):
            return self
        axes = [
            axis for axis, entry in enumerate(entries) for _ in range(1 if isinstance(entry, slice) else np.ndim(entry))
        ]
        if self.places is not None:
            dense, which, axis, unit = self._whole()
            groupings.scale_entry(axis, entries[axis], unit, self.shape[axis])
            return dense[tuple(entries)].thinned(which[tuple(entries)], self.spec, axes.index(axis))
        if self.length is None or (entries and isinstance(entries[-1], slice) and entries[-1] == slice(None)):
            qvalue, size = self.qvalue[tuple(entries[:-1])], self.length
        else:
            cut = self._entries()[tuple(entries)]
            size = cut.shape[-1] if axes else None
            qvalue = _codes.pack_entries(cut if axes else cut.reshape(1), self.spec.element)
        tensor, grouping = scales[:lead], [kinds[axis] for axis in axes if axis >= lead]
        return self._moved(
            qvalue, size, grouping, lambda part: part[scales], lambda part: part[tensor] if tensor else part
        )

    def thinned(self, kept: Any, spec: Spec, axis: int) -> QArray:
        """Keeps the codes of some numbers alone, of an array whose format has no `sparse`.

        Args:
            kept: which numbers are kept; the others become +0.
            spec: a spec with `sparse`; `kept` has as many numbers as it says.
            axis: the axis along which they are counted, from 0.
        """
        assert self.spec.scaled is not None and spec.scaled is not None
        fmt = groupings.with_sparse_axis(self.spec.scaled(sparse=spec.scaled.sparse), axis - self.ndim)
        spec = replace(self.spec, format=fmt)
        codes, places = _codes.sparse_codes(self.qvalue, kept, spec)
        return replace(self, qvalue=codes, places=places, spec=spec)

    def shardings(self, sharding: Sharding) -> QArray:
        """Derives the sharding of each leaf from the sharding of the array.

        Codes are sharded like the array. So are scales and zero points, except along axes that are too short, which are
        replicated. ``jax.device_put(q, q.shardings(sharding))`` works for every format. The result is valid for
        `in_shardings` and `out_shardings` of `jax.jit`.

        Args:
            sharding: the sharding of an array of this shape. A `jax.sharding.NamedSharding` is adapted to each leaf;
                any other is used for all leaves.

        Returns:
            A QArray with shardings as leaves.

        Raises:
            TypeError: if `sharding` is not a sharding.
            ValueError: if `sharding` has more axes, or cuts bytes of packed codes.

        Example:
            >>> import jax, jax.numpy as jnp, jchop as jc
            >>> mesh = jax.make_mesh((1,), ("data",))
            >>> q = jc.quantize(jnp.ones((4, 32)), "nvfp4")
            >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None))
            >>> where = q.shardings(rows)
            >>> tuple(where.scale[0].spec), tuple(where.scale[1].spec)
            (('data', None), ())
            >>> jax.device_put(q, where).shape
            (4, 32)
        """
        check_instance("sharding", sharding, Sharding, "a sharding of JAX")
        if not isinstance(sharding, NamedSharding):
            return jax.tree.map(lambda _: sharding, self)
        count = len(sharding.spec)
        check(count <= self.ndim, f"sharding={sharding} names {count} axes, and q has {self.ndim}")
        names = (*sharding.spec, *[None] * (self.ndim - len(sharding.spec)))
        whole = sharding.update(spec=PartitionSpec(*names))
        # A tensor scale has only axes that vmap added.
        result = jax.tree.map(lambda leaf: fit_sharding(whole, leaf.shape), self)
        cuts, shape = tuple(result.qvalue.spec) == names[: len(self.qvalue.shape)], list(self.qvalue.shape)
        check(cuts, f"sharding={sharding} does not cut codes of shape {shape} into equal parts")
        return result

    # -- internals -----------------------------------------------------------------------------------------------------
    def _kinds(self) -> tuple[tuple[groupings.AxisGrouping, ...], int]:
        """The grouping of each axis, and the number of leading axes that the tensor scale has, too."""
        fmt = _codes.spec_of_part(self.spec, self.ndim).scaled
        if fmt is None:
            return (groupings.OWN_SCALE,) * self.ndim, 0
        batch = _codes.batch_axes(self.spec, self.shape, self.scale)
        return groupings.axis_groupings(fmt, self.ndim, batch), batch if fmt.scale_rule.tensor_scale else 0

    def _whole(self) -> tuple[QArray, Any, int, int]:
        """The array with codes of all numbers, which of them are kept, along which axis, and of how many some are."""
        fmt = self.spec.scaled
        assert fmt is not None and fmt.sparse is not None and self.length is not None
        codes, mask = _codes.dense_codes(self.qvalue, self.places, self.length, self.spec)
        dense = replace(self, qvalue=codes, places=None, spec=replace(self.spec, format=fmt.dense))
        return dense, mask, fmt.axis_of_sparse % self.ndim, fmt.sparse[1]

    def _entries(self) -> Any:
        """The codes, one entry for each element, in the shape of the array; an array without axes has one entry."""
        count = 1 if self.length is None else self.length
        return _codes.unpack_entries(self.qvalue, self.spec.element, count).reshape(self.shape)

    def _quantized_scale(self, fmt: ScaledFormat, inner: ScaledFormat) -> QArray:
        """Quantized scales as a QArray."""
        batch = _codes.batch_axes(self.spec, self.shape, self.scale)
        shape = groupings.format_of_part(fmt, self.ndim).scale_shape(self.shape[batch:])
        return qarray_of_scales(self.scale, inner, shape)

    def _moved(
        self, qvalue: Any, size: int | None, kinds: Sequence[groupings.AxisGrouping], move: Any, of_tensor: Any = None
    ) -> QArray:
        """The array with other codes, grouped by `kinds`.

        Args:
            qvalue: the codes.
            size: of the last axis.
            kinds: the grouping of each axis.
            move: makes the scales and zero points, of arrays and, if scales are quantized, of a QArray.
            of_tensor: makes the tensor scale. Default: it stays.
        """
        fmt, scale = self.spec.scaled, self.scale
        if fmt is None:
            return QArray(qvalue, None, None, self.spec, size, self.dtype)
        if isinstance(fmt.scale, ScaledFormat):
            inner = move(self._quantized_scale(fmt, fmt.scale))
            fmt = fmt(scale=inner.spec.format)
            codes = _codes.load_codes(inner.qvalue, inner.spec.element)
            scale = codes, *flatten_scales(inner.scale, inner.zero_point)
        elif fmt.scale_rule.tensor_scale:
            scale = move(scale[0]), scale[1] if of_tensor is None else of_tensor(scale[1])
        else:
            scale = move(scale)
        zero_point = None if self.zero_point is None else move(self.zero_point)
        spec = replace(self.spec, format=groupings.with_groupings(fmt, kinds))
        return QArray(qvalue, scale, zero_point, spec, size, self.dtype)


def qarray_of_scales(scale: _codes.Scale, fmt: ScaledFormat, shape: tuple[int, ...]) -> QArray:
    """Scales of a shape that are quantized to a scaled format, as a QArray."""
    codes, *rest = scale
    size = shape[-1] if shape else None
    return QArray(
        _codes.store_codes(codes, fmt.element), *unflatten_scales(rest, fmt), Spec(fmt), size, np.dtype(np.float32)
    )


def check_qarray(
    name: str, value: Any, classes: Any = QArray, what: str = "QArray, as returned by jchop.quantize"
) -> None:
    """Refuses a value of another class than QArray, or than `classes`.

    Raises:
        TypeError: that has the value in one line, and of an array its dtype and shape.
    """
    if not isinstance(value, classes):
        refuse_qarray_dicts(name, value)
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            raise TypeError(f"{name} is {type(value).__name__} {value.dtype}{list(value.shape)}; it must be a {what}")
        raise TypeError(f"{name}={' '.join(repr(value).split()):.80} must be a {what}")


#: Names of leaves that every QArray has.
_QARRAY_LEAVES = frozenset(("qvalue", "scale", "zero_point"))


def refuse_qarray_dicts(name: str, tree: Any) -> None:
    """Refuses the leaves of a QArray in a dict, as orbax restores one without a target: they have no spec.

    Raises:
        TypeError: with the path of the first, and the call that restores it.
    """

    def are_parts(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() >= _QARRAY_LEAVES

    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=are_parts):
        if are_parts(leaf):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} is a dict of the leaves of a QArray, without its spec, as of a "
                "checkpoint that was restored without a target: restore(path, jax.eval_shape(make)), where make() "
                "gives what was saved"
            )


#: Functions of NumPy that need no numbers; within jit there are none for NumPy.
_SHAPE_FUNCTIONS = (np.shape, np.ndim, np.size, np.iscomplexobj, np.isrealobj)
#: The most elements that `repr` dequantizes and shows.
_MOST_REPR_ELEMENTS = 1000


def _complete_shape(new: tuple[int, ...], old: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with its -1, if any, replaced by a length."""
    new = tuple(check_int("shape", n, -1) for n in new)
    total, product = math.prod(old), math.prod(n for n in new if n != -1)
    if new.count(-1) == 1 and product and total % product == 0:
        new = tuple(total // product if n == -1 else n for n in new)
    if math.prod(new) != total or -1 in new:
        raise ValueError(f"shape={new} does not have the {total} elements of an array of shape {old}")
    return new


# -- jax.export --------------------------------------------------------------------------------------------------------


def register_export(cls: type, name: str) -> None:
    """Has `jax.export` store the static fields of a class: a spec or None, a length, a dtype."""

    def to_bytes(static: tuple[Spec | None, int | None, np.dtype]) -> bytes:
        spec, size, dtype = static
        return json.dumps([None if spec is None else str(spec), size, np.dtype(dtype).name]).encode()

    def from_bytes(data: bytes) -> tuple[Spec | None, int | None, np.dtype]:
        text, size, dtype = json.loads(data)
        return None if text is None else parse(text), size, jnp.dtype(dtype)

    export.register_pytree_node_serialization(
        cls, serialized_name=name, serialize_auxdata=to_bytes, deserialize_auxdata=from_bytes
    )


register_export(QArray, "jchop.QArray")


# -- shardings ---------------------------------------------------------------------------------------------------------


def named_sharding_of(like: Any) -> NamedSharding | None:
    """The sharding of an array, or of its shape and dtype. An abstract mesh must be the current mesh, and becomes it.

    Raises:
        ValueError: for an abstract mesh that is not the current one.
    """
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    if isinstance(sharding.mesh, Mesh):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.shape != sharding.mesh.shape:
        raise ValueError(
            f"like has the sharding {sharding.spec} on an abstract mesh of {dict(sharding.mesh.shape)}, whose devices "
            "are not known; call it under jax.set_mesh(mesh)"
        )
    return NamedSharding(mesh, sharding.spec)


def check_group_sharding(q: QArray, sharding: NamedSharding, name: str) -> None:
    """Refuses a sharding that cuts a block of a format between devices.

    Scales that a whole axis shares are on every device, so an axis under one scale may be cut.

    Args:
        q: a QArray, of arrays or of `jax.ShapeDtypeStruct`.
        sharding: of the array.
        name: of the array, for the error.

    Raises:
        ValueError: names the axis, and the numbers of parts that fit.
    """
    for axis, (entry, count) in enumerate(zip(sharding.spec, parts_of_axes(sharding), strict=True)):
        unit, length = group_length(q, axis), q.shape[axis]
        if length % (count * unit):
            fits = [n for n in range(1, length // unit + 1) if length % (n * unit) == 0]
            raise ValueError(
                f"{name}: {entry!r} cuts axis {axis} of length {length} into {count} parts, which do not hold whole "
                f"groups of {unit} of {str(q.spec)!r}; sizes of the mesh axis that fit: {', '.join(map(str, fits))}"
            )


def group_length(q: QArray, axis: int) -> int:
    """The length along an axis that parts of a QArray must be multiples of: of its groups, and of groups of scales."""
    return groupings.unit_lengths(_codes.spec_of_part(q.spec, q.ndim).scaled, q.ndim)[axis]
