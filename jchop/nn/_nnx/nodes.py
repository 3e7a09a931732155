"""The nodes of a model: modules with all their paths and their own parameters; variables of packed parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from flax import nnx
from flax.core.meta import get_global_mesh
from flax.nnx.spmd import get_var_pspec
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jchop._common.bit_ops import entries_after_reshape
from jchop._quantized.products.operand_layout import OperandLayout
from jchop._storage import QArray
from jchop._storage._array import named_sharding_of
from jchop._storage._quantize import StoredAs

Keys = tuple[Any, ...]

#: So many paths are followed; modules that refer to each other all around could have more than can be counted.
_MAX_MODULE_PATHS = 1_000_000


@dataclass
class ModuleEntry:
    """A module in a model.

    Args:
        module: the module.
        keys: of each path that leads to it, the names of attributes and the indexes. One that leads through the module
            itself is none.
        variables: its variables by their paths below it, without the variables of modules below.
    """

    module: nnx.Module
    keys: list[Keys] = field(default_factory=list)
    variables: dict[str, nnx.Variable] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        """The paths of the module as text, the one of `flax.nnx.iter_modules` first."""
        return [keys_as_path(keys) for keys in self.keys]


def keys_as_path(keys: Sequence[Any]) -> str:
    """The path of a module as text."""
    return "/".join(map(str, keys))


def module_entries(model: nnx.Module) -> list[ModuleEntry]:
    """Every module of a model once, in the order of `flax.nnx.iter_modules`.

    Raises:
        ValueError: for more paths than can be followed.
    """
    entries: dict[int, ModuleEntry] = {}
    order: dict[int, ModuleEntry] = {}
    above: set[int] = set()
    count = 0

    def visit(node: Any, keys: Keys, holder: ModuleEntry | None, start: int) -> None:
        nonlocal count
        if isinstance(node, nnx.Variable):
            if holder is not None:
                holder.variables[keys_as_path(keys[start:])] = node
            return
        if id(node) in above or not nnx.graph.is_node(node):
            return
        if isinstance(node, nnx.Module):
            count += 1
            if count > _MAX_MODULE_PATHS:
                raise ValueError(
                    f"model: more than {_MAX_MODULE_PATHS} paths lead to its modules, which refer to each other"
                )
            holder, start = entries.setdefault(id(node), ModuleEntry(node)), len(keys)
            holder.keys.append(keys)
        above.add(id(node))
        for key, child in _node_children(node).items():
            visit(child, (*keys, key), holder, start)
        above.remove(id(node))
        if isinstance(node, nnx.Module):
            order.setdefault(id(node), entries[id(node)])

    visit(model, (), None, 0)
    return [*order.values()]


def node_at(model: Any, path: Keys) -> Any:
    """The module, variable or container at a path."""
    node = model
    for key in path:
        node = _node_children(node)[key]
    return node


def replace_nodes(model: Any, replacements: Mapping[int, Any]) -> Any:
    """A model with other variables or modules, in place, wherever one has an id of `replacements`."""
    nodes = [node for _, node in nnx.iter_graph(model) if nnx.graph.is_node(node)]
    for node in nodes:
        if isinstance(node, nnx.Variable):
            continue
        for key, child in _node_children(node).items():
            if id(child) not in replacements:
                continue
            if isinstance(key, str) and hasattr(node, key):
                setattr(node, key, replacements[id(child)])
            else:
                node[key] = replacements[id(child)]
    return replacements.get(id(model), model)


def delete_other_arrays(model: Any, other: Any) -> None:
    """Delete the arrays of parameters of a model that another model does not hold."""
    others = {id(leaf) for leaf in jax.tree.leaves(nnx.state(other))}
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        if id(leaf) not in others:
            leaf.delete()


def _node_children(node: Any) -> dict[Any, Any]:
    return dict(nnx.graph.get_node_impl(node).node_dict(node))  # type: ignore[union-attr]


#: The entry of the metadata of a packed parameter for its class before; none if that was `flax.nnx.Param` itself.
_UNPACKED_CLASS = "unpacked_class"


class QuantizedParam(nnx.Variable):
    """A parameter that is stored as a `jchop.QArray`, in its own shape.

    If groups run over several axes, it is laid out with the contracted axes last, as one. It is not a
    `flax.nnx.Param`: codes have no gradient, and filters for trainable parameters ignore it.

    An annotation `out_sharding` is for the axes of the array. The codes have it, and each scale as far as its shape
    allows these cuts. `flax.nnx.get_partition_spec` gives a `jax.sharding.PartitionSpec` for each.

    Example:
        >>> from flax import nnx
        >>> import jchop as jc
        >>> layer = jc.nn.quantize(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), jc.Rule(weight="int4(group=4)"), mode="ptq")
        >>> type(layer.kernel).__name__, layer.kernel[...].shape, layer.kernel[...].nbytes
        ('QuantizedParam', (8, 3), 40)
    """

    def __init__(self, value: Any, *, eager_sharding: bool | None = None, **metadata: Any) -> None:
        super().__init__(value, eager_sharding=False, **metadata)  # which would give all leaves one sharding
        eager = nnx.using_eager_sharding() if eager_sharding is None else eager_sharding
        self.set_metadata("eager_sharding", eager)
        where = variable_sharding(self) if eager else None
        if where is not None:
            self.set_value(put_on_devices(self.get_raw_value(), where))

    def copy(self, *value: Any, **updates: Any) -> Any:
        """Copies as `flax.nnx.Variable` does. A sharding, or a shape with one, is adapted to each leaf."""
        return super().copy(*(self._of_leaves(one) for one in value), **updates)

    replace = copy

    def set_value(self, value: Any, **more: Any) -> None:
        """Sets the value as `flax.nnx.Variable` does, with shardings as in `copy`."""
        super().set_value(self._of_leaves(value), **more)

    def _of_leaves(self, value: Any) -> Any:
        """A spec, sharding or shape of the parameter as one for each array of a packed one; others unchanged."""
        current = self.get_raw_value()
        if not isinstance(current, QArray | StoredAs):
            return value
        if isinstance(value, PartitionSpec):
            return _leaf_partition_specs(current, value, self.get_metadata("mesh", None) or get_global_mesh())
        if isinstance(value, NamedSharding):
            return _leaf_shardings(current, value)
        if isinstance(value, jax.ShapeDtypeStruct) and value.shape == current.shape:
            return put_on_devices(
                jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), current), value.sharding
            )
        return value


def packed_nnx_variable(
    variable: nnx.Variable, codes: QArray | StoredAs, layout: OperandLayout | None = None
) -> QuantizedParam:
    """A variable of codes in the place of a parameter, with its metadata.

    It is sharded as the parameter's array is, or as its annotation says.

    Args:
        variable: of the parameter.
        codes: its numbers, packed.
        layout: of the codes, if that is not the parameter's own.
    """
    metadata, value = variable.get_metadata(), variable.get_raw_value()
    metadata |= {} if type(variable) in (nnx.Param, QuantizedParam) else {_UNPACKED_CLASS: type(variable)}
    own = None if isinstance(value, Tracer) else named_sharding_of(value)
    if layout is not None:
        if metadata.get("out_sharding"):
            metadata["out_sharding"] = layout.entries(metadata["out_sharding"], value.shape)
        own = None if own is None else own.update(spec=PartitionSpec(*layout.entries(tuple(own.spec), value.shape)))
    if own is None:
        return QuantizedParam(codes, **metadata)
    return QuantizedParam.from_metadata(put_on_devices(codes, own), metadata)  # type: ignore[return-value]


def unpacked_nnx_variable(variable: QuantizedParam, value: Any) -> nnx.Variable:
    """A variable of numbers in the place of a packed parameter, of the class that this had before."""
    metadata = variable.get_metadata()
    return metadata.pop(_UNPACKED_CLASS, nnx.Param)(value, **metadata)


def variable_sharding(variable: nnx.Variable) -> NamedSharding | None:
    """The sharding that a variable's annotation says for its array, on its mesh, the current one, or its array's."""
    spec = get_var_pspec(variable)
    on = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(variable.get_raw_value()))
    meshes = (where.mesh for where in on if isinstance(where, NamedSharding))
    mesh = variable.get_metadata("mesh", None) or get_global_mesh() or next(meshes, None)
    return None if not spec or mesh is None else NamedSharding(mesh, spec)


def put_on_devices(value: Any, sharding: NamedSharding | None) -> Any:
    """An array, or codes and scales, on the devices of an array's sharding; of shapes, shapes with a sharding."""
    return value if sharding is None else jax.tree.map(_put_leaf_on_devices, value, _leaf_shardings(value, sharding))


