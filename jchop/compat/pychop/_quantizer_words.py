"""The arguments of the paper's layers and optimizers: bits of a format, instead of version 0.6's quantizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jchop.compat.pychop._integers import Chopi
from jchop.compat.pychop._quantizers import Chop, Chopf

_FLOAT_WORDS = {"exp_bits": "exp_bits", "sig_bits": "sig_bits", "rmode": "rmode"}
_FIXED_WORDS = {"ibits": "ibits", "fbits": "fbits", "int_bits": "ibits", "frac_bits": "fbits", "rmode": "rmode"}


@dataclass(frozen=True)
class QuantizerWords:
    """The arguments that the classes of one prefix take instead of ``chop=``.

    Args:
        kind: the class of the quantizer.
        names: the quantizer's argument for each word.
        defaults: default arguments of the quantizer; without defaults and words there is no quantizer.
    """

    kind: Callable[..., Any]
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def quantizer(self, chop: Any, options: dict[str, Any]) -> Any:
        """`chop`, or the quantizer of the words in `options`, which are removed from it.

        Raises:
            TypeError: if both are given, or an argument twice.
        """
        given_names = [name for name in self.names if name in options]
        if not given_names:
            return self.kind(**self.defaults) if chop is None and self.defaults else chop
        if chop is not None:
            raise TypeError(f"chop= and {given_names[0]}= both define the quantizer; pass one of them")
        arguments = {self.names[name]: options.pop(name) for name in given_names}
        if len(arguments) < len(given_names):
            raise TypeError(f"{' and '.join(given_names)} set an argument of {self.kind.__name__} twice")
        return self.kind(**{**self.defaults, **arguments})


QUANTIZER_WORDS = {
    "Quantized": QuantizerWords(Chop, _FLOAT_WORDS),
    "IQuantized": QuantizerWords(Chopi),
    "FPQuantized": QuantizerWords(Chopf, _FIXED_WORDS, {"ibits": 8, "fbits": 8}),
    "IntQuantized": QuantizerWords(Chopi, {"num_bits": "bits"}, {"bits": 8, "symmetric": True}),
}


def class_lookup(
    module: str, prefixes: Iterable[str], torch_names: Mapping[str, str], make: Callable[[str, str, str], type]
) -> Callable[[str], type]:
    """The function ``__getattr__`` of a module that has a class for each prefix and name, made when first used.

    Args:
        module: its name.
        prefixes: keys of `QUANTIZER_WORDS`.
        torch_names: the name in torch for each name after a prefix.
        make: makes a class, from its name, its prefix and the name in torch.
    """
    names = {prefix + name: (prefix, of) for prefix in prefixes for name, of in torch_names.items()}

    @lru_cache(maxsize=len(names))
    def load(name: str) -> type:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return make(name, *names[name])

    return load
