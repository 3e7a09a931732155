"""`OptimLP`: an optimizer of torch in low precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from jchop._common.checks import check, check_instance, check_int
from jchop._spec.spec import SpecLike
from jchop.torch import _operators as operators

_GRADIENT_ROLE, _ACCUMULATOR_ROLE, _WEIGHT_ROLE, _MOMENTUM_ROLE = range(4)
#: Attributes of a copied `OptimLP` that other optimizers do not have.
_STATE_ATTRIBUTES = ("optimizer", "gradient_scale", "seed", "steps", "accumulators", "_plans")


class OptimLP(Optimizer):
    """Optimizer with rounded gradients, accumulators, parameters and moments, in the order of QPyTorch's OptimLP.

    A step rounds the gradient, g = Qg(gradient_scale * gradient). The optimizer computes an update u from g at the
    accumulator a (at the parameter, if there is no accumulator). Then a = Qa(a + u), p = Qw(a), and every moment m =
    Qm(m), after its use. The sums have the dtype of the parameters, for float16 and bfloat16 float32; torch computes
    them. So bfloat16 parameters under a stochastic ``weight`` train without a master copy.

    Unlike QPyTorch's, it also scales gradients that are not rounded, and calls the closure. It accepts every optimizer
    with moments of the parameters' shapes, and has all its state in `state_dict`. Learning rate schedulers work as
    usual. A closure is evaluated at rounded parameters.

    A parameter without a gradient is frozen: neither it nor its moments change.

    Step n draws for parameter i from the key of the seed with n, i and the role folded in. The role is 0 for the
    gradient, 1 for the accumulator, 2 for the weight, and 3 or more for the moments in order.

    Args:
        optimizer: any optimizer of torch: SGD, Adam, AdamW, RMSprop, Adagrad ...
        weight: Qw, the rounding of parameters. Default None, here and below: not rounded.
        gradient: Qg. The rounded gradient replaces the gradient of the parameter.
        momentum: Qm, for every moment: a tensor of the optimizer's state with the shape of its parameter.
        accumulator: Qa. With it, a copy of the parameters, in float32 at least, is kept and updated in their place.
        gradient_scale: the factor of gradients, applied first: 1 / s for a loss multiplied by s. Default 1.
        seed: an integer from 0 to 2^64 - 1, for stochastic specs. Default 0. None: each rounding draws a key from
            torch's global generator.

    Raises:
        TypeError, ValueError: for an invalid spec. At a step, for parameters that cannot hold the results, or
            ``momentum`` for an optimizer without moments.

    References:
        Zhang et al., QPyTorch: A Low-Precision Arithmetic Simulation Framework, arXiv 1910.04540.

    Example:
        >>> import torch, jchop as jc
        >>> p = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = jc.torch.OptimLP(torch.optim.SGD([p], lr=0.1, momentum=0.9), weight="e5m2", gradient="e5m2")
        >>> p.grad = torch.tensor([1.3, -2.2])
        >>> optimizer.step()
        >>> p.tolist()
        [0.875, 1.25]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        weight: SpecLike | None = None,
        gradient: SpecLike | None = None,
        momentum: SpecLike | None = None,
        accumulator: SpecLike | None = None,
        gradient_scale: float = 1.0,
        seed: int | None = 0,
    ) -> None:
        check_instance("optimizer", optimizer, Optimizer, "an optimizer of torch")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        specs = {"gradient": gradient, "accumulator": accumulator, "weight": weight, "momentum": momentum}
        self._plans = {
            role: _optimizer_plan(name, spec) for role, (name, spec) in enumerate(specs.items()) if spec is not None
        }
        self.gradient_scale = gradient_scale
        self.seed = None if seed is None else check_int("seed", seed, 0, (1 << 64) - 1)
        self.steps = 0
        self.accumulators: dict[int, Tensor] = {}
        self._link()

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Makes one step of the optimizer.

        Args:
            closure: a function that computes the loss and its gradients, as for every optimizer of torch.

        Returns:
            The result of the closure; None without one.
        """
        leaves = [self._leaf(index, p) for index, p in enumerate(self._parameters())]
        try:
            if closure is None:
                self._lift(leaves)
            loss = self.optimizer.step(None if closure is None else self._evaluating(closure, leaves))
            self._round_moments(leaves)
            self._round_updates(leaves)
        finally:
            for leaf in leaves:
                leaf.lower()
        self.steps += 1
        return loss

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def _leaf(self, index: int, p: torch.nn.Parameter) -> _OptimizerLeaf:
        """A parameter of the optimizer with its accumulator, its float32 master copy."""
        accumulator = self.accumulators.get(index)
        if accumulator is None:
            accumulator = _as_float32(p.data).clone() if _ACCUMULATOR_ROLE in self._plans else _as_float32(p.data)
        return _OptimizerLeaf(index, p, p.data, accumulator)

    def _evaluating(self, closure: Callable[[], Any], leaves: list[_OptimizerLeaf]) -> Callable[[], Any]:
        """The closure, evaluated at rounded parameters; the optimizer gets rounded gradients and accumulators."""
        repeated = False

        def evaluate() -> Any:
            nonlocal repeated
            if repeated:
                self._round_updates(leaves, weights_alone=True)
            for leaf in leaves:
                leaf.lower()
            with torch.enable_grad():
                loss = closure()
            self._lift(leaves)
            repeated = True
            return loss

        return evaluate

    def _lift(self, leaves: list[_OptimizerLeaf]) -> None:
        """Replace parameters by the tensors that the optimizer updates, and gradients by rounded ones."""
        for leaf in filter(_OptimizerLeaf.moves, leaves):
            if _WEIGHT_ROLE in self._plans:
                operators.require_rounding(leaf.memory.dtype, leaf.memory.ndim, self._plans[_WEIGHT_ROLE].spec)
            if _ACCUMULATOR_ROLE in self._plans:
                self.accumulators[leaf.index] = leaf.working
            gradient = leaf.parameter.grad
            assert gradient is not None
            leaf.lift(self._round(_GRADIENT_ROLE, leaf, _as_float32(gradient) * self.gradient_scale))

    def _round_updates(self, leaves: list[_OptimizerLeaf], *, weights_alone: bool = False) -> None:
        """Round accumulators and parameters after the optimizer updated them."""
        for leaf in filter(_OptimizerLeaf.moves, leaves):
            if not weights_alone and _ACCUMULATOR_ROLE in self._plans:
                leaf.working.copy_(self._round(_ACCUMULATOR_ROLE, leaf, leaf.working))
            weight = self._round(_WEIGHT_ROLE, leaf, leaf.working)
            if weight.data_ptr() != leaf.memory.data_ptr():
                leaf.memory.copy_(weight)

    def _round_moments(self, leaves: list[_OptimizerLeaf]) -> None:
        if _MOMENTUM_ROLE not in self._plans:
            return
        trained, count = list(filter(_OptimizerLeaf.moves, leaves)), 0
        for leaf in trained:
            for index, value in enumerate(_moment_tensors(self.state.get(leaf.parameter, {}), leaf.memory.shape)):
                value.copy_(self._round(_MOMENTUM_ROLE, leaf, value, _MOMENTUM_ROLE + index))
                count += 1
        kind, spec = type(self.optimizer).__name__, self._plans[_MOMENTUM_ROLE].spec
        check(count or not trained, f"momentum={spec!r}, but {kind} keeps none")

    def _round(self, role: int, leaf: _OptimizerLeaf, x: Tensor, fold_in: int | None = None) -> Tensor:
        """A tensor rounded under the spec of its role, or as it is if the role has none."""
        plan = self._plans.get(role)
        if plan is None:
            return x
        if not plan.draws:
            words = operators.key_words(())
        elif self.seed is None:
            words = operators.generator_words()
        else:
            numbers = self.seed, self.steps, leaf.index, role if fold_in is None else fold_in
            words = operators.key_words(operators.seed_numbers(numbers))
        return operators.round_now(x, words, plan.spec, 0, True)

    # -- as an optimizer of torch --------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as for every optimizer of torch.

        Args:
            param_group: the parameters and their options.
        """
        optimizer = self.__dict__.get("optimizer")
        if optimizer is None:  # during construction
            super().add_param_group(param_group)
        else:
            optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer, the accumulators, and the number of steps."""
        return {"optimizer": self.optimizer.state_dict(), "accumulators": dict(self.accumulators), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a result of `state_dict`.

        Args:
            state_dict: the state of an optimizer of the same parameters.
        """
        leaves = [_OptimizerLeaf(index, p, p.data, _as_float32(p.data)) for index, p in enumerate(self._parameters())]
        for leaf in leaves:  # torch casts the state to the current dtype of the parameters
            leaf.lift(None if leaf.parameter.grad is None else _as_float32(leaf.parameter.grad))
        try:
            self.optimizer.load_state_dict(state_dict["optimizer"])
        finally:
            for leaf in leaves:
                leaf.lower()
        saved = state_dict["accumulators"].items()
        self.accumulators = {index: value.to(leaves[index].memory.device, copy=True) for index, value in saved}
        self.steps = state_dict["steps"]
        self._link()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _STATE_ATTRIBUTES}}

    def _link(self) -> None:
        """Share groups and state with the optimizer, which replaces them when it is loaded."""
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state


