"""The version of the distribution."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("meshlib-tpu")
except PackageNotFoundError:  # a checkout that is not installed
    VERSION = "0+unknown"
