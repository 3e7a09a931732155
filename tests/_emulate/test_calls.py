"""`jc.emulate`: its forms, and that calls with arguments of the same shapes trace, plan and compile once."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import contextlib
import copy
import dataclasses
import decimal
import enum
import functools
import gc
import inspect
import math
import operator
import os
import random
import sys
import time
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulate_cases import KEY, X
from further import Further
from jax import lax

import jchop as jc
from jchop._emulate.rules import trace
from jchop._program.closures import reachable_objects, same_objects
from jchop._program.jaxprs import same_program

further = Further()

# -- the decorator -----------------------------------------------------------------------------------------------------


@jc.emulate("e5m2")
def third(x: Any, by: float = 3.0) -> Any:
    """A third."""
    return x / by


class Holder:
    """Methods in other arithmetics."""

    scale = 2.0

    @jc.emulate(spec="e5m2", rules={"mul": None})
    def scaled(self, x: Any) -> Any:
        return x / 3 * self.scale

    @staticmethod
    @jc.emulate(None)
    def plain(x: Any) -> Any:
        return x / 3

    @classmethod
    @jc.emulate("e5m2")
    def of_class(cls, x: Any) -> Any:
        return x * cls.scale


@pytest.mark.smoke
def test_a_decorator_is_the_call() -> None:
    assert third(X).tolist() == jc.emulate(third.__wrapped__, "e5m2")(X).tolist()
    assert (third.__name__, third.__doc__, third.__module__) == ("third", "A third.", __name__)
    assert list(inspect.signature(third).parameters) == ["x", "by", "key"]
    assert float(jax.jit(third)(1.0)) == float(third(1.0, by=3.0)) == 0.3125
    drawn = jc.emulate("e5m2:stochastic", key=KEY)(lambda x: x / 3)
    assert drawn(X).tolist() == jc.emulate(lambda x: x / 3, "e5m2:stochastic", key=KEY)(X).tolist()


@pytest.mark.smoke
def test_methods() -> None:
    holder = Holder()
    assert float(holder.scaled(1.0)) == float(Holder.scaled(holder, 1.0)) == 0.625
    holder.scale = 3.0
    assert float(holder.scaled(1.0)) == float(jax.jit(holder.scaled)(1.0)) == 0.9375
    assert float(Holder.plain(1.0)) == float(np.float32(1) / np.float32(3))
    assert float(Holder.of_class(1.1)) == 2.0
    rows = Holder.scaled.report(holder, 1.0).rows
    assert [(row.primitive, row.spec) for row in rows] == [("div", "float8_e5m2"), ("mul", "carrier")]


def test_arguments_mixed_up() -> None:
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: jc.emulate("e5m2", jnp.sin), r"the function comes first: emulate\(sin, 'e5m2'\)"),
        (lambda: jc.emulate(jnp.sin), r"no spec; write emulate\(sin, 'bfloat16'\) or @emulate"),
        (lambda: jc.emulate(), "no function and no spec"),
        (lambda: jc.emulate("e5m2", "e5m2"), "fun='e5m2' must be a function"),
        (lambda: jc.emulate(3), "fun=3 must be a function"),
        (lambda: jc.emulate(spec=jnp.sin), "must be a Spec, a format, its text, or None"),
        (lambda: jc.emulate("e5m2")(3), "fun=3 must be a function"),
        (lambda: jc.emulate("e5m2")(staticmethod(abs)), "put @staticmethod above emulate"),
        (lambda: jc.emulate(jnp.sin, "e5m2", max_turns=1.5), "max_turns"),
    ]
    for call, words in calls:
        with pytest.raises(TypeError, match=words):
            call()
            pytest.fail(f"no error says {words!r}")


def noisy(x: Any, key: Any = None) -> Any:
    return x if key is None else x + jax.random.uniform(key)


def noisy_by_name(x: Any, *, key: Any) -> Any:
    return noisy(x, key)


@pytest.mark.parametrize("fun", [noisy, jax.jit(noisy), lambda x, key: noisy(x, key), noisy_by_name])
def test_a_key_by_name_that_only_the_function_could_use(fun: Any) -> None:
    """It is an error, not noise that is silently lost."""
    low = jc.emulate(fun, "bfloat16")
    for call in (low, jax.jit(low)):
        with pytest.raises(TypeError, match=r"no rounding is stochastic, and fun=.*; pass fun's own key by position"):
            call(1.0, key=KEY)


def test_reports_refuse_such_a_key() -> None:
    low = jc.emulate(noisy, "bfloat16")
    for call in (low.blame, functools.partial(low.report, trace_values=True)):
        with pytest.raises(TypeError, match="no rounding is stochastic, and fun=noisy"):
            call(1.0, key=KEY)


def test_a_key_by_name_is_that_of_the_roundings() -> None:
    """Beside a key of the function by position, in every arithmetic; and for functions that have no such parameter."""
    one, other = jax.random.split(KEY)
    for spec in ("bfloat16", "bfloat16:stochastic"):
        low = jc.emulate(noisy, spec, key=KEY)
        assert float(low(1.0, one, key=KEY)) == float(low(1.0, one)) > 1
        assert float(low(1.0, one)) != float(low(1.0, other))
    assert float(low(1.0, key=KEY)) == 1  # so it is documented
    for fun in (lambda x, **key: x + len(key), lambda x, /, **rest: x + len(rest), jnp.asarray):
        assert float(jc.emulate(fun, "bfloat16")(1.0, key=KEY)) == 1
    assert float(jc.emulate(lambda key, /, x: noisy(x, key), "bfloat16")(one, 0.0, key=KEY)) > 0
    with pytest.raises(TypeError, match=r"missing 1 .* argument: 'key'; pass fun's own key by position"):
        jc.emulate(lambda x, key: noisy(x, key), "bfloat16:stochastic")(1.0, key=KEY)
    with pytest.raises(TypeError, match=r"missing 1 .* argument: 'key'(\n|$)"):
        jc.emulate(lambda x, key: noisy(x, key), "bfloat16:stochastic", key=KEY)(1.0)


@pytest.mark.parametrize(
    ("fun", "shown"),
    [
        (lambda x, **rest: x, "(x, *, key=None, **rest)"),
        (noisy, "(x: 'Any', key: 'Any' = None) -> 'Any'"),
        (Holder.scaled.__wrapped__, "(self, x: 'Any', *, key=None) -> 'Any'"),
    ],
)
def test_the_signature_has_the_key(fun: Any, shown: str) -> None:
    low = jc.emulate(fun, "bfloat16")
    assert str(inspect.signature(low)) == str(inspect.signature(jax.jit(low))) == shown
    assert str(inspect.signature(copy.deepcopy(low))) == shown
    assert not hasattr(jc.emulate(max, "bfloat16"), "__signature__")  # as the function itself has none


# -- calls that are not traced again -----------------------------------------------------------------------------------


def counted(traces: list[int]) -> Callable[[Any], Any]:
    def fun(x: Any) -> Any:
        traces.append(1)
        return lax.fori_loop(0, 3, lambda i, c: c * 1.1, jnp.sin(x))

    return fun


@further
def equal_shapes_trace_once() -> None:
    traces: list[int] = []
    low = jc.emulate(counted(traces), "e5m2")
    first = low(X)
    assert low(X).tolist() == first.tolist() and len(traces) == 1
    assert low(2 * X).tolist() == jax.jit(low)(2 * X).tolist() and len(traces) == 1
    low(X[:2])
    low(X)
    assert len(traces) == 2
    jax.grad(lambda x: low(x).sum())(X)
    assert len(traces) == 2


def test_what_a_function_reads_may_change() -> None:
    """A variable, a list, an attribute, a default; the plan is kept."""
    w, parts, holder = jnp.float32(2), [jnp.float32(1)], Holder()
    low = jc.emulate(lambda x: x * w + parts[0] - holder.scale, "e5m2")
    assert float(low(1.0)) == 2 + 1 - 2
    w = jnp.float32(3)
    assert float(low(1.0)) == 3 + 1 - 2
    parts[0] = jnp.float32(4)
    assert float(low(1.0)) == 3 + 4 - 2
    holder.scale = 4.0
    assert float(low(1.0)) == 3 + 4 - 4
    assert len(low.programs._programs) == 2  # the scale is a number of the program, the arrays are constants
    one = lambda x, n: x * n  # noqa: E731
    low = jc.emulate(one, "e5m2")
    assert [float(low(1.0, n)) for n in (2, True, 3)] == [2, 1, 3]


def test_numbers_that_change_in_place() -> None:
    table = np.array([1.0, 2.0], np.float32)
    low = jc.emulate(lambda x: x * jnp.asarray(table), "e5m2")
    assert low(1.0).tolist() == [1, 2]
    table[0] = 3
    assert low(1.0).tolist() == [3, 2]


@pytest.mark.parametrize("dtype", ["float64", "int64", "float32"])
@pytest.mark.parametrize("shape", [(2,), ()])
@pytest.mark.in_turn(3)
def test_arrays_of_numpy_that_change_in_place(shape: tuple[int, ...], dtype: str) -> None:
    """Without x64 JAX keeps what it has converted while a program has it; plain JAX is not wrong, either."""
    table = np.full(shape, 2, dtype)
    low = jc.emulate(
        lambda x: [x * table, jax.jit(lambda x: x * table)(x), lax.scan(lambda c, _: (c * table, None), x, None, 1)[0]],
        "e5m2",
    )
    x, wanted = jnp.full(shape, 1.25), {2: 2.5, 7: 8.0, 3: 4.0}  # 8.75 and the tie 3.75 in e5m2
    gc.disable()  # nothing waits for it
    try:
        for number in (2, 7, 7, 3):
            table[...] = number
            assert [np.unique(part).tolist() for part in low(x)] == [[wanted[number]]] * 3
            np.testing.assert_array_equal(jnp.asarray(table), table)
    finally:
        gc.enable()
    assert not low.programs._functions
    assert len(low.programs._programs) <= 3


def test_a_changed_constant_is_rounded() -> None:
    """2 is a number of e5m2, so the first plan does not round it."""
    scale = np.array(2.0, np.float32)
    low = jc.emulate(lambda x: x > scale, "e5m2")
    assert not low(2.0)
    scale[...] = 2.1
    assert not low(2.0)
    scale[...] = 1.9
    assert not low(2.0)  # rounded to 2


def test_captured_tracers() -> None:
    """The same function within transformations, before and after it saw their tracers."""
    cell = [jnp.float32(2)]
    low = jc.emulate(lambda x: lax.cond(x > 0, lambda v: v * cell[0], jnp.sin, x), "e5m2")

    def with_cell(w: Any) -> Any:
        cell[0] = w
        return low(1.0)

    assert float(low(1.0)) == 2
    for _ in range(2):
        assert float(jax.grad(with_cell)(jnp.float32(3))) == 1
        assert jax.vmap(with_cell)(jnp.array([3.0, 4.0])).tolist() == [3, 4]
        assert float(jax.jit(with_cell)(jnp.float32(5))) == 5
        cell[0] = jnp.float32(2)
        assert float(low(1.0)) == 2


def test_another_context_is_another_program() -> None:
    low = jc.emulate(lambda x: x + jnp.arange(2.0), "e5m2")
    assert low(1.0).dtype == jnp.float32
    with jax.enable_x64(True):
        assert low(jnp.float64(1)).dtype == jnp.float64
    assert low(1.0).dtype == jnp.float32


def test_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither arguments by the function, nor the function by JAX's caches; and no more programs than a bound."""
    monkeypatch.setattr(trace, "_MOST_TRACES", 3)
    x = jnp.ones(7)
    given = weakref.ref(x)

    def made(x: Any) -> tuple[Any, Any]:
        def fun(v: Any, n: int = 0) -> Any:
            return jnp.maximum(v, 0) * 1.1

        low = jc.emulate(fun, "e5m2")
        low(x)
        jax.jit(low).lower(x)
        return low, weakref.ref(fun)

    low, fun = made(x)
    del x
    gc.collect()
    assert given() is None and fun() is not None
    for n in range(5):
        low.programs.of((np.ones(n, np.float32), n), {})
    assert len(low.programs._programs) == len(low.programs._functions) == 3
    del low
    gc.collect()
    assert fun() is None


