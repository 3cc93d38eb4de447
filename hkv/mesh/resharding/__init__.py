"""Moving a request's cache between parallel shapes: `plan.py` says what goes where, `transfer.py` does it."""
