"""Published measurements as programs, with predictions beside them.

policies  runs  training  micro  published   measured rows as programs
calibrate                                    fitting of the constants of `meshlib.estimation.time.physics`
naive  validating  report                    predicted beside measured, with errors
"""