def test_copies_and_threads() -> None:
    low = jc.emulate(jnp.sin, "e5m2")
    want = low(X).tolist()
    assert copy.deepcopy(low)(X).tolist() == want
    many = jc.emulate(lambda x: jnp.sin(x) + holder.scale, "e5m2")
    holder = Holder()
    sizes = [np.ones(1 + n % 3, np.float32) for n in range(24)]
    with ThreadPoolExecutor(4) as pool:
        assert [len(x) for x in pool.map(many, sizes)] == [x.size for x in sizes]
    assert len(many.programs._programs) >= 3


class Tagged:
    """A tree with data that cannot be hashed or compared."""

    def __init__(self, x: Any, tag: Any) -> None:
        self.x, self.tag = x, tag


jax.tree_util.register_pytree_node(Tagged, lambda t: ((t.x,), t.tag), lambda tag, leaves: Tagged(*leaves, tag))


def test_trees_of_any_kind() -> None:
    low = jc.emulate(lambda t: t.x * jnp.asarray(t.tag, jnp.float32), "e5m2")
    for tag in (np.ones(2), np.zeros(2), np.ones(2)):
        assert low(Tagged(1.25, tag)).tolist() == (1.25 * tag).tolist()


@further
@pytest.mark.in_turn(100)
@pytest.mark.parametrize(
    "fun",
    [
        lambda x: (x * 0.5, x, 3.0, 3, x > 1, x * 1j, np.float32(2) * x, jnp.ones(2) * x),
        lambda x: lax.scan(lambda c, _: (c * 1.5, c), x, None, length=2),
        lambda x: (lax.fori_loop(0, 3, lambda i, c: c + 1, 0), lax.cond(x > 1, jnp.exp, lambda x: -x, x)),
    ],
)
def results_have_the_types_that_they_have_in_jit(fun: Callable[[Any], Any]) -> None:
    def types_of(fun: Callable[[Any], Any]) -> list[Any]:
        return [(x.dtype, x.weak_type) for x in jax.tree.leaves(fun(2.0))]

    for spec in ("bfloat16", None):
        low = jc.emulate(fun, spec)
        assert types_of(low) == types_of(jax.jit(low)) == types_of(jax.jit(fun))
    assert types_of(jc.emulate(fun, "bfloat16", stop_at="nan")) == types_of(jax.jit(fun))