def _put_leaf_on_devices(leaf: Any, where: NamedSharding) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    if isinstance(where.mesh, Mesh):
        return jax.device_put(leaf, where)
    move = jax.sharding.reshard if where.mesh.are_all_axes_explicit else jax.lax.with_sharding_constraint
    return move(leaf, where)


def _leaf_shardings(value: Any, sharding: NamedSharding) -> Any:
    """The sharding of each leaf of an array, or of codes and scales, by the sharding of the array."""
    if not isinstance(value, QArray | StoredAs):
        return sharding
    specs = _leaf_partition_specs(value, sharding.spec, sharding.mesh)
    return jax.tree.map(lambda spec: sharding.update(spec=spec), specs)


def _leaf_partition_specs(value: QArray | StoredAs, spec: PartitionSpec, mesh: Any) -> Any:
    """The `PartitionSpec` of each leaf of codes and scales, by the `PartitionSpec` of the array.

    An axis that codes cannot be cut along is whole in every leaf. If the mesh has one device along an axis, or is not
    known, scales are cut only if there is one for each number. So the result fits other meshes, too.
    """
    qarray = value.stored if isinstance(value, StoredAs) else value
    entries: Sequence[Any] = (*spec, *[None] * (len(value.shape) - len(spec)))
    counts = [_axis_part_count(entry, mesh) for entry in entries]
    entries = entries_after_reshape(entries, counts, value.shape, qarray.shape)
    codes = qarray.qvalue.shape
    entries = [e if n % _axis_part_count(e, mesh) == 0 else None for e, n in zip(entries, codes, strict=False)]

    counts = [
        length if (count := _axis_part_count(e, mesh)) == 1 else count
        for e, length in zip(entries, qarray.shape, strict=True)
    ]

    def of(leaf: Any) -> PartitionSpec:
        axes = zip(entries, counts, leaf.shape, strict=False)
        return PartitionSpec(*(entry if n % count == 0 else None for entry, count, n in axes))

    specs = replace(jax.tree.map(of, qarray), qvalue=PartitionSpec(*entries))
    if not isinstance(value, StoredAs):
        return specs
    factors = None if value.input_factors is None else PartitionSpec()
    return replace(value, stored=specs, input_factors=factors)  # type: ignore[type-var]


def _axis_part_count(entry: Any, mesh: Any) -> int:
    """The number of parts of an axis under an entry of a `PartitionSpec`; 1 without a mesh that has its names."""
    names = [name for name in (entry if isinstance(entry, tuple) else (entry,)) if name is not None]
    return 1 if mesh is None else math.prod(mesh.shape.get(name, 1) for name in names)
