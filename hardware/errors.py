"""The one error of the hardware package.

Bad input (a negative size, an unknown chip, a wrong rank, a rate that is not finite) is answered with
a single `HardwareError` whose message names the argument, its value and, where there is one, a remedy.
"""


class HardwareError(ValueError):
    """An argument that no machine of this library can take."""