def test_an_error_names_the_function() -> None:
    def with_text(x: Any) -> Any:
        return x / 3, "text"

    with pytest.raises(TypeError, match=r"with_text at .*test_calls\.py.*'str'"):
        jc.emulate(with_text, "bfloat16")(1.0)


def test_the_report_has_the_lines_of_this_call() -> None:
    def fun(x: Any, first: bool) -> Any:
        if first:
            return x * 2.0
        return x * 2.0

    low = jc.emulate(fun, "e5m2")
    low(1.0, True)
    low(1.0, False)
    assert len(low.programs._programs) == 1
    lines = [low.report(1.0, first).rows[0].source.rpartition(":")[2] for first in (True, False)]
    assert [int(line) - fun.__code__.co_firstlineno for line in lines] == [2, 3]


def test_captured_objects() -> None:
    """Those of partial functions, methods, functions with derivative rules and modules; not of objects of classes."""
    shared = jnp.ones(2)

    def make() -> Any:
        inner = jax.custom_jvp(lambda x: x * shared)
        return functools.partial(lambda f, x: f(x), inner)

    made = make()
    before = reachable_objects(made)
    assert before is not None and same_objects(before, reachable_objects(made))
    shared = jnp.ones(2)
    assert not same_objects(before, reachable_objects(made))
    holder = Holder()
    assert reachable_objects(lambda x: x * holder.scale) is None
    assert reachable_objects(holder.scaled) is None
    assert reachable_objects(lambda x: jnp.sin(x) + jc.round_to_format(x, "e5m2")) is not None


