"""Core records of the language: graph, operation records, dtypes, errors, argument checks and files."""
