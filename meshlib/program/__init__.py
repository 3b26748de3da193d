"""The records of a lowered program and everything that is read off them: checks, work, memory, text, comparison."""