def gained(x: Any) -> Any:
    return x * gained.gain


@pytest.mark.parametrize("owner", [gained, *(wrap(lambda x: x) for wrap in (jax.grad, jax.jit, jax.custom_jvp))])
def test_attributes_of_functions(owner: Any) -> None:
    """Read by itself, or by another function."""
    fun = gained if owner is gained else lambda x: x * owner.gain
    low, owner.gain = jc.emulate(fun, "e5m2"), 3.0
    assert float(low(2.0)) == 6
    owner.gain = 5.0
    assert float(low(2.0)) == 10
    assert same_objects(reachable_objects(fun), reachable_objects(fun))


class Mode(enum.Enum):
    """Members with a value that is changed in place, and with an attribute."""

    ONE = [3.0]  # noqa: RUF012

    def __init__(self, _: Any) -> None:
        self.gain = 3.0


Plain = enum.Enum("Plain", "A B")


class Real(float):
    gain = 3.0


@dataclasses.dataclass
class Fields:
    other: int = 0
    gain: ClassVar[float] = 3.0


Fields.__module__ = "numpy"  # as if of a library, whose classes do not change


@pytest.mark.parametrize("owner", [Mode.ONE, Real(1), Fields()])
def test_attributes_of_members_of_subclasses_of_numbers_and_beside_fields(owner: Any) -> None:
    low, owner.gain = jc.emulate(lambda x: x * owner.gain, "e5m2"), 3.0
    assert float(low(2.0)) == 6
    owner.gain = 5.0
    assert float(low(2.0)) == 10


