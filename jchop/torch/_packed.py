"""`PackedTensor`: codes and scales as buffers of a module, and layers with such weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from jchop import _storage
from jchop._common.bit_ops import enable_x64_for
from jchop._common.checks import check_instance
from jchop._storage import QArray
from jchop._storage._codes import check_qarray_leaves, qarray_shape
from jchop._storage._save import join_qarray, qarray_description, qarray_tensors
from jchop.torch import _operators as operators
from jchop.torch._operators import CARRIER_NAMES

#: The end of the name of the submodule that holds a packed parameter.
PACKED_SUFFIX = "_packed"
#: The name of the text in a state dict that describes the parts.
_STATE_TEXT = "_extra_state"
_NUMBER_DTYPES = {name: dtype for dtype, name in CARRIER_NAMES.items() if not dtype.is_complex}
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_codes(x: Tensor, spec: str, words: Tensor, *, copy: bool) -> QArray:
    """A tensor as codes and scales of JAX, with the random bits of words.

    Raises:
        TypeError, ValueError: as `jchop.quantize`, and for a tensor that would have to be copied.
    """
    operators.check_carrier("x", x, complex_too=False)
    q = _storage.quantize(operators.as_jax(x, copy=copy), spec, operators.key_of_words(operators.import_words(words)))
    return q if x.is_cuda else jax.block_until_ready(q)


@operators.outside_graphs
def dequantize(q: QArray, dtype: torch.dtype | None = None) -> Tensor:
    """Returns the numbers of a `jchop.QArray` as a tensor.

    Args:
        q: the stored array, of JAX or NumPy arrays.
        dtype: float16, bfloat16, float32 or float64. Default: the dtype of the quantized tensor.

    Returns:
        A new tensor, on the device of the codes.

    Raises:
        TypeError: if `q` is not a QArray, or is traced by JAX, or `dtype` is not a carrier.

    Example:
        >>> import torch, jchop as jc
        >>> q = jc.torch.quantize(torch.tensor([0.1, 0.2, -0.4]), "int4(group=3)")
        >>> jc.torch.dequantize(q, torch.bfloat16)
        tensor([ 0.1143,  0.2285, -0.4004], dtype=torch.bfloat16)
    """
    if dtype is not None and dtype not in CARRIER_NAMES:
        raise TypeError(f"dtype={dtype!r} is not a carrier; allowed: {', '.join(map(str, CARRIER_NAMES))}")
    operators.check_has_numbers("q", q)
    numbers = _storage.dequantize(q, None if dtype is None else CARRIER_NAMES[dtype])
    with enable_x64_for(numbers.dtype):
        return operators.as_tensor(jnp.array(numbers, copy=True) if _shares_storage(numbers, q) else numbers)


def _shares_storage(numbers: Any, q: QArray) -> bool:
    """Whether the numbers are a NumPy array, or an array of `q` itself, which a tensor could overwrite."""
    return not isinstance(numbers, jax.Array) or (
        isinstance(q.qvalue, jax.Array)
        and numbers.size > 0
        and numbers.unsafe_buffer_pointer() == q.qvalue.unsafe_buffer_pointer()
    )


@torch.library.custom_op("jchop::numbers", mutates_args=(), schema="(Tensor[] parts, str text, str dtype) -> Tensor")
def numbers_operator(parts: list[Tensor], text: str, dtype: str) -> Tensor:
    """The numbers of the parts of a QArray: an operator, so that torch.compile does not involve JAX."""
    return dequantize(_qarray_from_tensors(parts, text, True), _NUMBER_DTYPES[dtype])


@numbers_operator.register_fake
def _fake_numbers(parts: list[Tensor], text: str, dtype: str) -> Tensor:
    return parts[0].new_empty(join_qarray(list(parts), json.loads(text)).shape, dtype=_NUMBER_DTYPES[dtype])


def _qarray_from_tensors(parts: list[Tensor], text: str, copy: bool) -> QArray:
    return join_qarray([operators.as_jax(part, copy=copy) for part in parts], json.loads(text))


class PackedTensor(nn.Module):
    """A tensor stored as codes and scales. A call returns its numbers.

    The codes, scales and zero points are buffers with the names that `jchop.save` gives them: ``qvalue``, ``scale``.
    Some formats also have ``zero_point``, ``tensor_scale``, ``scale_scale`` or ``scale_zero_point``. They have no
    gradient. `load_state_dict` replaces them, and refuses parts of another spec, shape or dtype.

    ``.to(dtype)``, ``.half()`` and similar methods change the dtype of the numbers, never the codes and scales.
    ``.to(device)`` moves the buffers.

    Args:
        q: the stored array, of JAX arrays, whose memory the buffers share.

    Attributes:
        dtype: dtype of the numbers, at first the dtype of `q`.

    Raises:
        TypeError: if `q` is not a QArray of JAX arrays.
        ValueError: if its parts do not fit each other.

    Example:
        >>> import torch, jchop as jc
        >>> packed = jc.torch.PackedTensor(jc.torch.quantize(torch.tensor([[1.0, 0.3, -7.5, 100.0]]), "mxfp4(group=2)"))
        >>> packed()
        tensor([[ 1.0000,  0.2500, -8.0000, 96.0000]])
        >>> {name: part.tolist() for name, part in packed.named_buffers()}
        {'qvalue': [[38, 121]], 'scale': [[125, 131]]}
        >>> packed.as_qarray().shape, packed.half()().dtype
        ((1, 4), torch.float16)
    """

    def __init__(self, q: QArray) -> None:
        super().__init__()
        check_instance("q", q, QArray, "a jchop.QArray, as returned by jchop.torch.quantize of a tensor")
        operators.check_has_numbers("q", q)
        check_qarray_leaves(q)
        for name, part in qarray_tensors("", q).items():
            self.register_buffer(name.removeprefix("."), operators.as_tensor(part))
        self.text = json.dumps(qarray_description(q))
        self.dtype = _NUMBER_DTYPES[q.dtype.name]

    def forward(self) -> Tensor:
        """Returns the numbers, in a new tensor."""
        return numbers_operator(list(self._buffers.values()), self.text, CARRIER_NAMES[self.dtype])

    @operators.outside_graphs
    def as_qarray(self, *, copy: bool = False) -> QArray:
        """Returns the stored array in JAX.

        Args:
            copy: whether a part may be copied if JAX cannot read it in place, as in `as_jax`. Default False.

        Returns:
            A `jchop.QArray` that shares the memory of the buffers.

        Raises:
            ValueError: for a part that would have to be copied.
        """
        return _qarray_from_tensors([part for part in self._buffers.values() if part is not None], self.text, copy)

    @property
    def spec(self) -> str:
        """The spec of the codes, as text."""
        return json.loads(self.text)["spec"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numbers."""
        return qarray_shape(self._buffers["qvalue"], json.loads(self.text)["size"], self._buffers.get("places"))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(part.nbytes for part in self.buffers())

    def extra_repr(self) -> str:
        """Returns spec, shape and dtype, for the representation of the module."""
        return f"{self.spec!r}, shape={self.shape}, dtype={self.dtype}"

    # -- torch's protocols ---------------------------------------------------------------------------------------------
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedTensor:
        device = self._buffers["qvalue"].device  # type: ignore[union-attr]
        dtype = fn(torch.empty(1, dtype=self.dtype, device=device)).dtype
        if dtype not in _NUMBER_DTYPES.values():
            raise TypeError(f"the numbers of a PackedTensor cannot be {dtype}; allowed: {', '.join(_NUMBER_DTYPES)}")
        new_bits = {}
        for name, part in self._buffers.items():
            assert part is not None
            bits = part.view(_INTEGER_DTYPES[part.element_size()])  # a cast of floats must not reach codes and scales
            new_bits[name] = fn(bits)
            if new_bits[name].dtype != bits.dtype:
                raise TypeError(f"{name} holds codes or scales, which have no other dtype; use .to({dtype})")
        for name, bits in new_bits.items():
            self._buffers[name] = bits.view(self._buffers[name].dtype)  # type: ignore[union-attr]
        self.dtype = dtype
        return self

    def get_extra_state(self) -> Tensor:
        """Returns the description of the parts, UTF-8 text in a uint8 tensor."""
        return torch.tensor(list(self.text.encode()), dtype=torch.uint8)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = (*self._buffers, _STATE_TEXT)
        parts = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        missing_keys += [prefix + name for name in names if name not in parts]
        own_keys = (key for key in state_dict if key.startswith(prefix))
        unexpected_keys += [key for key in own_keys if key.removeprefix(prefix) not in names]
        fault = self._fault(parts) if parts else None
        if fault is not None:
            error_msgs.append(f"{prefix.removesuffix('.')}: {fault}")
        if fault is not None or not parts:
            return
        assigns = local_metadata.get("assign_to_params_buffers", False)
        for name, part in self._buffers.items():
            assert part is not None
            value = parts[name].detach()
            # A new tensor, since JAX arrays may share the memory of the old one.
            device = value.device if part.is_meta else part.device
            self._buffers[name] = value if assigns else value.to(device, copy=True)

    def _fault(self, parts: Mapping[str, Any]) -> str | None:
        """The reason why parts of a state dict cannot be loaded; None if they can."""
        if missing := [name for name in self._buffers if name not in parts]:
            return f"the state has {', '.join(parts)}, but not {', '.join(missing)}"
        description = json.loads(self.text)
        if _STATE_TEXT in parts:
            try:
                state = json.loads(bytes(parts[_STATE_TEXT].tolist()))
                state = {key: state[key] for key in ("spec", "size")}
            except (AttributeError, KeyError, TypeError, ValueError):
                return f"{_STATE_TEXT} is not the description of a PackedTensor"
            if state != {key: description[key] for key in state}:
                return (
                    f"the state has spec={state['spec']!r} with a last axis of {state['size']}, and the module "
                    f"has spec={description['spec']!r} with one of {description['size']}"
                )
        for name, part in self._buffers.items():
            value = parts[name]
            if not isinstance(value, Tensor) or (value.dtype, value.shape) != (part.dtype, part.shape):  # type: ignore[union-attr]
                return f"{name} is {_dtype_and_shape(value)} in the state, and {_dtype_and_shape(part)} in the module"
        return None


