"""The passes over the MLIR of an operation's functions: JAX writes a constant and its broadcast for each use."""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir, passmanager


def simplify_callees(call: Any, module: Any) -> None:
    """Writes each constant once in the function of a call, and in the functions that it calls.

    Args:
        call: an operation ``func.call``; others, such as the sharding constraint after a call, are left unchanged.
        module: JAX's context of the module.
    """
    remove = passmanager.PassManager.parse("func.func(cse)", module.context)
    names = [ir.FlatSymbolRefAttr(call.attributes["callee"]).value] if "callee" in call.attributes else []
    for name in names:  # which grow
        function = module.symbol_table[name].operation
        callees, broadcasts = _calls_and_broadcasts(function)
        for broadcast in broadcasts:
            _write_as_constant(broadcast)
        remove.run(function)
        names += [callee for callee in dict.fromkeys(callees) if callee not in names]


def _calls_and_broadcasts(function: Any) -> tuple[list[str], list[Any]]:
    """The names of the functions that a function calls, and its broadcasts of constants."""
    callees: list[str] = []
    broadcasts: list[Any] = []

    def look(operation: Any) -> Any:
        if operation.name == "func.call":
            callees.append(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)
        elif operation.name == "stablehlo.broadcast_in_dim":
            maker = operation.operands[0].owner
            if getattr(maker, "name", None) == "stablehlo.constant":  # and no argument of a block
                broadcasts.append(operation)
        return ir.WalkResult.ADVANCE

    function.walk(look)
    return callees, broadcasts


def _write_as_constant(broadcast: Any) -> None:
    """Replaces a broadcast constant by a constant array, which is one operation and not two."""
    value, (kind,) = ir.DenseElementsAttr(broadcast.operands[0].owner.attributes["value"]), broadcast.results.types
    if value.is_splat:
        constant = ir.Operation.create(
            "stablehlo.constant",
            results=[kind],
            attributes={"value": ir.DenseElementsAttr.get_splat(kind, value.get_splat_value())},
            loc=broadcast.location,
            ip=ir.InsertionPoint(broadcast),
        )
        broadcast.results[0].replace_all_uses_with(constant.results[0])
        broadcast.erase()