def test_values_of_members() -> None:
    low = jc.emulate(lambda x: x * Mode.ONE.value[0], "e5m2")
    assert float(low(2.0)) == 6
    Mode.ONE.value[0] = 5.0
    assert float(low(2.0)) == 10
    first, again, second = (reachable_objects(lambda x, m=m: x * m.value) for m in (Plain.A, Plain.A, Plain.B))
    assert first is not None and again is not None and second is not None
    assert same_objects(first[1:], again[1:]) and not same_objects(first[1:], second[1:])


IMPORTS = [
    "from conf import gain\n    return x * gain",
    "from conf import gain as g, other\n    return x * g",
    "import conf; return x * conf.gain",
    "import conf\n    return (lambda v: v * conf.gain)(x)",
    "import conf; return x * operator.attrgetter('gain')(conf)",
    "import conf; get = lambda one, _: one.gain; return x * get(conf, conf.gain)",
    "try: import conf.part as p\n    except ImportError: import conf as p\n    return x * p.gain",
    "import conf as c\n    return jax.vmap(lambda v: v * c.gain)(x[None])[0]",
    "import conf.part\n    return x * conf.part.gain",
    "import conf.part as p; return x * p.gain",
    "from conf import part as p\n    return p.scaled(x)",
    "from . import gain\n    return x * gain",
    "from .part import gain\n    return x * gain",
    "global gain\n    from conf import gain\n    return x * gain",
    "class K:\n        from conf import gain\n    return x * K.gain",
    "import conf\n    return x * getattr(conf, 'gain')",
    "return x * mine.gain",
    "return x * getattr(mine, 'gain')",
    "return x * mine.part.gain",
]


