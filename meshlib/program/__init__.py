"""The records of a lowered program, its checker, interpreter, analysis and views."""
