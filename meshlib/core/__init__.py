"""The language's own records: graph, operation records, dtypes, errors, arguments and files."""