def modules(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package `conf` with a module `part`."""
    conf, part = types.ModuleType("conf"), types.ModuleType("conf.part")
    exec("gain = 3.0\ndef scaled(x):\n    return x * gain", part.__dict__)
    conf.__dict__.update(gain=3.0, other=1.0, part=part)
    monkeypatch.setitem(sys.modules, "conf", conf)
    monkeypatch.setitem(sys.modules, "conf.part", part)
    return conf


@pytest.mark.parametrize("package", [{"__package__": "conf"}, {"__spec__": ModuleSpec("conf.user", None)}])
def test_modules_that_functions_read(package: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for body in IMPORTS:
        conf = modules(monkeypatch)
        names = {"__name__": "conf.user", "jax": jax, "operator": operator, "mine": conf, **package}
        exec(f"def fun(x):\n    {body}", names)
        low = jc.emulate(names["fun"], "e5m2")
        assert float(low(jnp.float32(2))) == 6, body
        before = reachable_objects(names["fun"])
        # A module alone is not known.
        assert same_objects(before, reachable_objects(names["fun"])) is ("get" not in body), body
        conf.gain = conf.part.gain = 5.0
        assert float(low(jnp.float32(2))) == 10, body


def test_modules_that_may_change_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not imported, one that is not there, and one that computes its attributes."""

    def lazy(x: Any) -> Any:
        import conf  # pyright: ignore[reportMissingImports]

        return x * conf.computed

    assert reachable_objects(lazy) is None
    modules(monkeypatch).__dict__["__getattr__"] = lambda name: 2.0
    assert reachable_objects(lazy) is None
    names: dict[str, Any] = {"__name__": "conf.user", "__package__": "conf"}
    exec("def fun(x):\n    from ... import gain\n    return x * gain", names)
    assert reachable_objects(names["fun"]) is None


class Answers:
    """Has every attribute."""

    def __getattr__(self, name: str) -> Any:
        return gained


NUMBERS = [1.0, 2.0]
READER = NUMBERS.__getitem__


def test_state_is_read_in_every_call() -> None:
    of_state: list[Callable[[Any], Any]] = [
        lambda x: x * float(os.environ["GAIN"]),
        functools.partial(lambda read, x: x * float(read("GAIN")), os.getenv),
        lambda x: x * decimal.getcontext().prec,
        functools.partial(lambda read, x: x * read().prec, decimal.getcontext),
        lambda x: x * globals()["GAIN"],
        lambda x: x * eval("GAIN"),
        lambda x: x * gained.__globals__["GAIN"],
        lambda x: getattr(sys.modules[__name__], "gained")(x),  # noqa: B009
        lambda x: x * np.random.rand(),
        lambda x: x * np.random.default_rng().random(),
        functools.partial(lambda draw, x: x * draw(), random.random),
        functools.partial(lambda clock, x: x * clock(), time.time),
        lambda x: x * time.time(),
        functools.partial(lambda answers, x: answers.scaled(x), Answers()),
        functools.partial(lambda kind, x: x * kind("1"), decimal.Decimal),
    ]
    assert [place for place, fun in enumerate(of_state) if reachable_objects(fun) is not None] == []


def test_what_stays_known() -> None:
    """Pure functions of the standard library, JAX and NumPy, imported anywhere."""

    def fun(key: Any, x: Any) -> Any:
        from jax import lax

        with contextlib.nullcontext():
            x = lax.fori_loop(0, 2, lambda i, c: c * math.pi, x)
        return functools.reduce(operator.mul, [np.sin(1.0), x, len([x])]) + jax.random.normal(key)

    assert same_objects(reachable_objects(fun), reachable_objects(fun))
    before = reachable_objects(READER)
    assert same_objects(before, reachable_objects(READER))
    NUMBERS[1] += 1.0
    assert not same_objects(before, reachable_objects(READER))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (lambda x: lax.scan(lambda c, _: (c * 2.0, c), jnp.sin(x), None, 3), True),
        (lambda x: lax.scan(lambda c, _: (c * 2.5, c), jnp.sin(x), None, 3), False),
        (lambda x: lax.scan(lambda c, _: (c * 2.0, c), jnp.cos(x), None, 3), False),
        (lambda x: lax.scan(lambda c, _: (c * 2.0, x), jnp.sin(x), None, 3), False),
        (lambda x: lax.scan(lambda c, _: (c * 2.0, c), jnp.sin(x), None, 4), False),
        (lambda x: jax.named_scope("a")(lax.scan)(lambda c, _: (c * 2.0, c), jnp.sin(x), None, 3), False),
    ],
)
def test_equal_programs(other: Callable[[Any], Any], same: bool) -> None:
    one = jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (c * 2.0, c), jnp.sin(x), None, 3))(X).jaxpr
    assert same_program(one, jax.make_jaxpr(other)(X).jaxpr) is same
    assert not same_program(one, jax.make_jaxpr(other)(X[:2]).jaxpr)


# -- derivative rules, which JAX makes anew in each trace --------------------------------------------------------------


def looped(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: c * 1.5, x)


