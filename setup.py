"""The native part, which is optional: without a compiler, torch computes the same."""

from setuptools import Extension, setup

SOURCES = ["module.c", "plain.c", "avx2.c"]
HEADERS = ["network.h", "linear.h", "step.h"]
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi"]

if __name__ == "__main__":
    extension = Extension(
        "agent_forge.native._native",
        [f"agent_forge/native/{name}" for name in SOURCES],
        depends=[f"agent_forge/native/{name}" for name in HEADERS],
        extra_compile_args=FLAGS,
        py_limited_api=True,
        optional=True,
    )
    setup(ext_modules=[extension])
