"""The one error of the hardware package.

Bad input (a negative size, an unknown chip, a wrong rank, a rate that is not finite) is answered with
a single `HardwareError` whose message names the argument, its value and, where there is one, a remedy.
"""


class HardwareError(ValueError):
    """An invalid argument to a function of the hardware package.

    Example:
      >>> from hardware import Slice
      >>> try:
      ...     Slice("v5e-7")
      ... except HardwareError as fault:
      ...     print(fault)
      'v5e-7' is not a slice of v5e (the number counts chips); the nearest are v5e-1, v5e-4, v5e-8
    """