@jax.custom_jvp
def with_jvp(x: Any) -> Any:
    return lax.cond(x[0] > 0, looped, jnp.negative, x)


@jax.custom_vjp
def with_vjp(x: Any) -> Any:
    return looped(x)


@jax.custom_batching.custom_vmap
def with_batches(x: Any) -> Any:
    return looped(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 2 * tangents[0]))
with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, g: (3 * g,))
with_batches.def_vmap(lambda size, batched, x: (looped(x), batched[0]))


def kept(x: Any) -> Any:
    policy = jax.checkpoint_policies.save_only_these_names("none")
    return jax.checkpoint(lambda x: with_jvp(with_vjp(x)), policy=policy)(x)


def solved(x: Any) -> Any:
    return lax.custom_linear_solve(lambda y: 2 * y, x, lambda _, b: looped(with_vjp(b)), symmetric=True)


@pytest.mark.parametrize(
    "fun",
    [
        with_jvp,
        with_vjp,
        with_batches,
        kept,
        solved,
        lambda x: lax.fori_loop(0, 2, lambda i, c: with_jvp(with_vjp(c)), x),
    ],
)
def test_a_second_call_compiles_nothing(fun: Callable[[Any], Any], caplog: pytest.LogCaptureFixture) -> None:
    """Nor does a call after a derivative, which takes the rules of its own trace."""
    answers = types.SimpleNamespace(fun=fun)  # may change unseen, so that each call traces it
    low = jc.emulate(lambda x: answers.fun(x), "e5m2")

    def compiled() -> int:
        caplog.clear()
        with jax.log_compiles():
            low(X)
        return len([record for record in caplog.records if "Compiling" in record.message])

    assert compiled() > 0
    assert compiled() == 0
    if fun is not with_batches:  # JAX has no reverse mode of it
        np.testing.assert_array_equal(jax.grad(lambda x: low(x).sum())(X), jax.grad(lambda x: fun(x).sum())(X))
    assert compiled() == 0


@further.first
def a_derivative_takes_the_rule_of_its_own_trace() -> None:
    slope = types.SimpleNamespace(value=2.0)

    def fun(x: Any) -> Any:
        @jax.custom_jvp
        def inner(x: Any) -> Any:
            return x

        value = slope.value
        inner.defjvp(lambda primals, tangents: (inner(*primals), value * tangents[0]))
        return inner(x)

    low = jc.emulate(fun, "e5m2")
    for slope.value in (2.0, 3.0):
        assert float(low(1.0)) == 1
        assert float(jax.grad(low)(1.0)) == slope.value


# -- what a call costs -------------------------------------------------------------------------------------------------


def unrolled(x: Any, y: Any) -> Any:
    for i in range(200):
        x = x * y if i % 2 else x + y
    return x


def layers(x: Any, y: Any) -> Any:
    for _ in range(3):
        x = jnp.tanh(x @ y + 0.1)
    return x


def turned(x: Any, y: Any) -> Any:
    return lax.while_loop(_below, _grown, jnp.abs(x)) * y


def _below(c: Any) -> Any:
    return jnp.all(c < 9.0)


def _grown(c: Any) -> Any:
    return c * 1.2 + 0.7


def calls_of(fun: Callable[..., Any], *args: Any) -> int:
    """How many functions of Python a call of the function calls."""
    count = 0

    def seen(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        fun(*args)
    finally:
        sys.setprofile(None)
    return count


@further
@pytest.mark.parametrize("fun", [turned, *(pytest.param(fun, marks=pytest.mark.slow) for fun in (layers, unrolled))])
def a_second_call_is_quick(fun: Callable[..., Any]) -> None:
    """By the functions of Python that run: at most 50 times the plain function's, and a tenth of the first call's."""
    x, y = jnp.ones((4, 4)), jnp.full((4, 4), 0.9, jnp.float32)
    fun(x, y)
    for spec in ("bfloat16", "e4m3:stochastic"):
        low = jc.emulate(fun, spec, key=KEY)
        first, second = calls_of(low, x, y), calls_of(low, x, y)
        assert 0 < second <= min(50 * calls_of(fun, x, y), first / 10), (spec, first)


test_further = further.test()
