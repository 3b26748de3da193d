"""JAX: functions of its users brought in as programs."""
