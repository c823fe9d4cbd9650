"""Names the packages: the folder `api` is installed as `beatrice`."""

from setuptools import find_packages, setup

ROOMS = ("extract", "jaxprobe", "selection", "pgir", "benchmarks")
setup(
    packages=["beatrice", *find_packages(include=[f"{room}*" for room in ROOMS])],
    package_dir={"beatrice": "api"},
)
