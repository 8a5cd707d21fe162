"""What pyproject.toml cannot say: folders at the top of the repository that go into the wheel below the package."""

from setuptools import find_packages, setup

SHIPPED = {f"megatron_lossy.config.shipped_files.{name}": name for name in ("configs", "launch", "patches")}

setup(
    packages=[*find_packages(include=["megatron_lossy*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={package: ["**/*"] for package in SHIPPED}
    | {"megatron_lossy.transport.udp": ["c/*.[ch]"], "megatron_lossy.lab.calibration": ["budget.yaml"]},
)
