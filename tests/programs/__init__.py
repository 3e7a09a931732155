"""Programs that other people wrote, for the tests of `jc.emulate`."""

from programs.of_jax import JAX
from programs.of_packages import PACKAGES
from programs.of_science import SCIENCE
from programs.program import Program, equations, floats_of, named

__all__ = ["PROGRAMS", "Program", "equations", "floats_of"]

#: Every program by its name.
PROGRAMS: dict[str, Program] = named([*JAX, *PACKAGES, *SCIENCE])
