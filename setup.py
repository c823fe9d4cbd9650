"""Names the packages: the folder `api` is `beatrice`, a room is `beatrice.ROOM`."""

import shutil

from setuptools import find_packages, setup

# Setuptools would also pack the modules of an earlier version that was built here.
shutil.rmtree("build/lib", ignore_errors=True)
ROOMS = ("extract", "jaxprobe", "selection", "pgir", "benchmarks")
setup(
    packages=[
        "beatrice",
        *(
            f"beatrice.{package}"
            for package in find_packages(include=[f"{room}*" for room in ROOMS])
        ),
    ],
    package_dir={"beatrice": "api", **{f"beatrice.{room}": room for room in ROOMS}},
)