class _OptimizerLeaf:
    """A parameter, its memory, and the tensor that is updated for it: an accumulator, a float32 copy, or itself."""

    def __init__(self, index: int, parameter: torch.nn.Parameter, memory: Tensor, working: Tensor) -> None:
        self.index, self.parameter, self.memory, self.working = index, parameter, memory, working

    def moves(self) -> bool:
        """Whether optimizers move the parameter; one without a gradient is frozen."""
        return self.parameter.grad is not None

    def lift(self, gradient: Tensor | None) -> None:
        """Replace the data of the parameter by the updated tensor, with a gradient of its dtype."""
        self._set_data(self.working, gradient)

    def lower(self) -> None:
        """Restore the data of the parameter, in the same memory."""
        gradient = self.parameter.grad
        self._set_data(self.memory, None if gradient is None else gradient.to(self.memory.dtype))

    def _set_data(self, data: Tensor, gradient: Tensor | None) -> None:
        self.parameter.grad = None
        self.parameter.data = data
        self.parameter.grad = gradient


def _as_float32(x: Tensor) -> Tensor:
    """`x` in float32 at least."""
    return x.float() if x.element_size() == 2 else x


def _moment_tensors(state: dict[str, Any], shape: torch.Size) -> Iterator[Tensor]:
    """The tensors in the state of an optimizer that have the shape of the parameter."""
    for name, value in state.items():
        if isinstance(value, Tensor) and name != "step" and value.shape == shape and value.is_floating_point():
            yield value


def _optimizer_plan(name: str, spec: SpecLike) -> operators.SpecPlan:
    plan = operators.plan_of(spec)
    check(plan.gradient is None, f"{name}={str(spec)!r} rounds a gradient, but an optimizer step has none")
    return plan