def _dtype_and_shape(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


# -- layers ------------------------------------------------------------------------------------------------------------


def packed_parameters(layer: nn.Module) -> dict[str, PackedTensor]:
    """The packed parameters of a layer by name."""
    children = [(name, child) for name, child in layer.named_children() if isinstance(child, PackedTensor)]
    return {name.removesuffix(PACKED_SUFFIX): child for name, child in children if name.endswith(PACKED_SUFFIX)}


def pack_parameter(layer: nn.Module, name: str, tensor: PackedTensor) -> None:
    """Replaces a parameter of a layer by a submodule; reading it gives the numbers of that module."""
    earlier_names, base = tuple(packed_parameters(layer)), type(layer)
    if earlier_names:
        base = base.__bases__[0]
    if parametrize.is_parametrized(layer, name):
        # parametrize.remove_parametrizations changes the class, which the layer shares with those it was copied from.
        del layer.parametrizations[name]  # type: ignore[operator]
        if not layer.parametrizations:
            del layer.parametrizations
            base = base.__bases__[0]
    else:
        delattr(layer, name)
    layer.add_module(name + PACKED_SUFFIX, tensor)
    layer.__class__ = _packed_class(base, (*earlier_names, name))


@lru_cache(maxsize=256)
def _packed_class(base: type, names: tuple[str, ...]) -> type:
    """A layer's class with properties in place of parameters."""

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if name in names:
            raise AttributeError(f"{name} is packed: set {name}{PACKED_SUFFIX} to a jchop.torch.PackedTensor instead")
        nn.Module.__setattr__(self, name, value)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple:
        return _restore_layer, (base, names), self.__dict__  # the class has no place from which pickle could import it

    properties = {name: _numbers_property(name) for name in names}
    methods = {"__setattr__": __setattr__, "__reduce_ex__": __reduce_ex__, "__module__": __name__}
    return type(f"Packed{base.__name__}", (base,), properties | methods)


def _numbers_property(name: str) -> property:
    return property(lambda layer: getattr(layer, name + PACKED_SUFFIX)())


def _restore_layer(base: type, names: tuple[str, ...]) -> nn.Module:
    return object.__new__(_packed_class(base, names))
