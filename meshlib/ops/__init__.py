"""The operations of the language; each is one record (see `meshlib.operation`) and the function that builds it."""
