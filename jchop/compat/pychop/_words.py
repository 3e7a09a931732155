"""The arguments of the paper's layers and optimizers: the bits of a format, where version 0.6 has a quantizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jchop.compat.pychop._integers import Chopi
from jchop.compat.pychop._quantizers import Chop, Chopf

__all__ = ["WORDS", "Words"]

_FLOAT = {"exp_bits": "exp_bits", "sig_bits": "sig_bits", "rmode": "rmode"}
_FIXED = {"ibits": "ibits", "fbits": "fbits", "int_bits": "ibits", "frac_bits": "fbits", "rmode": "rmode"}


@dataclass(frozen=True)
class Words:
    """What the classes of one prefix take in place of ``chop=``.

    Args:
        kind: the quantizer that is made.
        names: its argument by each word.
        defaults: its arguments where nothing else is said; without any, no word means no quantizer.
    """

    kind: Callable[..., Any]
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def quantizer(self, chop: Any, options: dict[str, Any]) -> Any:
        """`chop`, or the quantizer of the words among `options`, which are taken out of it.

        Raises:
            TypeError: where both are said, or a word twice.
        """
        said = [word for word in self.names if word in options]
        if not said:
            return self.kind(**self.defaults) if chop is None and self.defaults else chop
        if chop is not None:
            raise TypeError(f"chop= and {said[0]}= say the same; pass one of them")
        arguments = {self.names[word]: options.pop(word) for word in said}
        if len(arguments) < len(said):
            raise TypeError(f"{' and '.join(said)} say an argument of {self.kind.__name__} twice")
        return self.kind(**{**self.defaults, **arguments})


WORDS = {
    "Quantized": Words(Chop, _FLOAT),
    "IQuantized": Words(Chopi),
    "FPQuantized": Words(Chopf, _FIXED, {"ibits": 8, "fbits": 8}),
    "IntQuantized": Words(Chopi, {"num_bits": "bits"}, {"bits": 8, "symmetric": True}),
}
